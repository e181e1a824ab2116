"""`horovodish.keras` under the name that Horovod's users know: `import horovodish.tensorflow.keras as hvd`."""

import typing as _typing

if __name__ != "horovodish.tensorflow.keras":
    raise ImportError("import this package as horovodish.tensorflow.keras")

from horovodish.keras import *  # noqa: F403

if not _typing.TYPE_CHECKING:
    from horovodish.keras import __all__ as __all__
    from horovodish.keras import __getattr__ as __getattr__
