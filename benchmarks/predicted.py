"""Predicted steps beside measured ones:  python benchmarks/predicted.py

Ranks send their buckets as a wrapped optimizer does: plain allreduces of four models, and bfloat16, int8, LocalSGD(8)
and ZeRO-1 of one of them. Their work is sleep, so that 2 cores are enough for 4 ranks. First
`horovodish.predictions.calibrate` measures the cluster in the same world. Hosts are network namespaces, which only root
can make. `--plot RESULTS` draws an earlier output.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import command, machine
from plots import panels, save

import horovodish
from horovodish import _native
from horovodish.collectives.operation import Codec, text_of
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
MEASURED = ("allreduce", "bfloat16", "int8", "LocalSGD(8)", "ZeRO-1")
"""Names of strategies. Each model has the first one. The first model has the others, too."""
WARM_UP, STEPS = 8, 32


def train(model: str, strategy: str) -> None:
    """On each rank: print the step on rank 0: the median, or the mean where the ranks do not meet in each step."""
    workload, every = MODELS[model], 8 if strategy == "LocalSGD(8)" else 1
    horovodish.init()
    dtype = "bfloat16" if strategy == "bfloat16" else "float32"
    item = 2 if dtype == "bfloat16" else 4
    arrays = [np.zeros(int(bucket.bytes) // 4 * item, np.uint8) for bucket in workload.buckets]
    members = [(f"gradient {i}", _native.DTYPES[dtype], [it.size // item], i) for i, it in enumerate(arrays)]

    def plan_of(name: str, kind: str, **details: Any) -> _native.BucketPlan:
        number = _native.KINDS[kind]
        return basics.engine().plan(name, horovodish.Sum, 1.0, 1.0, members, [-1] * len(arrays), kind=number, **details)

    def finish(plan: _native.BucketPlan) -> None:
        while not plan.wait(1.0):
            pass
        plan.reset()

    if strategy == "ZeRO-1":
        size = horovodish.size()
        ends = [[elements * (rank + 1) // size for rank in range(size)] for _, _, (elements,), _ in members]
        plan = plan_of("gradients", "reducescatter", ends=ends)
        gather = plan_of("weights", "allgather", ends=ends)
    else:
        codec = text_of(Codec(_native.CODECS["int8"], 0.0, True, 0)) if strategy == "int8" else ""
        plan = plan_of("gradients", "allreduce", codecs=[codec] * len(arrays))
    times = []
    for step in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        meets = step % every == every - 1
        for index, (bucket, array) in enumerate(zip(workload.buckets, arrays, strict=True)):
            time.sleep(max(0.0, begun + bucket.ready - time.perf_counter()))
            if every == 1:
                plan.submit(index, array.ctypes.data, array.ctypes.data)
        if every > 1 and meets:
            for index, array in enumerate(arrays):
                plan.submit(index, array.ctypes.data, array.ctypes.data)
        if meets:
            finish(plan)
        time.sleep(workload.work - workload.buckets[-1].ready)
        if strategy == "ZeRO-1":
            for index, array in enumerate(arrays):
                gather.submit(index, array.ctypes.data, array.ctypes.data)
            finish(gather)
        times.append(time.perf_counter() - begun)
    if horovodish.rank() == 0:
        typical = statistics.median if every == 1 else statistics.mean
        print(json.dumps(typical(times[WARM_UP:])))


def run(hosts: int, local: int, gbit: float, *program: str) -> str:
    if hosts == 1:
        start = ["-m", "horovodish.launcher", "run", "-np", str(local), sys.executable]
    else:
        start = [__file__, "--world", f"{hosts}x{local}", "--gbit", str(gbit), "--"]
    done = subprocess.run([sys.executable, *start, *program], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def in_namespaces(world: str, gbit: float, program: Sequence[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from two_hosts import run as run_on

    from support.hosts import hosts, limit_links

    count, local = map(int, world.split("x"))
    with hosts(count) as on:
        limit_links(on, gbit)
        return run_on(on, local, list(program))


def plot(results: Path) -> None:
    """The steps of the first model by the number of hosts, in a file beside the results."""
    model = re.escape(next(iter(MODELS)))
    row = rf"^(\S+(?: x 1)?) +([\d.]+) +{model} +allreduce +([\d.]+) ms +([\d.]+) ms"
    drawing, (axes,) = panels(1)
    found = re.findall(row, results.read_text(), re.MULTILINE)
    for number, gbit in enumerate(dict.fromkeys(gbit for _, gbit, _, _ in found)):
        steps = {WORLDS[world][0]: (a, b) for world, its, a, b in found if its == gbit and WORLDS[world][1] == 1}
        hosts, (predicted, measured) = [*steps], zip(*(map(float, pair) for pair in steps.values()), strict=True)
        axes.plot(hosts, predicted, color=f"C{number}", label=f"predicted, {float(gbit):g} Gbit/s")
        axes.plot(hosts, measured, "o", color=f"C{number}", label="measured" if number == 0 else None)
    axes.set(xlabel="hosts with one rank each", ylabel="step, ms", xticks=[2, 3, 4])
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=2, loc="upper left")
    save(drawing, results.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--plot", type=Path, help="draw these results")
    parser.add_argument("--world", help=argparse.SUPPRESS)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=list(MEASURED), choices=MEASURED)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 2.0, 10.0], help="of the links between hosts")
    parser.add_argument("program", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(*options.train)
    if options.plot:
        return plot(options.plot)
    if options.world:
        sys.exit(in_namespaces(options.world, options.gbit[0], options.program))
    print(f"{command()}\n{machine()}\n")
    print(
        f"{'world':<10} {'Gbit/s':>6}  {'model':<28} {'strategy':<12} {'predicted':>10} {'measured':>10} {'error':>7}"
    )
    by_name = {strategy.name: strategy for strategy in STRATEGIES}
    first, *others = [by_name[each] for each in options.strategies]
    runs = [*((name, first) for name in options.models), *((options.models[0], each) for each in others)]
    errors: list[float] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for world in options.worlds:
        hosts, local = WORLDS[world]
        for gbit in options.gbit if hosts > 1 else [0.0]:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "cluster.yaml")
                run(hosts, local, gbit, "-m", "horovodish.predictions.calibrate", str(path))
                cluster = replace(read_cluster(path), ranks_per_host=local)
            for name, strategy in runs:
                expected = predict(MODELS[name], cluster, hosts * local, strategy).step
                found = json.loads(run(hosts, local, gbit, __file__, "--train", name, strategy.name).splitlines()[-1])
                errors.append(abs(expected / found - 1))
                row = f"{world:<10} {gbit or '':>6}  {name:<28} {strategy.name:<12}"
                row += f" {expected * 1e3:>7.1f} ms {found * 1e3:>7.1f} ms"
                print(f"{row} {expected / found - 1:>+7.1%}", flush=True)
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
