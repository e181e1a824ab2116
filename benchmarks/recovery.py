"""How long a training run stands still when a rank is killed: from SIGKILL to the first step completed after it.

    python benchmarks/recovery.py [--kills 10] [--ranks 4]

Ranks train a PyTorch model of 25 million parameters. Each run loses one rank: every rank in turn.

    same       the survivors go on in the same processes
    hosts      likewise, on two hosts that are network namespaces
    silent     on two hosts, the second of which loses its network without a word
    new        new processes go on, with the state from memory (--min-np equal to -np)
    torchrun   torchrun's elastic restart of DDP over gloo, with the last of torch.save()'s checkpoints in memory
    imports    for comparison: as many Python interpreters that import what the ranks import

`hosts` and `silent` need root and iproute2.

The runs of the kinds take turns. What is printed are medians in seconds, and the range.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Hosts, hosts

FEATURES, LAYERS = 1568, 10  # about 25 million parameters
CALM_STEPS = 6
IMPORTS = "import torch, torch._dynamo, horovodish.torch"  # the first optimizer imports torch._dynamo


def main() -> None:
    """Runs all kinds in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kinds", default="same,hosts,silent,new,torchrun,imports")
    arguments = parser.parse_args()
    pauses: dict[str, list[float]] = {kind: [] for kind in arguments.kinds.split(",")}
    for kill in range(arguments.kills):
        for kind, taken in pauses.items():
            taken.append(imports(arguments.ranks) if kind == "imports" else pause(kind, arguments.ranks, kill))
            print(f"{kind:9} rank {kill % arguments.ranks}  {taken[-1]:6.2f} s", file=sys.stderr, flush=True)
    for kind, taken in pauses.items():
        print(f"{kind:9} {statistics.median(taken):6.2f}   {min(taken):.2f} to {max(taken):.2f}")


def command(kind: str, ranks: int, on: Hosts | None) -> list[str]:
    """What starts the ranks."""
    if kind == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
        return [*start, "--standalone", __file__.replace("recovery.py", "recovery_ddp.py")]
    least = ranks if kind == "new" else 1
    train = [sys.executable, __file__.replace("recovery.py", "recovery_train.py")]
    run = ["horovodish", "run", "-np", str(ranks), "--min-np", str(least)]
    if on is None:
        return [*run, *train]
    places = ",".join(f"{on.address(host)}:{ranks // 2}" for host in range(2))
    return [*on.inside(0), *run, "--hosts", places, "--launch-agent", str(on.agent), *train]


def pause(kind: str, ranks: int, kill: int) -> float:
    """Seconds from the death of a rank, or of a link, to the first step that was completed after it."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        on = stack.enter_context(hosts(2)) if kind in ("hosts", "silent") else None
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CHECKPOINT": f"{folder}/checkpoint.pt", "STEPS": "1000000"}
        log = open(f"{folder}/log", "w+")  # noqa: SIM115, it is in the folder
        job = subprocess.Popen(command(kind, ranks, on), stdout=subprocess.PIPE, stderr=log, env=environ, text=True)
        try:
            killed_at, lost_at = 0.0, 0
            for rank, size, start, step, at, pid in steps(job):
                if not killed_at and step >= CALM_STEPS and rank == kill % ranks:
                    killed_at, lost_at = time.time(), step
                    if on and kind == "silent":
                        set_link(on, "down")
                    else:
                        os.kill(pid, signal.SIGKILL)
                elif killed_at and (size < ranks or start):
                    lost = lost_at - step + 1
                    if lost > 0 and kind != "torchrun":
                        raise SystemExit(f"{kind}: {lost} completed steps were lost")
                    return at - killed_at
            log.seek(0)
            raise SystemExit(f"{log.read()}{kind}: the job ended with status {job.wait()}")
        finally:
            job.send_signal(signal.SIGTERM)
            if on:
                set_link(on, "up")  # so that what is left on the second host ends
            job.communicate()


def set_link(on: Hosts, state: str) -> None:
    """Sets the network of the second host "up" or "down"."""
    subprocess.run(["ip", "netns", "exec", on.name(1), "ip", "link", "set", "e0", state], check=True)


def steps(job: "subprocess.Popen[str]") -> Iterator[tuple[int, int, int, int, float, int]]:
    """What ranks print after each step: rank, size, how often ranks were started before, step, time, process."""
    assert job.stdout is not None
    for line in job.stdout:
        if found := re.search(r"step: (\d+) (\d+) (\d+) (\d+) (\S+) (\d+)$", line):
            rank, size, start, step, at, pid = found.groups()
            yield int(rank), int(size), int(start), int(step), float(at), int(pid)


def imports(ranks: int) -> float:
    """Seconds that as many interpreters need at once to import what ranks do."""
    begin = time.time()
    processes = [subprocess.Popen([sys.executable, "-c", IMPORTS]) for _ in range(ranks)]
    for process in processes:
        process.wait()
    return time.time() - begin


if __name__ == "__main__":
    main()
