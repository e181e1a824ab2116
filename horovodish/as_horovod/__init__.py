"""Horovod's module names for horovodish: `import horovod.torch as hvd` gives all that `horovodish.torch` has.

`on_path/horovod.py` is the top-level module `horovod`. A finder makes every module below it: an empty module that takes
each name from a module of horovodish. So each class and function exists once, and so does the engine, whichever way a
script imports them.

    horovodish run --as-horovod     puts the folder `on_path` in front on the PYTHONPATH of the ranks
    pip install horovod-names       installs a module that takes all from `on_path/horovod.py` (the folder `names` of
                                    the repository)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from horovodish import package_names
from horovodish.supported import FRAMEWORKS
from horovodish.version import __version__

__all__ = ["VERSION"]

VERSION = f"0.28.1+horovodish.{__version__}"
"""`horovod.__version__`: the release of Horovod whose names these are, and ours."""

_COMMON, _DATA = f"{__name__}.common", f"{__name__}.data"
MODULES = {
    **{framework: f"horovodish.{framework}" for framework in FRAMEWORKS},
    **dict.fromkeys(("common", "common.basics", "common.exceptions", "common.process_sets", "common.util"), _COMMON),
    "common.elastic": "horovodish.elastic",
    **dict.fromkeys(("data", "data.data_loader_base"), _DATA),
    **{name: f"horovodish.{name}" for name in ("ray", "spark")},
    **dict.fromkeys(("run", "run.runner", "runner"), "horovodish.launch.run_function"),
}
"""The module of horovodish that has the names of a module of Horovod's."""

INSTEAD = {
    "mxnet": "MXNet ended in 2023; train with another framework, such as horovod.torch",
    "ray": "horovod.ray has only RayExecutor here",
    "spark": "horovod.spark has only run here. Instead of an estimator, write the data to files and train with "
    "horovod.spark.run(function)",
}
"""The remedies for modules of Horovod's that horovodish does not have."""


class Finder(MetaPathFinder, Loader):
    """Makes the modules below `horovod`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of one of Horovod's modules, None for any other module.

        A module that horovodish has not, but has a remedy for, gets a specification too: importing it raises.
        """
        package, _, name = fullname.partition(".")
        if package != "horovod" or not (_ours(name) or _remedy(name)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Let the module take each name from ours.

        Raises:
            ImportError: horovodish has no such module; the message says what to do.
        """
        name = module.__name__.removeprefix("horovod.")
        found = _ours(name)
        if found is None:
            raise ImportError(f"horovodish has no {module.__name__}: {_remedy(name)}", name=module.__name__)
        ours = importlib.import_module(found)
        module.__doc__ = ours.__doc__
        vars(module).update(
            __all__=getattr(ours, "__all__", [name for name in vars(ours) if not name.startswith("_")]),
            __dir__=lambda: dir(ours),
            __getattr__=lambda name: getattr(ours, name),
        )


def _ours(name: str) -> str | None:
    """Return the name of our module for one of Horovod's, which is named without "horovod."; None if we have none."""
    if name.partition(".")[0] in FRAMEWORKS and name not in MODULES and importlib.util.find_spec(f"horovodish.{name}"):
        return f"horovodish.{name}"
    return MODULES.get(name)


def _remedy(name: str) -> str | None:
    """Return what to do without one of Horovod's modules, named as for `_ours`; None if nothing is known."""
    return INSTEAD.get(name.partition(".")[0]) or package_names.INSTEAD.get(name.rpartition(".")[2])


# First, because an installed Horovod's finder would look into the folder of its own.
sys.meta_path.insert(0, Finder())
