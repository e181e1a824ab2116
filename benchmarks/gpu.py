"""Training steps on a GPU: ours beside DistributedDataParallel with NCCL and beside torch alone, in turns, in one run.

    python benchmarks/gpu.py                                    # a world of one: 3 variants, and the engine's overheads
    HOROVODISH_TEST_SHARED_GPU=1 horovodish run -np 2 python benchmarks/gpu.py      # two ranks on one GPU
    python benchmarks/gpu.py --thresholds 4 16 25 64            # which fusion threshold is best
    python benchmarks/gpu.py --models                           # no model: the overheads alone

In a world of one, packing, NCCL's call and unpacking are really executed (HOROVODISH_PLANE=nccl); --timeline FILE
records them. But NCCL itself launches nothing for a sum in place of one rank, and a kernel of its own for an average:
the figures of one rank show what the engine costs, the figures of two ranks what a collective costs. Two ranks take
turns on one GPU, which can be slow: each part does as much as it can in its time. What is printed goes to
benchmarks/results/.
`benchmarks/gpu.sh` runs all of it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("HOROVODISH_PLANE", "nccl")

import torch
from torch import Tensor, nn

import horovodish.torch as hvd

ROUNDS = 7
STEPS = 20
WARM_UP_STEPS = 3
SECONDS = 60.0
PROBE_SECONDS = 10.0
BUCKET_MIB = 64
BUCKET_TENSORS = 160  # about as many as ResNet-50 has


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Gpt2(nn.Module):
    """The sizes of GPT-2 small: 12 layers of width 768, 12 heads, 50257 tokens, a context of 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(768), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        return self.layers(hidden, mask, is_causal=True) @ self.tokens.weight.t()


Batch = tuple[Tensor, Tensor]


def images(count: int) -> Batch:
    return torch.randn(count, 3, 224, 224, device="cuda"), torch.randint(1000, (count,), device="cuda")


def sentences(count: int) -> Batch:
    tokens = torch.randint(50257, (count, 1024), device="cuda")
    return tokens, tokens.roll(-1, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], int]] = {
    "resnet50": (resnet50, images, 64),
    "gpt2-small": (Gpt2, sentences, 8),
}


def step_function(name: str, batch_size: int, kind: str) -> Callable[[], None]:
    """One training step in bfloat16 autocast of a fresh model: `plain`, `ddp` or `ours`."""
    build, make, _ = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = build().cuda()
    inputs, targets = make(batch_size)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if kind == "ours":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
        loss.backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], steps: int) -> float:
    torch.cuda.synchronize()
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def affordable(seconds: float, each: float, wanted: int) -> int:
    """How many of what takes `each` seconds can be done in that time; as rank 0 says, at least 1."""
    return int(hvd.broadcast_object(max(1, min(wanted, int(seconds / each))), 0))


def compare(
    name: str, kinds: list[str], batch_size: int, rounds: int, steps: int, seconds: float
) -> tuple[dict[str, float], int]:
    """Median milliseconds per step of each kind, measured in turns, and how many steps were measured of each."""
    functions = {kind: step_function(name, batch_size, kind) for kind in kinds}
    for function in functions.values():
        seconds_of(function, WARM_UP_STEPS)
    each = sum(seconds_of(function, 1) for function in functions.values())
    rounds = affordable(seconds, each, rounds)
    steps = affordable(seconds / rounds, each, steps)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, function in functions.items():
            taken[kind].append(seconds_of(function, steps) * 1e3)
    return {kind: statistics.median(times) for kind, times in taken.items()}, rounds * steps


def seconds_until_done(work: Callable[[], object]) -> tuple[float, float]:
    """Until the host goes on, and until the GPU is done."""
    torch.cuda.synchronize()
    hvd.barrier()
    begin = time.perf_counter()
    work()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return host, time.perf_counter() - begin


def median_us(wanted: int, *works: Callable[[], object]) -> list[tuple[float, float]]:
    """For each of `works`: microseconds until the host goes on, and until the GPU is done. They take turns."""
    for work in works:
        seconds_until_done(work)
    each = sum(seconds_until_done(work)[1] for work in works)
    taken = [[seconds_until_done(work) for work in works] for _ in range(affordable(PROBE_SECONDS, each, wanted))]
    columns = [list(zip(*column, strict=True)) for column in zip(*taken, strict=True)]
    return [(statistics.median(host) * 1e6, statistics.median(whole) * 1e6) for host, whole in columns]


