"""What scripts import from `horovod.common` and the modules in it."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from horovodish import package_names as _package_names
from horovodish import process_api as _process_api
from horovodish.process_api import *  # noqa: F403

T = TypeVar("T")


class HorovodBasics:
    """The process API as an object: `HorovodBasics(__file__, "mpi_lib").rank()` is `hvd.rank()`."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(_process_api, name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if the framework, "torch" or "tensorflow", sees a GPU. Imports the framework."""
    framework = importlib.import_module(ext_base_name)
    if ext_base_name == "tensorflow":
        return bool(framework.config.list_physical_devices("GPU"))
    return bool(framework.cuda.is_available())


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables within a `with` block; those that are None stay as they are."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741, callers may name it
    """Cuts a list into n parts whose lengths differ by one at most; the longer ones come first."""
    base, more = divmod(len(l), n)
    ends = [part * base + min(part, more) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


__all__ = ["HorovodBasics", "env", "gpu_available", "split_list"]
__all__ += _package_names.exported(_process_api.__name__)
