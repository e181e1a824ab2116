"""The public names of horovodish.tensorflow, and what its import does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import horovodish.tensorflow
from support.surface import by_position, check_module_of_horovods, check_surface

HOROVODS_MODULES = {
    "mpi_ops": "allreduce allgather broadcast join rank size init rank_op size_op Average Sum Adasum",
    "functions": "broadcast_variables broadcast_object broadcast_object_fn allgather_object",
    "compression": "Compression Compressor",
    "sync_batch_norm": "SyncBatchNormalization",
}


def test_the_public_names() -> None:
    check_surface(horovodish.tensorflow, found_when_asked_for=frozenset({"SyncBatchNormalization"}))


@pytest.mark.parametrize("module", HOROVODS_MODULES)
def test_horovods_modules_have_what_scripts_import_from_them(module: str) -> None:
    check_module_of_horovods(horovodish.tensorflow, module, HOROVODS_MODULES[module])


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


IN_HOROVODS_ORDER = {
    "DistributedOptimizer": (
        "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
        "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups "
        "process_set scale_local_gradients"
    ),
    "DistributedGradientTape": (
        "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups "
        "groups process_set scale_local_gradients"
    ),
    "PartialDistributedGradientTape": (
        "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups "
        "groups process_set local_layers scale_local_gradients"
    ),
}


@pytest.mark.parametrize("function", IN_HOROVODS_ORDER)
def test_arguments_by_position_are_in_horovods_order(function: str) -> None:
    assert by_position(getattr(horovodish.tensorflow, function)) == IN_HOROVODS_ORDER[function]