def tell_overheads(tell: Callable[[str], None], rounds: int) -> None:
    """What a small allreduce costs, beside torch.distributed's over NCCL; a bucket as one tensor and packed, whose
    difference is all that more than one stream could hide; and memory that the engine allocates, where the GPU was idle
    before and where it was not.
    """
    value = torch.ones(1, device="cuda")
    ours, theirs = median_us(
        rounds * 30,
        lambda: hvd.allreduce_(value, op=hvd.Sum, name="overhead"),
        lambda: torch.distributed.all_reduce(value),
    )
    for name, (host, done) in (("allreduce", ours), ("torch.distributed's", theirs)):
        tell(f"{name} of 4 bytes: host {host:.1f} us, GPU done after {done:.1f} us")
    whole = torch.zeros(BUCKET_MIB << 18, device="cuda")
    parts = [part.clone() for part in whole.chunk(BUCKET_TENSORS)]
    (_, one), (_, many) = median_us(
        rounds * 3,
        lambda: hvd.allreduce_(whole, op=hvd.Sum, name="one"),
        lambda: hvd.grouped_allreduce_(parts, op=hvd.Sum, name="many"),
    )
    tell(f"allreduce of {BUCKET_MIB} MiB: one tensor {one:.0f} us, packed from {BUCKET_TENSORS} {many:.0f} us")
    (_, first), (_, five) = median_us(
        rounds * 3,
        lambda: hvd.allgather(whole, name="gathered"),
        lambda: [hvd.allgather(whole, name="gathered") for _ in range(5)],
    )
    tell(f"allgather of {BUCKET_MIB} MiB: {first:.0f} us after an idle GPU, {(five - first) / 4:.0f} us after another")


def start_ddp() -> None:
    """torch.distributed over the same ranks, which MPI has started."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = hvd.broadcast_object(os.getpid() % 20000 + 20000, 0)
    os.environ.setdefault("MASTER_PORT", str(port))
    torch.distributed.init_process_group("nccl", rank=hvd.rank(), world_size=hvd.size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most, for each model")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="multiplies the batch sizes")
    parser.add_argument("--thresholds", nargs="*", type=float, help="fusion thresholds in MiB to compare, ours only")
    parser.add_argument("--timeline", help="records one step of each model, apart from what is measured")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "the ranks train different parameters")  # `plain` does
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here")
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    tell = functools.partial(print, flush=True) if hvd.rank() == 0 else lambda _: None
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    tell(f"{hvd.size()} rank(s), {torch.cuda.get_device_name()}, torch {torch.__version__}, torch's NCCL {nccl}")
    hvd.allreduce(torch.ones(1, device="cuda"))  # before torch.distributed: it tells NCCL that ranks may share a GPU
    start_ddp()
    tell_overheads(tell, options.rounds)
    for name in options.models:
        batch = max(1, int(MODELS[name][2] * options.batch_scale))
        if options.thresholds:
            for threshold in options.thresholds:
                hvd.shutdown()
                os.environ["HOROVODISH_FUSION_THRESHOLD_MB"] = str(threshold)
                hvd.init()
                seconds = options.seconds / len(options.thresholds)
                taken, steps = compare(name, ["ours"], batch, options.rounds, options.steps, seconds)
                tell(
                    f"{name:<11} batch {batch:>3}  threshold {threshold:>6} MiB  ours {taken['ours']:8.2f} ms  "
                    f"({steps} steps)"
                )
            continue
        kinds = ["plain", "ddp", "ours"]
        taken, steps = compare(name, kinds, batch, options.rounds, options.steps, options.seconds)
        columns = "  ".join(f"{kind} {taken[kind]:8.2f} ms" for kind in kinds)
        extra = (taken["ours"] - taken["plain"]) * 1e3
        tell(
            f"{name:<11} batch {batch:>3}  {columns}  ours/ddp {taken['ours'] / taken['ddp']:.3f}  "
            f"ours/plain {taken['ours'] / taken['plain']:.3f}  ours over plain {extra:.0f} us  "
            f"({steps} steps each)"
        )
        if options.timeline:
            step = step_function(name, batch, "ours")
            step()
            hvd.start_timeline(f"{options.timeline}.{name}.json")
            step()
            torch.cuda.synchronize()
            hvd.stop_timeline()
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
