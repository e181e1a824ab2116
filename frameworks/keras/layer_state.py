"""State of layers other than variables: constants computed from variables, bins, vocabularies, buffers."""

from __future__ import annotations

import gc
import hashlib
import importlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from horovodish.keras.backends import compile_anew


class Vocabulary(NamedTuple):
    """A value that identifies the vocabulary of a lookup layer. Vocabularies are compared, not sent.

    Attributes:
        tokens: how many there are.
        checksum: of the tokens in their order, and of their weights.
    """

    tokens: int
    checksum: str

    def __str__(self) -> str:
        return f"a vocabulary of {self.tokens} tokens with checksum {self.checksum}"


SAME_VOCABULARY = (
    "give every rank the same one: adapt on the same data, or call "
    "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0)) before the model is built"
)


_MAKES_NO_CONSTANTS = "_horovodish_makes_no_constants"


def keeps(layer: Any) -> bool:
    """Whether a layer computes with more than variables."""
    return hasattr(layer, "finalize_state") or isinstance(layer, keras.layers.TorchModuleWrapper)


def kept_of(layer: Any) -> Any:
    """Everything besides variables that determines a layer's output, as a value to pickle. None if nothing does."""
    if isinstance(layer, keras.layers.Normalization):
        return None if layer.input_mean is None else (np.asarray(layer.input_mean), np.asarray(layer.input_variance))
    if isinstance(layer, keras.layers.Discretization):
        return (None if layer.bin_boundaries is None else list(layer.bin_boundaries)), layer.summary
    if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return _vocabulary_of(layer)
    if isinstance(layer, keras.layers.TorchModuleWrapper):
        return {name: keras.ops.convert_to_numpy(buffer) for name, buffer in layer.module.named_buffers()}
    return None


def give_back(layers: Sequence[Any], kept: Sequence[Any]) -> None:
    """Give layers what `kept_of` gave, and finalize them. Their variables have their values already. Not collective.

    Raises:
        ValueError: a layer has another vocabulary.
    """
    changed = False
    for layer, value in zip(layers, kept, strict=True):
        own = kept_of(layer)
        if isinstance(value, Vocabulary) and own != value:
            raise ValueError(f"{layer.name} has {own}, where {value} is expected; {SAME_VOCABULARY}")
        if pickle.dumps(own) != pickle.dumps(value):
            _set(layer, value)
            changed = True
    finalize(layers, changed=changed)


def finalize(layers: Iterable[Any], *, changed: bool = False) -> None:
    """Have layers compute their constants from their variables again. Compiled steps contain the constants.

    Args:
        layers: any; layers without such constants are skipped.
        changed: whether there are other changes that need steps compiled again.
    """
    for layer in layers:
        if hasattr(layer, "finalize_state") and layer.variables:
            before = _constants(layer)
            layer.finalize_state()
            changed = changed or _constants(layer) != before
    if changed:
        compile_anew()


def layers_with(variables: Iterable[Any]) -> list[Any]:
    """The layers that make constants of some of these variables.

    A variable does not know its layer, so the garbage collector is asked.
    """
    own = {
        id(variable): variable
        for variable in variables
        if not getattr(variable, "trainable", True) and not hasattr(variable, _MAKES_NO_CONSTANTS)
    }
    if not own:
        return []
    found, others = [], dict(own)
    for each in gc.get_objects():
        if issubclass(type(each), keras.layers.Layer) and hasattr(each, "finalize_state"):
            if any(id(variable) in own for variable in each.variables):
                found.append(each)
                for variable in each.variables:
                    others.pop(id(variable), None)
    for variable in others.values():  # the next call need not look for them
        object.__setattr__(variable, _MAKES_NO_CONSTANTS, True)
    return found


def _set(layer: Any, kept: Any) -> None:
    if isinstance(layer, keras.layers.Normalization):
        layer.input_mean, layer.input_variance = kept
        layer.build_from_config(layer.get_build_config())
    elif isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries, layer.summary = kept
    else:
        torch = importlib.import_module("torch")
        with torch.no_grad():
            for name, buffer in layer.module.named_buffers():
                buffer.copy_(torch.as_tensor(kept[name]))


def _constants(layer: Any) -> list[bytes]:
    return [keras.ops.convert_to_numpy(each).tobytes() for each in vars(layer).values() if keras.ops.is_tensor(each)]


def _vocabulary_of(layer: Any) -> Vocabulary:
    """The tables of lookup layers never change: a layer that adapts makes another one."""
    table, known = vars(layer).get("_horovodish_vocabulary", (None, None))
    if table is not layer.lookup_table:
        tokens = layer.get_vocabulary()
        weights = getattr(layer, "idf_weights_const", None)
        text = repr((list(map(str, tokens)), None if weights is None else weights.numpy().tolist()))
        known = Vocabulary(len(tokens), hashlib.sha256(text.encode()).hexdigest()[:8])
        object.__setattr__(layer, "_horovodish_vocabulary", (layer.lookup_table, known))
    assert isinstance(known, Vocabulary)
    return known
