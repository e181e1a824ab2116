"""Converts the state of a sharded optimizer to the plain optimizer's state, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovodish.collectives.functions import barrier
from horovodish.collectives.objects import allgather_object
from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import Max, Sum
from horovodish.collectives.submission import Handle
from horovodish.collectives.transfers import receive, send
from horovodish.torch.adapter import TENSORS
from horovodish.torch.shards.gradient import ShardedGradient
from horovodish.torch.shards.pieces import Piece, Shards, by_element, check, cut, flat

__all__ = ["clip", "full", "load", "numbered", "own"]

_PART = "part of rank "


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pieces(shards: Shards, optimizer: Optimizer) -> Iterator[tuple[int, Tensor, Piece]]:
    for index, parameter in enumerate(_parameters(optimizer)):
        piece = shards.piece(parameter)
        if piece is not None:
            yield index, parameter, piece


@torch.no_grad()
def full(shards: Shards, root: int) -> dict[str, Any] | None:
    """On the root, the `state_dict()` that the plain optimizer would have."""
    optimizer, process_set = shards.optimizer, shards.process_set
    if root not in shards.reducing.ranks:
        ranks = shards.reducing.ranks
        raise ValueError(
            f"full_state_dict(root={root}): the ranks that share the state are {ranks}. Remedy: root={ranks[0]}"
        )
    if root not in process_set.ranks:
        return None  # another set has the whole state, too
    found = shards.without_state(optimizer)
    told: dict[int, dict[str, Any]] = {}
    for index, parameter, piece in _pieces(shards, optimizer):
        for key, value in optimizer.state.get(piece.parameter, {}).items():
            is_cut = by_element(key, value, parameter, piece.parameter.shape)
            travels = is_cut or (piece.is_whole and isinstance(value, Tensor) and value.dim() > 0)
            shape = None if is_cut else value.shape if travels else ()
            told.setdefault(index, {})[key] = (True, (value.dtype, shape)) if travels else (False, value)
    known: dict[int, dict[str, Any]] = {}
    for each in reversed(allgather_object(told, process_set=process_set)):
        for index, its in each.items():
            known.setdefault(index, {}).update(its)
    is_root, state = process_set.ranks[process_set.rank()] == root, {}
    for index, parameter, piece in _pieces(shards, optimizer):
        its = state[index] = dict[str, Any]()
        for key, (travels, what) in known.pop(index, {}).items():
            if not travels:
                its[key] = what
                continue
            dtype, shape = what
            part = optimizer.state.get(piece.parameter, {}).get(key)
            if is_root:
                if shape is None:
                    its[key] = torch.empty_like(parameter, dtype=dtype, device="cpu")
                else:
                    its[key] = torch.empty(shape, dtype=dtype)
                _collect(shards, its[key], piece, part, root)
            elif part is not None and part.numel() > 0:
                send(TENSORS, _flat_on_host(part, parameter, piece), root, process_set=process_set).wait()
        if not its:
            del state[index]
    for index, parameter in enumerate(_parameters(optimizer)):
        if shards.piece(parameter) is None and parameter in optimizer.state:  # loaded while it was frozen
            state[index] = dict(optimizer.state[parameter])
    state = dict(sorted(state.items()))
    barrier(process_set)  # none ends while others wait
    return {**found, "state": state} if is_root else None


def _flat_on_host(part: Tensor, parameter: Tensor, piece: Piece) -> Tensor:
    """A part of the state; of shape (n,), in the order of the parameter's memory if the part has its shape."""
    part = part.detach().cpu()
    if not piece.is_whole or part.shape != parameter.shape:
        return part.contiguous().reshape(-1)
    is_alike = part.stride() == parameter.stride()
    return flat(part if is_alike else torch.empty_like(parameter, dtype=part.dtype, device="cpu").copy_(part))


def _collect(shards: Shards, whole: Tensor, piece: Piece, part: Any, root: int) -> None:
    """Write the parts of all ranks into a tensor of the full state. The root's own part is copied once."""
    begin, waiting, elements = 0, list[Handle[int]](), flat(whole)
    # With whole parameters a tensor of any shape comes from one rank.
    ends = [whole.numel() if end else 0 for end in piece.cuts] if piece.is_whole else piece.cuts
    for rank, end in zip(shards.process_set.ranks, ends, strict=True):
        if rank == root and end > begin:
            (whole if piece.is_whole else piece.shaped(elements[begin:end])).copy_(part)
        elif end > begin:
            waiting.append(receive(TENSORS, elements[begin:end], rank, process_set=shards.process_set))
        begin = max(begin, end)
    for handle in waiting:
        handle.wait()


