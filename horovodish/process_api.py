# ruff: noqa: F403, F405
"""What `horovodish` and the shim of every framework have in common: all public names of the modules below."""

from horovodish.basics import *
from horovodish.errors import *
from horovodish.process_sets import *
from horovodish.recovery import *
from horovodish.reduce_ops import *
from horovodish.run_function import *
from horovodish.stragglers import *
from horovodish.timeline import *

# Spelled out, because mypy takes no names from a sum of lists.
__all__ = [
    "Adasum",
    "Average",
    "DuplicateNameError",
    "EngineStoppedError",
    "ForkedProcessError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankLateness",
    "RankLostError",
    "ReduceOp",
    "SettingError",
    "StallError",
    "StragglerReport",
    "Sum",
    "UnsupportedTensorError",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "surviving_communicator",
]
