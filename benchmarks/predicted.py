"""Predicted steps beside measured ones:  python benchmarks/predicted.py

Ranks reduce buckets as a wrapped optimizer does. Their work is sleep, so that 2 cores are enough for 4 ranks. First
`horovodish.predictions.calibrate` measures the cluster in the same world. Hosts are network namespaces, which only root
can make.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import command, machine

import horovodish
from horovodish import _native
from horovodish.predictions.cluster import read_cluster
from horovodish.predictions.steps import STRATEGIES, predict
from horovodish.predictions.workload import Bucket, Workload
from horovodish.runtime import basics

MODELS = {
    "25 MB in 6 buckets, 60 ms": Workload(0.060, tuple(Bucket(0.007 * index, 4.2e6) for index in range(6))),
    "4 MB in 1 bucket, 20 ms": Workload(0.020, (Bucket(0.0, 4.2e6),)),
    "64 MB in 16 buckets, 150 ms": Workload(0.150, tuple(Bucket(0.006 * index, 4.2e6) for index in range(16))),
    "80 tensors of 8 KB, 30 ms": Workload(0.030, tuple(Bucket(0.0003 * index, 8e3) for index in range(80))),
}
WORLDS = {
    "2 ranks": (1, 2),
    "3 ranks": (1, 3),
    "4 ranks": (1, 4),
    "1+1": (2, 1),
    "2+2": (2, 2),
    "1+1+1": (3, 1),
    "4 x 1": (4, 1),
}
STEPS = 30


def train(model: str) -> None:
    """On each rank: print the median step on rank 0."""
    workload = MODELS[model]
    horovodish.init()
    arrays = [np.ones(int(bucket.bytes) // 4, np.float32) for bucket in workload.buckets]
    float32 = _native.DTYPES["float32"]
    members = [(f"gradient {i}", float32, [array.size], i) for i, array in enumerate(arrays)]
    plan = basics.engine().plan("steps", horovodish.Sum, 1.0, 1.0, members, [-1] * len(arrays), 0)
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        for index, (bucket, array) in enumerate(zip(workload.buckets, arrays, strict=True)):
            time.sleep(max(0.0, begun + bucket.ready - time.perf_counter()))
            plan.submit(index, array.ctypes.data, array.ctypes.data)
        while not plan.wait(1.0):
            pass
        plan.reset()
        time.sleep(workload.work - workload.buckets[-1].ready)
        times.append(time.perf_counter() - begun)
    if horovodish.rank() == 0:
        print(json.dumps(statistics.median(times[3:])))


def run(hosts: int, local: int, gbit: float, *program: str) -> str:
    if hosts == 1:
        start = ["horovodish", "run", "-np", str(local), "python"]
    else:
        start = ["python", "benchmarks/predicted.py", "--world", f"{hosts}x{local}", "--gbit", str(gbit), "--"]
    done = subprocess.run([*start, *program], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def in_namespaces(world: str, gbit: float, program: Sequence[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from two_hosts import run as run_on

    from support.hosts import hosts, limit_links

    count, local = map(int, world.split("x"))
    with hosts(count) as on:
        limit_links(on, gbit)
        return run_on(on, local, list(program))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--world", help=argparse.SUPPRESS)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 2.0, 10.0], help="of the links between hosts")
    parser.add_argument("program", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train)
    if options.world:
        sys.exit(in_namespaces(options.world, options.gbit[0], options.program))
    print(f"{command()}\n{machine()}\n")
    print(f"{'world':<10} {'Gbit/s':>6}  {'model':<28} {'predicted':>10} {'measured':>10} {'error':>7}")
    errors = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for world in options.worlds:
        hosts, local = WORLDS[world]
        for gbit in options.gbit if hosts > 1 else [0.0]:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "cluster.yaml")
                run(hosts, local, gbit, "-m", "horovodish.predictions.calibrate", str(path))
                cluster = replace(read_cluster(path), ranks_per_host=local)
            for name, workload in MODELS.items():
                expected = predict(workload, cluster, hosts * local, STRATEGIES[0]).step
                found = json.loads(run(hosts, local, gbit, "benchmarks/predicted.py", "--train", name).splitlines()[-1])
                errors.append(abs(expected / found - 1))
                row = f"{world:<10} {gbit or '':>6}  {name:<28} {expected * 1e3:>7.1f} ms {found * 1e3:>7.1f} ms"
                print(f"{row} {expected / found - 1:>+7.1%}", flush=True)
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
