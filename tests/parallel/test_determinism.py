"""The same ranks with the same inputs get the same bits, whatever the timing."""

from __future__ import annotations

import random
import time
import zlib

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.ranks import run_ranks

TENSORS = 40


def reduce_with_random_delays(seed: int) -> list[int]:
    """A checksum over all results, for each of several rounds with the same inputs and other delays and orders."""
    hvd.init()
    timing = random.Random(1000 * seed + hvd.rank())
    inputs = [
        np.random.default_rng([hvd.rank(), tensor]).normal(size=(tensor % 7) * 3001 + tensor).astype(np.float32)
        for tensor in range(TENSORS)
    ]
    checksums = []
    for _ in range(4):
        order = list(range(TENSORS))
        timing.shuffle(order)
        handles = {}
        for tensor in order:
            if timing.random() < 0.3:
                time.sleep(timing.random() * 0.003)
            handles[tensor] = hvd.allreduce_async(inputs[tensor], name=f"tensor {tensor}")
        results = [handles[tensor].wait().tobytes() for tensor in range(TENSORS)]
        checksums.append(zlib.crc32(b"".join(results)))
    return checksums


@pytest.mark.parametrize("plane", PLANES)
def test_bits_do_not_depend_on_timing(plane: str) -> None:
    runs = [run_ranks(reduce_with_random_delays, 3, args=(seed,), env={"HOROVODISH_PLANE": plane}) for seed in range(3)]
    assert len({checksum for run in runs for of_rank in run for checksum in of_rank}) == 1