def own(shards: Shards) -> dict[str, Any]:
    """This rank's part, by number of the parameter.

    It has a name of its own: `torch.distributed.checkpoint` keeps only one of equally named entries of several ranks.
    """
    optimizer, process_set = shards.optimizer, shards.process_set
    state, cuts = {}, {}
    for index, _, piece in _pieces(shards, optimizer):
        cuts[index] = piece.cuts
        if piece.parameter in optimizer.state:
            state[index] = dict(optimizer.state[piece.parameter])
    for index, parameter in enumerate(_parameters(optimizer)):
        if shards.piece(parameter) is None and parameter in optimizer.state:  # loaded while it was frozen
            state[index] = dict(optimizer.state[parameter])
    its = {**shards.without_state(optimizer), "state": state}
    part = {"cuts": str(cuts), "keys": _keys(state), "state_dict": its}
    return {f"{_PART}{process_set.rank()} of {process_set.size()}": part}


def _keys(state: dict[int, Any]) -> str:
    return str({index: sorted(its) for index, its in sorted(state.items())})


def _checked_part(shards: Shards, given: dict[str, Any]) -> dict[str, Any]:
    """This rank's `state_dict` among the parts of some ranks.

    Raises:
        ValueError: it is not there, of another model, or not complete.
    """
    ((name, expected),) = own(shards).items()
    part = given.get(name)
    if part is None or part["cuts"] != expected["cuts"]:
        raise ValueError(
            f"this is the {', '.join(given)}, or of another model, but the optimizer needs the {name}. Remedy: load "
            "what full_state_dict() has given, which any number of ranks take"
        )
    found = numbered(part["state_dict"])
    if part["keys"] != _keys(found["state"]):
        raise ValueError(
            f"the {name} lacks state that was saved: torch.distributed.checkpoint.load() fills in only what a dict has "
            "already. Remedy: make a file of the folder with dcp_to_torch_save(), and load that"
        )
    return found


def numbered(given: dict[str, Any]) -> dict[str, Any]:
    """A `state_dict` with its groups' numbers for parameters, which `dcp_to_torch_save()` has turned into strings."""
    numbers = {str(number): number for group in given.get("param_groups", ()) for number in group["params"]}
    if not numbers:
        return given
    return {**given, "state": {numbers.get(str(index), index): its for index, its in given["state"].items()}}


@torch.no_grad()
def load(shards: Shards, given: dict[str, Any]) -> None:
    """Take a full state, or this rank's part of one."""
    optimizer: Any = shards.optimizer
    parameters, state = _parameters(optimizer), {}
    is_part = any(name.startswith(_PART) for name in given)
    given = _checked_part(shards, given) if is_part else numbered(given)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    place_of = {number: place for place, number in enumerate(numbers)}
    for index, its in given["state"].items():
        if place_of.get(index, len(parameters)) >= len(parameters):
            raise ValueError(f"the state has a parameter {index!r}, but the optimizer has {len(parameters)}")
        parameter = parameters[place_of[index]]
        if not is_part and not shards.by_parameter:
            check(index, parameter, its)
        piece = shards.piece(parameter)
        if piece is None:  # frozen until now. It is cut when it is reduced.
            state[index] = its
            continue
        if not piece.steps:
            continue
        state[index] = its if is_part else cut(parameter, its, piece)
    with shards.holding_all():
        optimizer.wrapped_class.load_state_dict(optimizer, {**given, "state": state})


@torch.no_grad()
def clip(shards: Shards, max_norm: float, norm_type: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, over the parts of all ranks."""
    gradients = [parameter.grad for parameter in _parameters(shards.optimizer) if parameter.grad is not None]
    if not all(isinstance(each, ShardedGradient) for each in gradients):
        raise ValueError(
            "clip_grad_norm_: some gradients are not reduced. Remedy: call it after a backward() that reduces"
        )
    pieces = [each.piece for each in gradients if isinstance(each, ShardedGradient) and each.piece.numel() > 0]
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): must be a number above 0, or inf")
    norms = [float(torch.linalg.vector_norm(piece, norm_type)) for piece in pieces]
    is_max = math.isinf(norm_type)
    if is_max:  # not by max(), which may leave nan out
        own_norm = float(torch.tensor(norms).max()) if norms else 0.0
    else:
        own_norm = sum(norm**norm_type for norm in norms)
    operation = Operation("allreduce", None, shards.process_set, Max if is_max else Sum)
    total = float(TENSORS.now(operation, torch.tensor(own_norm, dtype=torch.float64)))
    norm = torch.tensor(total if is_max else total ** (1.0 / norm_type))
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for piece in pieces:
        piece.mul_(scale.to(piece.device))
    return norm
