"""The backends of Keras."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["torch", "jax", "tensorflow"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The ranks use this backend."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: make dev")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KERAS_BACKEND", request.param)
        environment.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        environment.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        if request.param != "tensorflow":
            environment.setenv("TEST_WITHOUT_TENSORFLOW", "1")
        yield request.param
