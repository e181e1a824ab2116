"""Errors of the engine, which TensorFlow passes on as its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horovodish.errors import from_native

_TEXT = re.compile(r"(?:^|\s)(\w+Error): (.*?)(?: \[Op:\w+\].*)?$", re.DOTALL)


@contextmanager
def own_errors() -> Iterator[None]:
    """In this context, errors of eager execution are raised as errors of `horovodish.errors`."""
    try:
        yield
    except tf.errors.OpError as error:
        found = _TEXT.search(error.message)
        if found is None:
            raise
        kind, text = found.groups()
        raise (ValueError(text) if kind == "ValueError" else from_native(kind, text)) from None
