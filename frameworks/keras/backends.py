"""What differs between Keras's backends: who reduces tensors, and what gradients look like."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras


def collectives() -> ModuleType:
    """The horovodish module whose collectives take the tensors of Keras's backend. It is imported when first needed.

    Raises:
        ImportError: there is none for this backend.
    """
    backend = keras.config.backend()
    module = f"horovodish.{backend}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(
            f"horovodish.keras on the {backend} backend needs {module}, which this installation does not have; choose "
            "another backend with the variable KERAS_BACKEND"
        ) from error


def runs_eagerly() -> bool:
    """Whether what is called now runs now, so that ranks may differ in which gradients they have.

    In a compiled step that is decided when it is traced, alike on every rank.
    """
    backend = keras.config.backend()
    return backend == "torch" or (backend == "tensorflow" and not traces())  # JAX has a gradient for everything


def traces() -> bool:
    """Whether a function of TensorFlow's is traced."""
    return keras.config.backend() == "tensorflow" and not importlib.import_module("tensorflow").executing_eagerly()


def name_in_step(name: str) -> str:
    """The name of what is reduced now, the same in every step.

    TensorFlow runs the operations of a function in any order, so that they are counted within it. JAX's shim counts
    those of a program by itself, and where nothing is compiled one call waits for the other.
    """
    if not traces():
        return name
    counted: str = importlib.import_module("horovodish.tensorflow.names").stable_name(name, "")
    return counted


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which torch.compile calls and does not compile; on other backends as it is."""
    if keras.config.backend() != "torch":
        return method
    disabled: Callable[..., Any] = importlib.import_module("torch").compiler.disable(method)
    return disabled


def dense(gradient: Any) -> Any:
    """A sparse gradient, which only TensorFlow has, with all its rows; others as they are."""
    if keras.config.backend() != "tensorflow":
        return gradient
    return importlib.import_module("tensorflow").convert_to_tensor(gradient)


def knows_slices() -> bool:
    """Whether gradients may be sparse: TensorFlow's IndexedSlices."""
    return keras.config.backend() == "tensorflow"


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient is IndexedSlices."""
    return knows_slices() and isinstance(gradient, importlib.import_module("tensorflow").IndexedSlices)


def as_slices(gradient: Any, variable: Any) -> Any:
    """A gradient as IndexedSlices: a dense one has all rows, and none, None, has no row."""
    if is_sparse(gradient):
        return gradient
    tensorflow = importlib.import_module("tensorflow")
    if gradient is None:
        gradient = tensorflow.zeros([0, *variable.shape[1:]], variable.dtype)
    return tensorflow.IndexedSlices(gradient, tensorflow.range(gradient.shape[0]), tensorflow.constant(variable.shape))
