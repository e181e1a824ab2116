"""The public names of horovodish.torch, and what its import does not do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import horovodish.basics
import horovodish.torch

DIAGNOSTICS = {"start_timeline", "stop_timeline", "straggler_report", "surviving_communicator"}
PROCESS_API = (set(horovodish.basics.__all__) - {"engine"}) | DIAGNOSTICS
OWN = {
    "Adasum Average Max Min Product ReduceOp Sum",
    "LinearScalingWarmup ResumableSampler",
    "Compression DistributedOptimizer HorovodInternalError HostsUpdatedInterrupt",
    "MismatchError RankLostError StallError UnsupportedTensorError",
    "ProcessSet add_process_set global_process_set remove_process_set",
    "SyncBatchNorm convert_sync_batchnorm",
    "allgather allgather_async allgather_object grouped_allgather grouped_allgather_async",
    "allreduce allreduce_ allreduce_async allreduce_async_ sparse_allreduce_async",
    "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_",
    "alltoall alltoall_async",
    "barrier check_consistency join poll synchronize",
    "broadcast broadcast_ broadcast_async broadcast_async_",
    "broadcast_object broadcast_optimizer_state broadcast_parameters",
    "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async",
}


def test_elastic_training_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'elastic': elastic training is not there"):
        horovodish.torch.elastic  # noqa: B018


def test_the_public_names() -> None:
    expected = PROCESS_API | {name for line in OWN for name in line.split()}
    assert set(horovodish.torch.__all__) == expected
    assert horovodish.torch.__all__ == sorted(horovodish.torch.__all__)


def test_there_are_no_other_public_names() -> None:
    submodules = {path.stem for path in Path(horovodish.torch.__file__).parent.glob("*.py")}
    public = {name for name in vars(horovodish.torch) if not name.startswith("_")}
    assert public - submodules == set(horovodish.torch.__all__)


@pytest.mark.parametrize("name", sorted(name for line in OWN for name in line.split()))
def test_functions_are_documented(name: str) -> None:
    assert getattr(horovodish.torch, name).__doc__


def test_the_package_has_one_name() -> None:
    path = Path(horovodish.torch.__file__).resolve()
    specification = importlib.util.spec_from_file_location("frameworks.torch", path)
    assert specification is not None
    assert specification.loader is not None
    with pytest.raises(ImportError, match=r"import this package as horovodish\.torch"):
        specification.loader.exec_module(importlib.util.module_from_spec(specification))


def test_the_import_starts_no_thread_and_no_mpi() -> None:
    code = "import os, sys, torch; before = len(os.listdir('/proc/self/task')); import horovodish.torch; "
    code += "assert len(os.listdir('/proc/self/task')) == before; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
