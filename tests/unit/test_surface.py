"""The public names: what `__all__` says is what there is, no more and no less."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import horovodish
from horovodish import collectives, errors

PROCESS_API = {
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
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
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
}
COLLECTIVES = {
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "synchronize",
}
ERRORS = {
    "DuplicateNameError",
    "EngineStoppedError",
    "ForkedProcessError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "RankLostError",
    "SettingError",
    "StallError",
    "UnsupportedTensorError",
}


def names_in_use(module: ModuleType) -> set[str]:
    """What a user sees in `dir(module)`, without the modules that an import leaves there."""
    return {name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)}


def test_all_is_what_there_is() -> None:
    found_when_asked_for = {"run"}
    assert names_in_use(horovodish) | found_when_asked_for == set(horovodish.__all__) - {"__version__"}


def test_the_promised_names_are_there() -> None:
    assert set(horovodish.__all__) >= PROCESS_API | COLLECTIVES | ERRORS


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("elastic", "'horovodish' has no attribute 'elastic': elastic training is not there yet"),
        ("check_extension", "there is nothing to check"),
        ("allreduced", "'horovodish' has no attribute 'allreduced'$"),
    ],
)
def test_a_name_that_is_not_there(name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=reason):
        getattr(horovodish, name)


def test_the_errors_are_the_documented_ones() -> None:
    assert set(errors.__all__) - {"from_native"} == ERRORS


@pytest.mark.parametrize("name", sorted(PROCESS_API | COLLECTIVES))
def test_every_public_function_is_documented(name: str) -> None:
    value = getattr(horovodish, name)
    if callable(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


@pytest.mark.parametrize("name", collectives.__all__)
def test_collectives_export_what_they_have(name: str) -> None:
    assert hasattr(collectives, name)
