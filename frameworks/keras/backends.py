"""The differences between Keras's backends: the modules that reduce its tensors and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras

from horovodish.gradients.plan import GradientAdapter


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


def gradients() -> GradientAdapter:
    """The gradient functions of Keras's backend, for gradient plans. Raises as `collectives`."""
    found: GradientAdapter = importlib.import_module(f"{collectives().__name__}.gradients").GRADIENTS
    return found


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which torch.compile calls and does not compile; on other backends as it is."""
    if keras.config.backend() != "torch":
        return method
    disabled: Callable[..., Any] = importlib.import_module("torch").compiler.disable(method)
    return disabled


def number_of(variable: Any) -> int:
    """The value of a variable that counts, also while a program is traced.

    0 where it has none: JAX's `fit` has taken it, or a program of TensorFlow that is traced has made the variable.
    """
    value = variable._value
    if keras.config.backend() == "tensorflow":
        with importlib.import_module("tensorflow").init_scope():
            return int(value.numpy()) if value.is_initialized() else 0
    return 0 if value is None else int(value)


def compile_anew() -> None:
    """Have steps of this process compiled anew when they run next, with what the script and its layers say by then."""
    if keras.config.backend() == "tensorflow":
        importlib.import_module("horovodish.tensorflow.tracing").trace_anew()
    elif keras.config.backend() == "jax":
        importlib.import_module("jax").clear_caches()
