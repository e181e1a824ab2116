"""The same start on every rank: the values of a model and the state of an optimizer, sent from one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from horovodish import basics
from horovodish.collectives import synchronize
from horovodish.comparison import compared_on_all_ranks
from horovodish.objects import broadcast_object
from horovodish.operation import checked_root
from horovodish.process_sets import ProcessSet, global_process_set
from horovodish.torch.collectives import broadcast_async_
from horovodish.torch.tensors import check_tensor, moves_as_bytes

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None] | Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Write the root's values into the parameters and buffers of every rank. Collective; blocks.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or any dict or iterable of names and tensors, with the
            same names, shapes and dtypes on every rank. `model.parameters()` or a list of tensors: they are numbered,
            and must have the same order on every rank. Tensors of any dtype and of any strides. An
            entry that is None is passed over, and so is a module's extra state (`get_extra_state`) that is no tensor,
            because nothing can be written into it: `model.load_state_dict(hvd.broadcast_object(model.state_dict()))`
            sends it, too.
        root_rank: whose values to send, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, or this rank is outside of it.
        TypeError: `params` is not what is said above.
        MismatchError: the ranks have different names, shapes or dtypes.
        `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    with compared_on_all_ranks("broadcast_parameters", "the names of the tensors", process_set) as described:
        root = checked_root(root_rank, process_set)
        tensors = dict(_named_tensors(params))
        # The engine compares shapes and dtypes, but not the dtypes of what it sees as bytes.
        described += sorted(_described(name, tensor) for name, tensor in tensors.items())
    _broadcast_into(root, "broadcast_parameters", tensors, process_set)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    model: Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizer of every rank the state and the options of the root's. Collective; blocks.

    No step is taken: the root's optimizer stays as it is, bit for bit, and a rank whose optimizer has no state yet gets
    it. Learning rates and other options of the parameter groups are sent, too.

    Args:
        optimizer: of the same kind, over the same parameters, on every rank; wrapped or not.
        root_rank: whose state to send, the same on every rank.
        model: not needed; taken because Horovod takes it.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, or this rank is outside of it.
        TypeError: `optimizer` is no optimizer.
        MismatchError: the ranks' optimizers are of different kinds, or have different numbers of parameters.
            `horovodish.collectives` lists the other errors.

    Example:
        >>> if hvd.rank() == 0:
        ...     optimizer.load_state_dict(torch.load("checkpoint.pt"))
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    tensors: list[Tensor] = []
    structure = None
    with compared_on_all_ranks("broadcast_optimizer_state", "optimizer and parameter groups", process_set) as described:
        root = checked_root(root_rank, process_set)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"broadcast_optimizer_state takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        described += [_kind(optimizer), [len(group["params"]) for group in optimizer.param_groups]]
        if basics.rank() == root:
            structure = _structure(optimizer, tensors)
    structure = broadcast_object(structure, root, "broadcast_optimizer_state.structure", process_set)
    if basics.rank() != root:
        _rebuild(optimizer, structure, tensors)
    named = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    _broadcast_into(root, "broadcast_optimizer_state", named, process_set)


def _structure(optimizer: Optimizer, tensors: list[Tensor]) -> tuple[list[tuple[Any, Any]], list[dict[str, Any]]]:
    """An optimizer's state and options for the other ranks, with places in place of tensors, which go to the list."""
    numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}

    def take_out(value: Tensor) -> _Place:
        check_tensor(value, "broadcast_optimizer_state")
        tensors.append(value.detach().contiguous())
        # Strides as the root has them, where they leave no gaps: fused optimizers want them as the parameter's.
        return _Place(
            len(tensors) - 1, tuple(value.shape), torch.empty_like(value).stride(), value.dtype, value.device.type
        )

    state = [(numbers.get(key, key), _replaced(value, Tensor, take_out)) for key, value in optimizer.state.items()]
    return state, [_replaced(_options(group), Tensor, take_out) for group in optimizer.param_groups]


def _rebuild(optimizer: Optimizer, structure: Any, tensors: list[Tensor]) -> None:
    """Gives an optimizer state and options of that structure; the tensors in them, without values, go to the list."""
    state, options = structure
    parameters = _parameters(optimizer)

    def put_in(place: _Place) -> Tensor:
        # Places are met in the order in which the root made them.
        tensors.append(torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device_type))
        return tensors[place.number]

    received = [(key, _replaced(value, _Place, put_in)) for key, value in state]
    for group, sent in zip(optimizer.param_groups, options, strict=True):
        group.update(_replaced(sent, _Place, put_in))
    optimizer.state.clear()
    optimizer.state.update((parameters[key] if isinstance(key, int) else key, value) for key, value in received)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in the structure that travels as a pickle."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str  # the ranks' devices of that type are not of the same number


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which `replace` was applied to everything of class `kind`."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, kind, replace) for item in value)
    return value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _kind(optimizer: Optimizer) -> str:
    # The wrapper is a subclass of what it wraps; a wrapped and an unwrapped optimizer have the same state.
    return getattr(optimizer, "wrapped_class", type(optimizer)).__name__


def _named_tensors(params: Any) -> Iterable[tuple[str, Tensor]]:
    wanted = "broadcast_parameters takes names and tensors; pass model.state_dict() or model.named_parameters(), not"
    if isinstance(params, Mapping) and "param_groups" in params:
        raise TypeError(f"{wanted} the state of an optimizer, for which there is broadcast_optimizer_state(optimizer)")
    if isinstance(params, Module | Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{wanted} {type(params).__name__}")
    for number, item in enumerate(params.items() if isinstance(params, Mapping) else params):
        entry = (f"tensor {number}", item) if isinstance(item, Tensor) else item
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(f"{wanted} an iterable of {type(entry).__name__}")
        name, tensor = entry
        is_extra_state = name.rpartition(".")[2] == "_extra_state" and not isinstance(tensor, Tensor)
        if tensor is not None and not is_extra_state:
            check_tensor(tensor, f"broadcast_parameters: {name}")
            yield name, tensor


def _broadcast_into(root: int, prefix: str, tensors: dict[str, Tensor], process_set: ProcessSet) -> None:
    handles = []
    for name, tensor in tensors.items():
        own = _not_repeated(tensor.detach())
        row_major = own.resolve_conj().resolve_neg().contiguous()
        sent = row_major.unsqueeze(-1).view(torch.uint8) if moves_as_bytes(own) else row_major
        handles.append((own, row_major, broadcast_async_(sent, root, f"{prefix}.{name}", process_set)))
    for own, row_major, handle in handles:
        synchronize(handle)
        if row_major.data_ptr() != own.data_ptr():
            own.copy_(row_major)


def _not_repeated(tensor: Tensor) -> Tensor:
    """Each element of memory once, because nothing can be written into what `expand` gives."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} of {tensor.dtype}" if moves_as_bytes(tensor) else name
