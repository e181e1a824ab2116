"""What holds for the public names of `horovodish` and of every framework's shim."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from horovodish import process_api
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.gradients.compression import Compressor

OWN_VERSIONS = "allgather allgather_object allreduce barrier broadcast broadcast_object join reducescatter"
EVERYWHERE = {*process_api.__all__, *OWN_VERSIONS.split()}
"""Every module has these names, some of them with its own function."""


def check_surface(module: ModuleType, *, found_when_asked_for: frozenset[str] = frozenset()) -> None:
    """`__all__` says what there is, no more and no less, and all of it is documented.

    Args:
        module: a package of horovodish.
        found_when_asked_for: names that are imported on their first use.
    """
    public = set(module.__all__)
    assert len(public) == len(module.__all__), "a shim repeats a name of process_api"
    assert public >= EVERYWHERE, f"{module.__name__} lacks {EVERYWHERE - public}"
    there = {name for name in vars(module) if not name.startswith("_") or name == "__version__"} | found_when_asked_for
    assert there - (submodules(module) - public) == public
    homes = {name: getattr(getattr(module, name), "__module__", None) for name in public}
    assert [name for name, home in homes.items() if home and not home.startswith("horovodish")] == []
    assert [name for name in module.__all__ if not is_documented(name, getattr(module, name))] == []


def check_module_of_horovods(package: ModuleType, module: str, names: str) -> None:
    """The module has these names, and they stand for what the package means by them.

    Args:
        package: a shim.
        module: its name in Horovod, without the package's.
        names: what scripts import from it.
    """
    found = importlib.import_module(f"{package.__name__}.{module}")
    for name in names.split():
        # Horovod's packages do not have this one either.
        assert getattr(found, name) is (Compressor if name == "Compressor" else getattr(package, name)), name


def by_position(function: Callable[..., object]) -> str:
    """The arguments that a caller may pass by position, in their order."""
    parameters = inspect.signature(function).parameters.values()
    return " ".join(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def submodules(package: ModuleType) -> set[str]:
    return {path.stem for path in Path(str(package.__file__)).parent.iterdir()}


def is_documented(name: str, value: object) -> bool:
    """True if somebody wrote a docstring. An enum's members, dataclasses and instances have one in any case."""
    if isinstance(value, ReduceOp):
        return value.name in (ReduceOp.__doc__ or "")
    if isinstance(value, str | ModuleType) or inspect.isroutine(value):
        return bool(value.__doc__)
    class_ = value if inspect.isclass(value) else type(value)
    text = vars(class_).get("__doc__") or ""
    return bool(text) and not text.startswith((f"{class_.__name__}(", "An enumeration."))  # the latter by Python 3.10
