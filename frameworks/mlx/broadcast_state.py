"""The same start on every rank: a model and the state of an optimizer, sent from one rank."""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from horovodish.collectives.named_tensors import broadcast_named
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.mlx.collectives import ARRAYS

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Give every rank the root's values of a model or of a tree. Collective; blocks.

    Args:
        params: a module, or a tree of arrays and of what can be pickled, with the same names on every rank.
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        The module itself, which has the root's values now; or a new tree with them.

    Raises:
        MismatchError: the ranks have different trees. `horovodish.collectives` lists the other errors.
        ValueError: there is no rank `root_rank` in the process set.
    """
    if isinstance(params, Module):
        return params.update(_broadcast("broadcast_parameters", params.parameters(), root_rank, process_set))
    return _broadcast("broadcast_parameters", params, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the root's state of an optimizer, such as its moments and learning rate. Collective; blocks.

    Args:
        optimizer: wrapped or not. If only the root has loaded a state, call `optimizer.init(model)` on the others.
        root_rank, process_set: as for `broadcast_parameters`, as are the errors.
    """
    optimizer.state = _broadcast("broadcast_optimizer_state", optimizer.state, root_rank, process_set)


def _broadcast(function: str, tree: Any, root_rank: int, process_set: ProcessSet) -> Any:
    values = broadcast_named(function, dict(tree_flatten(tree)), root_rank, ARRAYS, process_set)
    return tree_map_with_path(lambda name, _: values[name], tree)
