"""horovodish.keras on each of Keras's backends: the same checks, one world of ranks for each backend."""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import pytest

from support.autotuned import Job, autotune_warnings, run_with_autotune
from support.ranks import run_ranks
from support.traces import tracks_of

BACKENDS = ["torch", "jax", "tensorflow"]


def check_everything(backend: str, folder: Path) -> None:
    if backend != "tensorflow":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras takes seconds to import it, and needs it not

    import horovodish.keras as hvd
    from support import keras_callbacks, keras_loops, keras_surface, keras_truth

    hvd.init(process_sets="dynamic")
    keras_surface.the_names_are_those()
    keras_surface.join_is_that_of_the_backend()
    keras_surface.mistakes_are_refused()
    keras_truth.a_wrapped_optimizer_is_what_it_was()
    keras_truth.every_argument_is_honoured()
    keras_truth.local_layers_are_each_ranks_own()
    keras_truth.local_layers_stay_so_in_mixed_precision()
    keras_truth.absent_gradients()
    keras_truth.sparse_gradients_become_dense()
    keras_truth.sparse_gradients_of_some_ranks()
    keras_truth.windows_lose_no_gradient()
    keras_truth.loss_scaling_is_agreed_upon()
    keras_truth.ranks_train_as_one_process()
    keras_truth.a_compiled_step_reduces_on_torch()
    keras_truth.mixed_precision_in_fit()
    keras_loops.a_loop_trains_as_one_process()
    keras_loops.an_optimizer_may_be_applied_twice_in_a_step()
    keras_callbacks.values_are_reduced()
    keras_callbacks.ranks_stop_together()
    keras_callbacks.nan_stops_all_ranks()
    keras_callbacks.ranks_may_have_different_numbers_of_batches()
    keras_callbacks.models_with_several_optimizers()
    keras_callbacks.a_model_may_have_been_fitted_before_it_is_wrapped()
    keras_callbacks.a_model_may_be_built_by_its_first_batch()
    keras_callbacks.logs_are_averaged()
    keras_callbacks.learning_rates_follow_the_ranks()
    keras_callbacks.learning_rates_are_equal_whatever_the_number_of_batches()
    keras_callbacks.a_warmup_reaches_its_end_in_steps_of_several_batches()
    keras_callbacks.momentum_contains_the_learning_rate()
    keras_callbacks.files_are_those_of_keras(folder)
    keras_surface.the_guide_runs(folder)


def check_what_three_ranks_may_do_otherwise() -> None:
    """More ranks than cores perhaps, sums whose order matters, and a rank in the middle."""
    sys.modules["tensorflow"] = None  # type: ignore[assignment]

    import horovodish.keras as hvd
    from support import keras_callbacks, keras_loops, keras_truth

    hvd.init()
    keras_truth.fit_gives_the_same_bits_again()
    keras_truth.local_layers_are_each_ranks_own()
    keras_loops.a_loop_trains_as_one_process()
    keras_callbacks.ranks_stop_together()
    keras_callbacks.nan_stops_all_ranks()
    keras_callbacks.ranks_may_have_different_numbers_of_batches()


def environment(backend: str) -> dict[str, str]:
    return {
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_backend(backend: str, tmp_path: Path) -> None:
    run_ranks(check_everything, 2, args=(backend, tmp_path), env=environment(backend))


def test_three_ranks() -> None:
    run_ranks(check_what_three_ranks_may_do_otherwise, 3, env=environment("jax"))


def train_with_autotune() -> tuple[list[str], list[str]]:
    """Gives the buckets that the first step reduces, too."""
    sys.modules["tensorflow"] = None  # type: ignore[assignment]

    import keras
    import numpy as np

    import horovodish.keras as hvd

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
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Job:
    env = {**environment("jax"), "HOROVODISH_FUSION_THRESHOLD_MB": "0.5"}
    return run_with_autotune(train_with_autotune, tmp_path_factory.mktemp("autotune"), env)


def test_autotune_tries_settings(tuned: Job) -> None:
    assert tuned.warnings == [[], []]
    tried = {row["fusion_threshold_mb"] for row in csv.DictReader(tuned.log)}
    assert "0.5" in tried and len(tried) > 1


def test_gradients_above_the_fusion_threshold_travel_in_several_buckets(tuned: Job) -> None:
    assert len(tuned.returned) == 4  # two gradients of 0.34 MiB do not fit into 0.5 MiB
