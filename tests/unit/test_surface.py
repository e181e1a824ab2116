"""The public names of the core, and that the checks of every surface test see what is wrong."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import ModuleType

import pytest

import horovodish
from horovodish import collectives, errors, package_names, process_api
from horovodish.collectives import adding_sets, process_sets, reduce_ops
from horovodish.elastic import recovery
from horovodish.launch import run_function
from horovodish.reports import codes, stragglers, timeline
from horovodish.runtime import basics, built
from support.surface import check_surface, is_documented

HOROVODS = """
ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled init is_homogeneous is_initialized
local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank rocm_built run shutdown size
start_timeline stop_timeline Adasum Average Max Min Product ProcessSet Sum add_process_set global_process_set
remove_process_set HorovodInternalError HostsUpdatedInterrupt
"""
"""Names of Horovod's that scripts take from any of its modules."""


def test_all_is_what_there_is() -> None:
    check_surface(horovodish)


def test_horovods_names_are_there() -> None:
    assert set(HOROVODS.split()) <= set(process_api.__all__)


def test_every_module_has_all_of_the_process_api() -> None:
    modules = (
        adding_sets,
        basics,
        built,
        codes,
        errors,
        process_sets,
        recovery,
        reduce_ops,
        run_function,
        stragglers,
        timeline,
    )
    assert sorted(process_api.__all__) == sorted(name for module in modules for name in module.__all__)


def test_every_error_is_public() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert classes == set(errors.__all__)


def test_collectives_export_collectives_alone() -> None:
    assert set(collectives.__all__) >= {"allreduce", "join", "synchronize"}
    own = "horovodish.collectives.functions"
    foreign = {name for name in collectives.__all__ if getattr(collectives, name).__module__ != own}
    assert foreign == {"Handle", "poll", "synchronize"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("check_extension", "there is nothing to check"),
        ("allreduced", "'horovodish' has no attribute 'allreduced'$"),
        ("DistributedOptimizer", r"write `import horovodish\.\w+ as hvd` to train with \w+"),
    ],
)
def test_a_name_that_is_not_there(name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=reason):
        getattr(horovodish, name)


def test_horovods_modules_of_functions_are_attributes() -> None:
    assert horovodish.mpi_ops.Sum is horovodish.functions.Sum is horovodish.Sum


def test_a_shim_without_elastic_says_so() -> None:
    with pytest.raises(AttributeError, match=r"'json' has no attribute 'elastic': .* use horovodish\.elastic"):
        package_names.look_up("json", "elastic")


class Bare:
    pass


class BareEnum(enum.IntEnum):
    ONE = 1


@dataclass
class BareData:
    field: int


def bare() -> None:
    pass


@pytest.mark.parametrize("value", [Bare, Bare(), BareEnum.ONE, BareData, BareData(1), bare])
def test_what_is_not_documented_is_seen(value: object) -> None:
    assert not is_documented("name", value)


def changed(**names: object) -> ModuleType:
    """A module as horovodish, but for some names; None: it lacks the name."""
    module = ModuleType("changed")
    vars(module).update({**vars(horovodish), **names})
    for name in [name for name, value in names.items() if value is None]:
        delattr(module, name)
    return module


@pytest.mark.parametrize(
    "module",
    [
        changed(leaked=bare),
        changed(rank=None),
        changed(rank=bare),
        changed(__all__=[*horovodish.__all__, "rank"]),
        changed(__all__=[name for name in horovodish.__all__ if name != "join"], join=None),
    ],
    ids=["a leaked name", "a missing name", "no docstring", "a name twice", "not what every module has"],
)
def test_a_wrong_surface_is_seen(module: ModuleType) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        check_surface(module)
