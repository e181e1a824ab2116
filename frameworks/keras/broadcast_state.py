"""The same values on every rank: variables sent from one of them, and models loaded with a wrapped optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from horovodish.collectives.adapter import checked_root, variables_to_send
from horovodish.collectives.comparison import Named, compared_on_all_ranks
from horovodish.collectives.functions import broadcast_async
from horovodish.collectives.objects import broadcast_object
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.gradients.compression import Compressor
from horovodish.keras.compression import Compression
from horovodish.keras.distribution import Distribution, distribution_of
from horovodish.keras.layer_state import SAME_VOCABULARY, Vocabulary, finalize, give_back, keeps, kept_of, layers_with
from horovodish.keras.optimizer import DistributedOptimizer

__all__ = ["broadcast_global_variables", "broadcast_variables", "load_model"]


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Write the root's values into the variables of every rank. Collective; blocks. Not for compiled steps.

    Args:
        variables: Keras variables of any dtype, with the same shapes and dtypes on every rank, in the same order.
            Layers such as Normalization make constants of their variables, and make them anew.
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank`.
        MismatchError: the ranks have different numbers of variables, shapes or dtypes.
            `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
    """
    variables = variables_to_send(variables)
    _broadcast(variables, (), root_rank, process_set)
    finalize(layers_with(variables))


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Give every rank the root's weights of a model and the state of its optimizers. Collective; blocks.

    What layers have adapted to travels, too: the constants of Normalization and the bins of Discretization. The
    vocabularies of StringLookup, IntegerLookup and TextVectorization are compared.

    Args:
        root_rank: the rank whose values to send, the same on every rank.
        model: Keras 3 has no list of all variables there are, so it must be given, built. Random seeds and metrics
            stay each rank's own. A layer will do, such as one that a data pipeline calls.

    Raises:
        ValueError: there is no model, or no rank `root_rank`.
        MismatchError: as `broadcast_variables`, or vocabularies differ.

    Example:
        >>> hvd.broadcast_global_variables(0, model)
    """
    if model is None:
        raise ValueError(
            "Keras 3 has no list of all variables: pass the model, broadcast_global_variables(root_rank, model), or "
            "use callbacks.BroadcastGlobalVariablesCallback"
        )
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"broadcast_global_variables takes root_rank and then the model, not {type(model).__name__}")
    if not (model.built or model.weights):
        raise ValueError(f"{model.name} is not built, so it has no weights to send; build it, or call it with a batch")
    broadcast_model(model, state_of(model), root_rank)


def broadcast_model(
    model: Any, variables: list[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Write the root's values into some variables of a model, and give its layers what they compute with besides.

    Collective; blocks. Every rank has the same layers.

    Raises:
        MismatchError: as `broadcast_variables`, or the vocabularies of layers differ.
    """
    layers = keeping_layers_of(model)
    _broadcast(variables, layers, root_rank, process_set)
    if not layers:
        return
    kept = list(map(kept_of, layers))
    with compared_on_all_ranks(
        "broadcast_global_variables", "the vocabularies", process_set, SAME_VOCABULARY
    ) as described:
        for layer, each in zip(layers, kept, strict=True):
            described += [Named(str(each), layer.name)] if isinstance(each, Vocabulary) else []
    give_back(layers, broadcast_object(kept, root_rank, process_set=process_set))


