"""Ranks that meet less often, or wait for fewer: the time of a step on a slow link, or with a late rank.

python benchmarks/two_hosts.py --gbit 0.1 1 benchmarks/sync_policies.py
horovodish run -np 4 python benchmarks/sync_policies.py --late

The first command takes three minutes. It trains 20 MB of float32 in steps of about 80 ms. "alone" is the same step
without communication, measured before and after each contender; its ranks wait for each other every 25 steps. In the
second command a step sleeps for 20 ms, and the last rank sleeps five times as long in a tenth of its steps.

With --plot FILE.txt it draws the output of such runs and of benchmarks/transformer_loss.py, which is in that file, as
FILE.svg, and measures nothing.
"""

import argparse
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from plots import panels, save
from torch import nn
from torch.nn.functional import mse_loss

import horovodish.torch as hvd

WIDTH, LAYERS, BATCH = 1024, 5, 76

Policy = Callable[[], dict[str, Any]]
INT8 = hvd.Compression.int8
ALONE_STEPS, WAIT_STEPS = 50, 25
SPEED: dict[str, tuple[int, Policy]] = {
    "every step": (5, dict),
    "every step, int8": (20, lambda: {"compression": INT8}),
    "LocalSGD(8)": (48, lambda: {"sync": hvd.LocalSGD(8)}),
    "LocalSGD(8), int8": (48, lambda: {"sync": hvd.LocalSGD(8), "compression": INT8}),
    "DiLoCo(100)": (200, lambda: {"sync": hvd.DiLoCo(100)}),
    "DiLoCo(100), 4 fragments, overlap 1, int8": (
        200,
        lambda: {"sync": hvd.DiLoCo(100, fragments=4, overlap=1, compression=INT8)},
    ),
}
"""By contender, how many steps are timed, and how its optimizer is wrapped."""
LATE_SHARE, LATE_STEPS, SLEEP_SECONDS = 0.1, 150, 0.02


def speed() -> None:
    peers.say(f"{'contender':<42} {'ms for a step':>14} {'alone':>7} {'of its speed':>13}")
    plain = trainer(None)
    plain(3)
    for name, (steps, policy) in SPEED.items():
        train = trainer(policy)
        train(3)
        before, its, after = plain(ALONE_STEPS), train(steps), plain(ALONE_STEPS)
        alone = (before + after) / 2
        peers.say(f"{name:<42} {its * 1e3:>14.1f} {alone * 1e3:>7.1f} {alone / its:>13.2f}")


def trainer(policy: Policy | None) -> Callable[[int], float]:
    """A function that takes steps, and gives the seconds of one on the slowest rank. None: without communication."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if policy is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **policy())
    inputs = torch.randn(BATCH, WIDTH)

    def train(steps: int) -> float:
        hvd.barrier()
        began = time.perf_counter()
        for step in range(steps):
            if policy is None and step % WAIT_STEPS == 0:
                hvd.barrier()
            optimizer.zero_grad()
            mse_loss(model(inputs), inputs).backward()
            optimizer.step()
        seconds = (time.perf_counter() - began) / steps
        slowest: float = hvd.allreduce(torch.tensor(seconds), op=hvd.Max).item()
        return slowest

    return train


def late() -> None:
    peers.say(f"{'contender':<42} {'ms for a step':>14} {'of the speed without late steps':>32}")
    fastest = 0.0
    for name, chance, options in (
        ("every rank, none is late", 0.0, {}),
        ("every rank", LATE_SHARE, {}),
        ("wait_for=3", LATE_SHARE, {"wait_for": hvd.size() - 1}),
    ):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        is_late = random.Random(0)
        hvd.barrier()
        began, calls = time.perf_counter(), 0
        while (optimizer.steps if options else calls) < LATE_STEPS:
            hold = 5 if hvd.rank() == hvd.size() - 1 and is_late.random() < chance else 1
            time.sleep(hold * SLEEP_SECONDS)
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            calls += 1
        seconds = (time.perf_counter() - began) / LATE_STEPS
        seconds = hvd.allreduce(torch.tensor(seconds), op=hvd.Max).item()
        fastest = fastest or seconds
        peers.say(f"{name:<42} {seconds * 1e3:>14.1f} {fastest / seconds:>32.2f}")


def plot(results: Path) -> None:
    """Draw the share of the undisturbed speed and the additional loss of each policy."""
    text = results.read_text()
    speeds = {row[1].strip(): float(row[2]) for row in re.finditer(r"^(.{42})(?: +[\d.]+){2} +([\d.]+)$", text, re.M)}
    losses = {
        row[1].strip(): float(row[2]) for row in re.finditer(r"^\S+ +(.{42}) +\S+ +[\d.]+ +\+?(-?[\d.]+)%$", text, re.M)
    }
    drawing, axes = panels(2)
    for axis, rows, form, title in (
        (axes[0], speeds, "%.2f", "Share of the speed without communication,\nat 100 Mbit/s"),
        (axes[1], losses, "%.1f %%", "Additional loss"),
    ):
        policy = next(name for name in speeds if "overlap" in name)
        names = [
            name.replace("the same", f"{policy},").replace(", 4", ",\n4").replace(", int8", ",\nint8") for name in rows
        ]
        axis.bar_label(axis.barh(names, list(rows.values())), fmt=form, padding=3)
        axis.invert_yaxis()
        axis.set_title(title)
        axis.margins(x=0.3)
        axis.grid(visible=False)
    save(drawing, results.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.txt")
    options = parser.parse_args()
    if options.plot:
        return plot(options.plot)
    hvd.init()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    peers.say(f"{peers.setup()}\n")
    if options.late:
        late()
    else:
        speed()
    hvd.shutdown()


if __name__ == "__main__":
    main()
