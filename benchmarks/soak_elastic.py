"""An elastic job that something happens to every few seconds: does it stand still, go wrong or grow?

    python benchmarks/soak_elastic.py --seconds 900

Up to 4 ranks train a PyTorch model. In turn at random, a rank is killed, is stopped or aborts, or there are fewer or
more slots. Slots rest for a second only, so that there is always somebody to disturb. The exit status is 1 if no step
is completed for longer than is allowed below, if ranks differ after they have begun again, if the result differs from
the result of an undisturbed run on the same samples, or if the job leaves anything behind or needs more and more
memory, descriptors or processes.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVENT_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 10.0
SLOTS = (3, 4)
ALLOWED_GROWTH = {"KiB": 4096, "descriptors": 4, "processes": 1}
LAUNCHER = """
from horovodish.launcher import cli
from horovodish.launcher.elastic import job, slots
for module in (job, slots):
    module.FIRST_COOLDOWN_SECONDS = module.LONGEST_COOLDOWN_SECONDS = 1.0
raise SystemExit(cli.main())
"""
FOLDERS = re.compile(r"folders: (\S+) (\S+) (\S+)$")
STEP = re.compile(r"step: (\d+) of (\d+), process (\d+), loss ([0-9.]+(?:e[-+]?[0-9]+)?)$")


def train(seconds: float) -> None:
    """What each rank does. A step has the gradient of the same samples, however many ranks there are."""
    import torch

    import horovodish.torch as hvd

    hvd.init()
    if seconds:
        run, state = (Path(os.environ[f"HOROVODISH_{name}"]) for name in ("RUN_DIR", "STATE_FOLDER"))
        print(f"folders: {run} {(run / 'segments').resolve()} {state.parent}", flush=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    inputs = torch.randn(96, 20, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin()

    def loss_of(own: slice) -> torch.Tensor:
        return (model(inputs[own]) - targets[own]).square().sum() / len(inputs)

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        hvd.check_consistency(model, optimizer)
        while state.until == 0 or state.step < state.until:
            optimizer.zero_grad()
            loss_of(slice(hvd.rank(), None, hvd.size())).backward()
            optimizer.step()
            state.step += 1
            if seconds:
                time.sleep(0.02)
                is_over = hvd.allreduce(torch.tensor(float(time.time() > state.ends_at)), op=hvd.Max) > 0
                state.until = state.step if is_over else 0
            with torch.no_grad():
                loss = loss_of(slice(None)).item()
            print(f"step: {state.step} of {hvd.size()}, process {os.getpid()}, loss {loss!r}", flush=True)
            state.commit()

    until = 0 if seconds else int(os.environ["STEPS"])
    go_on(hvd.elastic.TorchState(model, optimizer, step=0, until=until, ends_at=time.time() + seconds))


def main() -> None:
    """Disturbs a job, and compares it with one that is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        steps, loss, folders = disturbed(Path(folder), arguments.seconds, random.Random(arguments.seed))
    rank = [sys.executable, __file__, "--train", "--seconds", "0"]
    command = ["horovodish", "run", "-np", "2", *rank]
    calm = subprocess.run(command, env={**os.environ, "STEPS": str(steps)}, capture_output=True, text=True, check=True)
    expected = float(STEP.findall(calm.stdout)[-1][3])
    print(f"{steps} steps; loss {loss!r}, undisturbed {expected!r}")
    if abs(loss - expected) > 1e-6 * abs(expected):
        sys.exit("the result differs from that of an undisturbed run")
    if left := sorted(filter(os.path.exists, folders)):
        sys.exit(f"left behind: {', '.join(left)}")


def disturbed(folder: Path, seconds: float, choice: random.Random) -> tuple[int, float, set[str]]:
    """Runs the job. Returns how many steps it did, its loss after the last, and the folders of its processes."""
    slots, program = folder / "slots", folder / "hosts.sh"
    slots.write_text(f"localhost:{SLOTS[-1]}\n")
    program.write_text(f"#!/bin/sh\ncat {slots}\n")
    program.chmod(0o755)
    rank = [sys.executable, __file__, "--train", "--seconds", str(seconds)]
    flags = [
        "--min-np",
        "1",
        "--max-np",
        str(SLOTS[-1]),
        "--host-timeout",
        "2",
        "--host-discovery-script",
        str(program),
    ]
    job = subprocess.Popen([sys.executable, "-c", LAUNCHER, "run", *flags, *rank], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    step, loss, alive, folders = 0, 0.0, dict[int, float](), set[str]()
    began = time.monotonic()
    worst, latest, event_at = 0.0, 0.0, 0.0
    held = {name: [] for name in ALLOWED_GROWTH}
    for line in job.stdout:
        found, now = STEP.search(line), time.monotonic()
        if made := FOLDERS.search(line):
            folders.update(made.groups())
            continue
        if not found:
            print(f"{now - began:6.1f} {line}", end="", flush=True)
            continue
        step, loss = int(found[1]), float(found[4])
        pause, latest = now - latest if latest else 0.0, now
        worst = max(worst, pause)
        if pause > LONGEST_PAUSE_SECONDS / 2:
            print(f"{now - began:6.1f} step {step} after {pause:.1f} s", flush=True)
        alive[int(found[3])] = now
        event_at = event_at or now + EVENT_SECONDS
        if now >= event_at:
            event_at = now + EVENT_SECONDS
            recent = [process for process, seen in alive.items() if now - seen < 1]
            for name, value in _held_by(job.pid).items():
                held[name].append(value)
            _disturb(choice, recent, slots)
    if status := job.wait():
        sys.exit(f"the job ended with status {status}")
    print(f"longest time without a step: {worst:.1f} s")
    if worst > LONGEST_PAUSE_SECONDS:
        sys.exit("the job stood still")
    for name, values in held.items():
        third = len(values) // 3
        # The least that it holds: while new processes start beside others, it holds twice as much.
        growth = min(values[-third:]) - min(values[third : 2 * third]) if third else 0
        print(f"{name} of the launcher: {values[:1]} to {values[-1:]}")
        if growth > ALLOWED_GROWTH[name]:
            sys.exit(f"{name} grew by {growth}")
    return step, loss, folders


def _disturb(choice: random.Random, processes: list[int], slots: Path) -> None:
    event = choice.choice(("kill", "stop", "abort", "slots"))
    if event == "slots" or len(processes) < 2:
        count = choice.choice(SLOTS)
        slots.write_text(f"localhost:{count}\n")
        print(f"-- {count} slots", flush=True)
        return
    victim = choice.choice(processes)
    print(f"-- {event} {victim}", flush=True)
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}[event]
    with contextlib.suppress(ProcessLookupError):  # it may have left since it was seen
        os.kill(victim, number)


def _held_by(launcher: int) -> dict[str, int]:
    statm = Path(f"/proc/{launcher}/statm").read_text().split()
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return {
        "KiB": int(statm[1]) * os.sysconf("SC_PAGESIZE") // 1024,
        "descriptors": len(os.listdir(f"/proc/{launcher}/fd")),
        "processes": len(children),
    }


if __name__ == "__main__":
    main()
