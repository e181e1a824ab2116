"""The time of a trivial function on 2 ranks, with and without Ray and Spark:  python benchmarks/cluster_starts.py

The ranks call `init()` and one allreduce. Beside it: what Ray and Spark need by themselves for as many actors or tasks.
Ray and Spark run on this machine, and run already. Each figure is the median of 5, in seconds, with the smallest and
the largest.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import ray
from machine import command, machine
from pyspark.sql import SparkSession

import horovodish as hvd
import horovodish.spark
from horovodish.ray import RayExecutor

RANKS, TIMES = 2, 5
SCRIPT = "import numpy, horovodish as hvd; hvd.init(); hvd.allreduce(numpy.ones(1))"


def trivial() -> float:
    hvd.init()
    return float(hvd.allreduce(np.ones(1))[0])


def shown(what: str, run: Callable[[], object]) -> None:
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    print(f"{what:45} {statistics.median(seconds):6.2f}  ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)


def run_script() -> None:
    subprocess.run(["horovodish", "run", "-np", str(RANKS), sys.executable, "-c", SCRIPT], check=True)


def in_ray() -> None:
    executor = RayExecutor(num_workers=RANKS)
    executor.start()
    executor.run(trivial)
    executor.shutdown()


@ray.remote(num_cpus=1)
class Actor:
    def process(self) -> int:
        return os.getpid()


def ray_alone() -> None:
    actors = [Actor.remote() for _ in range(RANKS)]
    ray.get([each.process.remote() for each in actors])
    for each in actors:
        ray.kill(each)


def main() -> None:
    print(f"{command()}\n{machine(['ray', 'pyspark'])}")
    shown("horovodish run", run_script)
    shown("horovodish.run(function)", lambda: hvd.run(trivial, num_proc=RANKS))

    ray.init(num_cpus=2 * RANKS, include_dashboard=False, log_to_driver=False)
    shown("RayExecutor: start, run, shutdown", in_ray)
    shown("Ray alone: actors that return", ray_alone)
    executor = RayExecutor(num_workers=RANKS)
    executor.start()
    shown("RayExecutor: run", lambda: executor.run(trivial))
    executor.shutdown()
    ray.shutdown()

    spark = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    shown("horovodish.spark.run", lambda: horovodish.spark.run(trivial, num_proc=RANKS))
    numbers = spark.sparkContext.parallelize(range(RANKS), RANKS)
    shown("Spark alone: tasks that return", lambda: numbers.map(lambda _: os.getpid()).collect())
    spark.stop()


if __name__ == "__main__":
    main()
