"""Do the ranks hold the same model and the same optimizer state?"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from horovodish.collectives.consistency import Checksums, checksum_of_object, difference, without_addresses
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import MismatchError
from horovodish.torch.inner_optimizers import has_own_state_dict, with_inner
from horovodish.torch.optimizer import keeps_own_state
from horovodish.torch.tensors import checksum_of

__all__ = ["check_consistency"]


def check_consistency(
    model: Module, optimizer: Optimizer | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Raise on every rank unless parameters, buffers and optimizer state are the same bits on all. Collective; blocks.

    Cheap enough for every epoch: each rank computes a checksum of every tensor, and the ranks compare one number. Only
    where that differs, the checksums of all tensors travel. The checksum is CRC-32: a difference goes unnoticed once in
    four thousand million times.

    Args:
        model: its parameters, its buffers and the rest of its `state_dict()` are compared, on any device. The ranks
            compare what objects hold, as pickle sees it; dicts and sets may have another order. Of tensors on the
            device `meta` they compare dtype and shape.
        optimizer: wrapped or not. The ranks compare its state, the parameters of each group in their order, and the
            options of the groups, also of optimizers inside it. With `op=Adasum` they leave out the state, because each
            rank has its own.
        process_set: the ranks that take part.

    Raises:
        MismatchError: something differs. The message names the first such tensor, in the order of the model and then of
            the optimizer, and the ranks that have each of its values. Every rank of the process set raises it.
        ValueError: the process set is not in use, or this rank is outside of it.

    Example:
        >>> hvd.check_consistency(model, optimizer)
    """
    identity = checked_id(process_set)
    name = generated_name("check_consistency", identity)
    with RefuseOnError("allgather", name, identity):
        own = {what: (kind, _checksum(value)) for what, kind, value in _values(model, optimizer)}
    summary = zlib.crc32(repr(sorted(own.items())).encode())
    if len(set(gather_objects(summary, name, identity).values())) == 1:
        return
    details: dict[int, Checksums] = gather_objects(own, f"{name}.details", identity)
    found = difference({process_set.ranks[place]: checksums for place, checksums in details.items()})
    raise MismatchError(
        f"check_consistency: {found} Remedy: build both alike on every rank, start with broadcast_parameters and "
        "broadcast_optimizer_state, and draw no different random numbers where all ranks should do the same."
    )


def _values(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[str, str, Any]]:
    """The names of all values, what each of them is, and the values."""
    for name, parameter in model.named_parameters():
        yield f"parameter '{name}'", _kind(parameter), parameter
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", _kind(buffer), buffer
    tensors = {
        *dict(model.named_parameters(remove_duplicate=False)),
        *dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, extra in model.state_dict().items():
        if name not in tensors:
            for key, value in _flat(extra, "", {}):
                yield f"state '{name}'{key}", _kind(value), value
    if optimizer is None:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, each in enumerate(with_inner(optimizer)):
        prefix = f"inner optimizer {number}: " if number else ""
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            names.setdefault(parameter, f"number {index}")
        for place, group in enumerate(each.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{prefix}parameter {index} of parameter group {place}", repr(names[parameter]), names[parameter]
        if not keeps_own_state(optimizer):
            for parameter in parameters:
                for key, value in _flat(each.state.get(parameter, {}), "", names):
                    yield f"{prefix}optimizer state{key} of parameter '{names[parameter]}'", _kind(value), value
            for key, value in _flat({key: item for key, item in each.state.items() if key not in names}, "", names):
                yield f"{prefix}optimizer state{key}", _kind(value), value
        for place, group in enumerate(each.param_groups):
            for key, value in _flat({key: value for key, value in group.items() if key != "params"}, "", names):
                yield f"{prefix}option{key} of parameter group {place}", _kind(value), value
        if has_own_state_dict(each) and not keeps_own_state(optimizer):
            for key, value in _flat(each.state_dict(), "", names):
                yield f"{prefix}optimizer state_dict{key}", _kind(value), value


def _flat(value: Any, path: str, names: dict[Any, str]) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples, each with its path. Paths show the names of parameters."""
    if isinstance(value, dict):
        for key, item in value.items():
            shown = names[key] if isinstance(key, Tensor) and key in names else key
            yield from _flat(item, f"{path} {without_addresses(shown)}", names)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]", names)
    else:
        yield path, value


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if is_lazy(value) or value.is_nested:
        return f"{'nested' if value.is_nested else 'uninitialized'} {value.dtype}"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _checksum(value: Any) -> int:
    return checksum_of_object(value, _checksum_of_tensor)


def _checksum_of_tensor(value: Any) -> int | None:
    if not isinstance(value, Tensor):
        return None
    checksum = 0
    for part in _parts(value):
        checksum = checksum_of(part, zlib.crc32(_kind(part).encode(), checksum))
    return checksum


def _parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that hold the values of a tensor. None of them where it has no memory."""
    if is_lazy(tensor) or tensor.is_meta:
        return []
    own = tensor.detach()
    if own.is_nested:
        return [part for each in own.unbind() for part in _parts(each)]
    if own.is_quantized:
        return [own.dequantize()]  # so that the scale counts
    if own.layout is torch.sparse_coo:
        rows = own.coalesce()
        return [rows.indices(), rows.values()]
    if own.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [own.crow_indices(), own.col_indices(), own.values()]
    if own.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [own.ccol_indices(), own.row_indices(), own.values()]
    return [own if own.layout is torch.strided else own.to_dense()]