def _broadcast(variables: list[Any], layers: Iterable[Any], root_rank: int, process_set: ProcessSet) -> None:
    with compared_on_all_ranks("broadcast_variables", "the variables", process_set) as described:
        root = checked_root(root_rank, process_set)
        for number, variable in enumerate(variables):
            kind = f"number {number} of shape {tuple(variable.shape)} and dtype {variable.dtype}"
            described.append(Named(kind, variable.path))
        described += [Named(f"a {type(layer).__name__}", layer.name) for layer in layers]
    if process_set.size() == 1:
        return
    values = [np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    handles = [
        # Bytes travel, since Keras has dtypes that the engine cannot reduce.
        broadcast_async(value.reshape(-1).view(np.uint8), root, f"broadcast_variables.{number}", process_set)
        for number, value in enumerate(values)
    ]
    for variable, value, handle in zip(variables, values, handles, strict=True):
        variable.assign(handle.wait().view(value.dtype).reshape(variable.shape))


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that train a model, in the same order on every rank.

    A model with its own `train_step` may have several, as attributes of its own or of its layers, alone or in lists
    and dicts. Where some of them are wrapped, these alone count: the one that `compile` makes unasked trains nothing.
    """
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for value in list(vars(layer).values()):
            members = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            found.update((id(one), one) for one in members if isinstance(one, keras.optimizers.Optimizer))
    wrapped = [one for one in found.values() if distribution_of(one)]
    return wrapped or list(found.values())


def distributions_of(model: Any) -> list[Distribution]:
    """The distributions of the wrapped optimizers that train a model."""
    return [found for one in optimizers_of(model) if (found := distribution_of(one))]


def weights_of(model: Any) -> list[Any]:
    """The weights of a model that are the same on every rank: all except the weights of local layers."""
    local = _local_variables(model)
    return [weight for weight in model.weights if id(weight) not in local]


def state_of(model: Any) -> list[Any]:
    """The variables of a model and its optimizers that all ranks have alike: no seeds, metrics or local layers."""
    local = _local_variables(model)
    state = weights_of(model)
    for optimizer in optimizers_of(model):
        own = {id(slot) for slot, trained in _slots_of(optimizer) if id(trained) in local}
        state += [variable for variable in optimizer.variables if id(variable) not in own]
    return state


def keeping_layers_of(model: Any) -> list[Any]:
    """The layers of a model that compute with more than variables, but for local layers, in the order of the model."""
    local = {id(each) for one in distributions_of(model) for layer in one.local for each in layer._flatten_layers()}
    return [each for each in model._flatten_layers() if id(each) not in local and keeps(each)]


def _local_variables(model: Any) -> set[int]:
    """The identities of variables that are this rank's own."""
    return {
        id(variable)
        for each in distributions_of(model)
        for variables in [each.plan.local, *(layer.variables for layer in each.local)]
        for variable in variables
    }


def _slots_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """The optimizer's state of each trained variable, with the variable. Names of variables are not unique.

    Optimizers of Keras keep lists with an item for each trained variable.
    """
    distribution = distribution_of(optimizer)
    if distribution and distribution.window:
        yield from distribution.window.slots
    inner = getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())
    for one in (optimizer, *inner):
        trained = getattr(one, "_trainable_variables", ())
        for name, slots in vars(one).items() if trained else ():
            if isinstance(slots, list) and len(slots) == len(trained) and name != "_variables":
                yield from zip(slots, trained, strict=True)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor = Compression.none,
    **options: Any,
) -> Any:
    """Load a compiled model that was saved with or without a wrapped optimizer, and wrap its optimizer. Not collective.

    Every rank that calls it reads the file.

    Args:
        filepath: as for `keras.saving.load_model`.
        custom_optimizers: classes of optimizers that are not Keras's.
        custom_objects: other classes and functions that the model needs, by name.
        compression: as for `DistributedOptimizer`.
        **options: the other arguments of `DistributedOptimizer`; none of them are kept in files.

    Returns:
        The model. Its optimizer has the state that was saved. One that was saved without an optimizer has none.

    Raises:
        What `keras.saving.load_model` and `DistributedOptimizer` raise.

    Example:
        >>> model = hvd.load_model("checkpoint.keras", compression=hvd.Compression.fp16)
    """
    named = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
        distribution = model.optimizer._distribution
        if distribution.variables is None:
            distribution.learn(model.optimizer, model.trainable_variables)
        if distribution.rounds is not None and str(filepath).endswith(".keras"):
            model.load_weights(filepath)  # a plain optimizer has left the round in the file
    return model
