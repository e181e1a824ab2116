"""Python runs this first in what the tests start: TensorFlow and Keras import less.

Both import what some of their parts can do without, if it is installed: 1.6 of 5 seconds in each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SPARED = {
    "jax": ("tensorflow.lite.python.util", "keras.src.callbacks.orbax_checkpoint"),
    "matplotlib": ("keras.src.visualization.plot_image_gallery", "keras.src.visualization.plot_bounding_box_gallery"),
    "sklearn": ("keras.src.wrappers",),
}
"""By package, the modules whose import goes without it."""


class Absent:
    """A package that is not there for a module that asks for it meanwhile. Both a finder and a loader."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importers = [sys.modules[module] for module in SPARED.get(name, ()) if module in sys.modules]
        is_asking = any(getattr(importer.__spec__, "_initializing", False) for importer in importers)
        return ModuleSpec(name, cls) if is_asking else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Never called, and importlib asks for it."""


sys.meta_path.insert(0, Absent)
