"""An allreduce of 64 MiB of float32 on a slow link, by codec:

python benchmarks/two_hosts.py --gbit 1 1 benchmarks/slow_links.py

All contenders in turns: float32 as it is, cast to bfloat16, and each codec with error feedback, as an optimizer sends
it. "gloo float16" casts, reduces over gloo and casts back, as fp16_compress_hook of DistributedDataParallel does.
Times are of single calls, on all ranks. Takes two minutes at 1 Gbit/s. With --plot it draws the medians of such runs,
whose output FILE.txt has, as FILE.svg, and measures nothing. With --report it measures what compression_report() takes,
and how much longer an allreduce takes in the steps that measure norms for it, one in a hundred.
"""

import argparse
import functools
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import peers
import torch
from plots import panels, save

import horovodish.torch as hvd
from horovodish.collectives.codecs import CodecCompressor
from horovodish.collectives.operation import Operation
from horovodish.torch.adapter import TENSORS

CODECS = {
    "auto": hvd.Compression.auto,
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4,
    "ternary": hvd.Compression.ternary,
    "onebit": hvd.Compression.onebit,
    "topk 1 %": hvd.Compression.topk(0.01),
    "randomk 1 %": hvd.Compression.randomk(0.01),
}
EXACT, BLOCK_SECONDS = "float32", 2.0
NORM_STEPS, TENSORS_OF_A_REPORT = 100, 200


def coded(name: str, codec: CodecCompressor, tensor: torch.Tensor) -> None:
    """Reduces the gradient of a parameter of this name."""
    its = codec.of(name, tuple(tensor.shape))
    operation = Operation("allreduce", name, op=hvd.Average, member_names=[name], in_place=True, codec=its)
    TENSORS.one(operation, tensor, waits=True).wait()


def cast(dtype: torch.dtype, reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    """Reduces a tensor as one of two bytes for each value."""
    half = tensor.to(dtype)
    reduce(half)
    tensor.copy_(half)


def average_by_gloo(tensor: torch.Tensor) -> None:
    torch.distributed.all_reduce(tensor.div_(hvd.size()))


def contenders(mebibytes: int) -> dict[str, Callable[[], float]]:
    given = torch.randn(mebibytes << 8, 1024, generator=torch.Generator().manual_seed(hvd.rank()))
    tensor = torch.empty_like(given)

    def timed(call: Callable[[torch.Tensor], object]) -> Callable[[], float]:
        measure = peers.timed(lambda: call(tensor))

        def fresh() -> float:
            tensor.copy_(given)
            return measure()

        return fresh

    calls: dict[str, Callable[[torch.Tensor], object]] = {
        EXACT: hvd.allreduce_,
        "bfloat16": functools.partial(cast, torch.bfloat16, hvd.allreduce_),
        "gloo float16": functools.partial(cast, torch.float16, average_by_gloo),
    }
    calls |= {name: functools.partial(coded, name, codec) for name, codec in CODECS.items()}
    return {name: timed(call) for name, call in calls.items()}


def report(mebibytes: int, rounds: int) -> None:
    """Times the calls of one tensor by whether they measure norms, and reports of it and many small tensors."""
    given = torch.randn(mebibytes << 8, 1024, generator=torch.Generator().manual_seed(hvd.rank()))
    tensor = torch.empty_like(given)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(rounds * NORM_STEPS + 1):
        tensor.copy_(given)
        hvd.barrier()
        seconds[step % NORM_STEPS == 0].append(peers.timed(lambda: coded("tensor", hvd.Compression.int8, tensor))())
    small = hvd.Compression.int8(where=lambda name, shape: True)
    for number in range(TENSORS_OF_A_REPORT):
        coded(f"small {number}", small, torch.ones(1024))
    usual, norms = (statistics.median(seconds[measures][1:]) * 1e3 for measures in (False, True))
    peers.say(f"an allreduce in int8: {usual:.1f} ms, with norms {norms:.1f} ms (medians of rank 0)")
    calls = [peers.timed(lambda: str(hvd.compression_report()))() for _ in range(100)]
    peers.say(f"a report of {TENSORS_OF_A_REPORT + 1} tensors: {statistics.median(calls) * 1e6:.0f} us")


def plot(results: Path) -> None:
    """Draw the medians by contender, a bar for each link."""
    runs: dict[str, dict[str, float]] = {}
    for line in results.read_text().splitlines():
        if command := re.match(r"benchmarks/two_hosts.py (?:--gbit (\S+) )?", line):
            medians = runs[f"{command[1]} Gbit/s" if command[1] else "no limit"] = {}
        elif row := re.match(r"(.{13})( +[\d.]+){2} +([\d.]+)( +[\d.]+){2}$", line):
            medians[row[1].strip()] = float(row[3])
    drawing, (axis,) = panels(1, height=7)
    width = 0.8 / len(runs)
    for number, (link, medians) in enumerate(runs.items()):
        places = [place + (number - (len(runs) - 1) / 2) * width for place in range(len(medians))]
        bars = axis.barh(places, medians.values(), width, label=link)
        axis.bar_label(bars, fmt="%.0f", fontsize=9, padding=2)
    axis.set_yticks(range(len(medians)), medians)
    axis.invert_yaxis()
    axis.set(title="An allreduce of 64 MiB of float32 between two hosts", xlabel="median, ms", xscale="log")
    axis.set_xticks([30, 100, 300], ["30", "100", "300"])
    axis.minorticks_off()
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower right")
    save(drawing, results.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contenders, and float32")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.txt")
    options = parser.parse_args()
    if options.plot:
        return plot(options.plot)
    peers.start()
    peers.say(f"{peers.setup()}\n")
    if options.report:
        report(options.mebibytes, options.rounds)
        return peers.stop()
    compared = contenders(options.mebibytes)
    if options.only:
        compared = {name: compared[name] for name in (EXACT, *options.only)}
    calls = peers.calls_within(compared, BLOCK_SECONDS, 20)
    seconds = peers.alternate(compared, options.rounds, calls)
    exact = seconds[EXACT]
    peers.say(f"{'contender':<13} {'calls':>6} {'min ms':>9} {'p50 ms':>9}    as fast as float32: min, p50")
    for name, its in seconds.items():
        least, middle = min(its), statistics.median(its)
        ratios = f"{min(exact) / least:>19.2f} {statistics.median(exact) / middle:>9.2f}"
        peers.say(f"{name:<13} {len(its):>6} {least * 1e3:>9.1f} {middle * 1e3:>9.1f} {ratios}")
    peers.stop()


if __name__ == "__main__":
    main()
