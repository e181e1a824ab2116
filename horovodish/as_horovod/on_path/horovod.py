"""Horovod's module names for horovodish: `import horovod.torch as hvd` gives all that `horovodish.torch` has.

It is a file and no folder, so that pip overwrites nothing of an installed Horovod. Where both are in one folder, Python
takes Horovod's.
"""

from horovodish import as_horovod as _as_horovod
from horovodish import run

__all__ = ["run"]
__version__ = _as_horovod.VERSION
__path__: list[str] = []  # makes it a package; horovodish.as_horovod finds the modules in it
