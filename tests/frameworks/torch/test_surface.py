"""The public names of horovodish.torch, and what its import does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import horovodish.torch
from support.surface import by_position, check_module_of_horovods, check_surface

HOROVODS_MODULES = {
    "mpi_ops": "allreduce_async_ synchronize poll join barrier rank size init Average Sum Adasum",
    "functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "compression": "Compression Compressor",
    "optimizer": "DistributedOptimizer",
    "sync_batch_norm": "SyncBatchNorm",
}


def test_the_public_names() -> None:
    check_surface(horovodish.torch)
    for name in ("ElasticSampler", "ObjectState", "State", "TorchState"):
        assert hasattr(horovodish.torch.elastic, name)


@pytest.mark.parametrize("module", HOROVODS_MODULES)
def test_horovods_modules_have_what_scripts_import_from_them(module: str) -> None:
    check_module_of_horovods(horovodish.torch, module, HOROVODS_MODULES[module])


def test_horovods_modules_are_attributes_that_nobody_imported() -> None:
    code = "import horovodish.torch as hvd; print(hvd.mpi_ops.Sum is hvd.Sum, hvd.functions.rank is hvd.rank)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True True\n", done.stderr


def test_the_import_starts_no_thread_and_no_mpi() -> None:
    code = "import os, sys, torch; before = len(os.listdir('/proc/self/task')); import horovodish.torch; "
    code += "assert len(os.listdir('/proc/self/task')) == before; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


IN_HOROVODS_ORDER = (
    "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups "
    "sparse_as_dense process_set"
)


def test_arguments_by_position_are_in_horovods_order() -> None:
    assert by_position(horovodish.torch.DistributedOptimizer) == IN_HOROVODS_ORDER
