"""The public names of horovodish.torch, and what its import does not do."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import horovodish.torch
from support.surface import check_surface

HOROVODS_MODULES = {
    "mpi_ops": "allreduce_async_ synchronize poll join barrier rank size init Average Sum Adasum",
    "functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "elastic": "State ObjectState TorchState ElasticSampler",
    "compression": "Compression Compressor",
    "optimizer": "DistributedOptimizer",
    "sync_batch_norm": "SyncBatchNorm",
}


def test_the_public_names() -> None:
    check_surface(horovodish.torch)


@pytest.mark.parametrize("module", HOROVODS_MODULES)
def test_horovods_modules_have_what_scripts_import_from_them(module: str) -> None:
    found = importlib.import_module(f"horovodish.torch.{module}")
    for name in HOROVODS_MODULES[module].split():
        assert hasattr(found, name)
        assert getattr(horovodish.torch, name, getattr(found, name)) is getattr(found, name)


def test_horovods_modules_are_attributes_that_nobody_imported() -> None:
    code = "import horovodish.torch as hvd; print(hvd.mpi_ops.Sum is hvd.Sum, hvd.functions.rank is hvd.rank)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True True\n", done.stderr


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


IN_HOROVODS_ORDER = {
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
        "groups sparse_as_dense process_set"
    ),
}


@pytest.mark.parametrize("function", IN_HOROVODS_ORDER)
def test_arguments_by_position_are_in_horovods_order(function: str) -> None:
    parameters = inspect.signature(getattr(horovodish.torch, function)).parameters.values()
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_position == IN_HOROVODS_ORDER[function].split()
