"""The names of a package: the names that it exports, and Horovod's names that it lacks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

__all__ = ["INSTEAD", "exported", "look_up"]

_MODULES = ("elastic", "functions", "mpi_ops")

INSTEAD = {
    "check_extension": "nothing is compiled for a framework, so there is nothing to check",
}
_OF_FRAMEWORKS = ("Distributed", "broadcast_", "callbacks", "Compression", "SyncBatchNorm")
_NO_ELASTIC = "this shim has no elastic.py; use horovodish.elastic, with NumPy arrays in an ObjectState"


def exported(package: str) -> list[str]:
    """The `__all__` of a package: what its `__init__` has imported under a public name, without the modules."""
    found = vars(sys.modules[package]).items()
    return sorted(name for name, value in found if not name.startswith("_") and not isinstance(value, ModuleType))


def look_up(package: str, name: str) -> object:
    """The `__getattr__` of a package: return a module of it, or raise AttributeError with a remedy.

    Where a package has no `mpi_ops` or `functions`, it is the package itself: `hvd.mpi_ops.Sum` is `hvd.Sum`.

    Args:
        package: its name.
        name: what was asked for.
    """
    if name in _MODULES:
        if importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        if name != "elastic":
            return sys.modules[package]
    if package == __package__ and name.startswith(_OF_FRAMEWORKS):
        used = next((each for each in ("keras", "tensorflow", "jax", "mlx") if each in sys.modules), "torch")
        remedy: str | None = f"write `import {package}.{used} as hvd` to train with {used}"
    else:
        remedy = _NO_ELASTIC if name == "elastic" else INSTEAD.get(name)
    # Python itself adds the name, and then asks whether another one was meant.
    raise AttributeError(f"module {package!r} has no attribute {name!r}" + (f": {remedy}" if remedy else ""))
