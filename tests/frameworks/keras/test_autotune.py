"""Autotune in the optimizer of horovodish.keras."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.autotuned import Job, autotune_warnings, run_with_autotune
from support.keras_models import only_on
from support.traces import tracks_of

pytestmark = only_on("jax")


def train_with_autotune() -> tuple[list[str], list[str]]:
    """Gives the operations of the first step, too."""
    with autotune_warnings() as warned:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), name="layers")
        layers = [keras.Variable(np.ones((300, 300), np.float32)) for _ in range(4)]
        optimizer.build(layers)
        with tempfile.TemporaryDirectory() as folder:
            hvd.start_timeline(Path(folder, "first_step.json"))
            optimizer.apply([keras.ops.ones((300, 300))] * 4)
            hvd.stop_timeline()
            (trace,) = Path(folder).iterdir()
            reduced = [*tracks_of(trace, hvd.rank())]
        for _ in range(20):  # with other thresholds
            optimizer.apply([keras.ops.ones((300, 300))] * 4)
    return warned, reduced


@pytest.fixture(scope="module")
def tuned(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    env = {"HOROVODISH_FUSION_THRESHOLD_MB": "0.5"}
    return run_with_autotune(train_with_autotune, tmp_path_factory.mktemp("autotune"), env)


@pytest.mark.soak
def test_autotune_tries_settings(tuned: Job) -> None:
    tuned.check_search("0.5")


def test_gradients_above_the_fusion_threshold_travel_in_several_buckets(tuned: Job) -> None:
    buckets = [name for name in tuned.returned if "bucket" in name]
    assert len(buckets) == 4  # two gradients of 0.34 MiB do not fit into 0.5 MiB
