"""The public names of horovodish.tensorflow, and what its import does not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import horovodish.basics
import horovodish.tensorflow

DIAGNOSTICS = {"start_timeline", "stop_timeline", "straggler_report", "surviving_communicator"}
PROCESS_API = (set(horovodish.basics.__all__) - {"engine"}) | DIAGNOSTICS
OWN = {
    "Adasum Average Max Min Product ReduceOp Sum",
    "Compression DistributedGradientTape DistributedOptimizer PartialDistributedGradientTape SyncBatchNormalization",
    "HorovodInternalError HostsUpdatedInterrupt MismatchError RankLostError StallError UnsupportedTensorError",
    "ProcessSet add_process_set global_process_set remove_process_set",
    "allgather allgather_object grouped_allgather",
    "allreduce grouped_allreduce",
    "alltoall",
    "barrier join",
    "broadcast broadcast_ broadcast_object broadcast_object_fn broadcast_variables",
    "local_rank_op local_size_op process_set_included_op rank_op size_op",
    "reducescatter grouped_reducescatter",
}


def test_the_public_names() -> None:
    expected = PROCESS_API | {name for line in OWN for name in line.split()}
    assert set(horovodish.tensorflow.__all__) == expected
    assert horovodish.tensorflow.__all__ == sorted(horovodish.tensorflow.__all__)


@pytest.mark.parametrize("name", ["BroadcastGlobalVariablesHook", "broadcast_global_variables"])
def test_what_takes_the_place_of_names_of_tensorflow_1(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}': it is for sessions; use broadcast_variables"):
        getattr(horovodish.tensorflow, name)


def test_there_are_no_other_public_names() -> None:
    folder = Path(horovodish.tensorflow.__file__).parent
    submodules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir()}
    public = {name for name in vars(horovodish.tensorflow) if not name.startswith("_")}
    found_when_asked_for = {"SyncBatchNormalization"}
    assert public - submodules | found_when_asked_for == set(horovodish.tensorflow.__all__)


@pytest.mark.parametrize("name", sorted(name for line in OWN for name in line.split()))
def test_functions_are_documented(name: str) -> None:
    assert getattr(horovodish.tensorflow, name).__doc__


def test_the_import_settles_nothing_for_tensorflow() -> None:
    """Threads and devices can be configured afterwards."""
    code = """
import horovodish.tensorflow as hvd, tensorflow as tf
hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(3)
tf.config.set_visible_devices([], "GPU")
print(hvd.allreduce(tf.ones(())).numpy(), tf.config.threading.get_inter_op_parallelism_threads())
hvd.shutdown()
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert finished.stdout == "1.0 3\n", finished.stderr
