"""The same start on every rank: the values of a model and the state of an optimizer, sent from one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from horovodish.collectives.adapter import checked_root
from horovodish.collectives.comparison import SAME_MODEL, compared_on_all_ranks
from horovodish.collectives.functions import synchronize
from horovodish.collectives.objects import broadcast_object
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.errors import UnsupportedTensorError
from horovodish.runtime import basics
from horovodish.torch.collectives import broadcast_async_
from horovodish.torch.inner_optimizers import has_own_state_dict, names_of, with_inner
from horovodish.torch.tensors import check_tensor, is_dense, moves_as_bytes, parameter_checksums

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
        root_rank: the rank whose values to send, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, or this rank is outside of it.
        TypeError: `params` is none of the kinds above.
        MismatchError: the ranks have different names, shapes or dtypes.
        `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    with compared_on_all_ranks("broadcast_parameters", "the tensors", process_set, SAME_MODEL) as described:
        root = checked_root(root_rank, process_set)
        tensors = dict(_named_tensors(params))
        # The engine compares dtypes, except for tensors that it gets as bytes.
        described += sorted(_described(name, tensor) for name, tensor in tensors.items())
    _broadcast_into(root, "broadcast_parameters", tensors, process_set)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    model: Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank's optimizer the state and the options of the root's optimizer. Collective; blocks.

    It takes no step: the root's optimizer does not change in any bit, and a rank whose optimizer has no state yet gets
    one. Learning rates and other options of the parameter groups are sent, too. If the optimizer wraps another one, as
    Lookahead does, or if its class has its own `state_dict()`, their state is sent as well.

    State goes to the parameter at the same place of the same group, so every rank must list the parameters in the same
    order. The ranks compare shapes and dtypes. They compare names, too, if the optimizer was wrapped with
    `named_parameters`, or if PyTorch's optimizer was made of `model.named_parameters()`. Without names they compare
    values if all ranks have the same values in some order, as after `broadcast_parameters`. So without names nobody
    sees that two parameters of the same shape changed places if the models differ or if their values are equal.

    Args:
        optimizer: of the same kind, over the same parameters in the same order, on every rank; wrapped or not.
        root_rank: the rank whose state to send, the same on every rank.
        model: Horovod's, without effect here.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, or this rank is outside of it.
        TypeError: `optimizer` is no optimizer.
        MismatchError: the ranks' optimizers are of different kinds, or have different parameters or another order of
            parameters.
            `horovodish.collectives` lists the other errors.

    Example:
        >>> if hvd.rank() == 0:
        ...     optimizer.load_state_dict(torch.load("checkpoint.pt"))
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    structure: Any = None
    tensors: list[Tensor] = []
    with compared_on_all_ranks(
        "broadcast_optimizer_state", "optimizer and parameter groups", process_set, _SAME_ORDER
    ) as described:
        root = checked_root(root_rank, process_set)
        if getattr(optimizer, "_shards", None) is not None:
            raise ValueError(
                "broadcast_optimizer_state: each rank of a sharded optimizer has a state of its own. Remedy: call "
                "load_state_dict() on every rank, with the result of full_state_dict()"
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"broadcast_optimizer_state takes a torch.optim.Optimizer, not {type(optimizer).__name__}; "
                "other.load_state_dict(hvd.broadcast_object(other.state_dict())) sends schedulers and the like"
            )
        optimizers = with_inner(optimizer)
        for each in optimizers:
            described += [_kind(each), [len(group["params"]) for group in each.param_groups]]
        described += _listed(optimizers)
        if basics.rank() == root:
            structure = _structure(optimizers, tensors)
    structure = broadcast_object(structure, root, "broadcast_optimizer_state.structure", process_set)
    places, parts = structure
    if basics.rank() != root:
        tensors = [_empty(place) for place in places]
    named = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    _broadcast_into(root, "broadcast_optimizer_state", named, process_set)
    if basics.rank() != root:
        _rebuild(optimizers, parts, tensors)


def _structure(optimizers: list[Optimizer], tensors: list[Tensor]) -> tuple[list[_Place], list[Any]]:
    """The parts of each optimizer with places instead of tensors, for the other ranks; and the list of tensors."""
    numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizers))}
    places: list[_Place] = []
    met: dict[int, tuple[int, Tensor]] = {}  # by the tensor's id, which is in use as long as the tensor is here

    def take_out(value: Tensor) -> _Parameter | _Number:
        if value in numbers:
            return _Parameter(numbers[value])
        if id(value) not in met:
            check_tensor(value, "broadcast_optimizer_state")
            met[id(value)] = len(tensors), value
            tensors.append(value.detach().contiguous())
            # Strides as the root has them, where they leave no gaps: fused optimizers want them as the parameter's.
            places.append(_Place(tuple(value.shape), torch.empty_like(value).stride(), value.dtype, value.device.type))
        return _Number(met[id(value)][0])

    return places, [_replaced(_parts(each), Tensor, take_out) for each in optimizers]


def _parts(optimizer: Optimizer) -> tuple[Any, dict[Any, Any], list[dict[str, Any]]]:
    """The `state_dict()` if the class defines its own, and the state and the options, in their own dtypes."""
    own = optimizer.state_dict() if has_own_state_dict(optimizer) else None
    return own, optimizer.state, [_options(group) for group in optimizer.param_groups]


def _rebuild(optimizers: list[Optimizer], structure: list[Any], tensors: list[Tensor]) -> None:
    """Give optimizers the parts of that structure, with these tensors."""
    parameters = _parameters(optimizers)

    def put_in(place: _Parameter | _Number) -> Tensor:
        return (parameters if isinstance(place, _Parameter) else tensors)[place.number]

    parts = [_replaced(part, (_Parameter, _Number), put_in) for part in structure]
    # The inner one first: an outer one may take its groups over in load_state_dict().
    for optimizer, (own, _, _) in reversed([*zip(optimizers, parts, strict=True)]):
        if own is not None:
            optimizer.load_state_dict(own)
    for optimizer, (_, state, options) in zip(optimizers, parts, strict=True):
        for group, sent in zip(optimizer.param_groups, options, strict=True):
            group.update(sent)
        optimizer.state.clear()
        optimizer.state.update(state)


_SAME_ORDER = (
    "build them alike on every rank, with the parameters in the same order. A set of Python has another order in each "
    "process, so sort it"
)


@dataclass(frozen=True, eq=False)
class _Listed:
    """A parameter in the list of an optimizer, for the comparison of two ranks.

    Attributes:
        place: the optimizer, the group, and the place within the group.
        kind: dtype and shape.
        name: given by the user; None if the user gave none.
        checksum: of the values; None if it has a name.
        values: a checksum of the values of all parameters, in any order.
    """

    place: str
    kind: str
    name: str | None
    checksum: int | None
    values: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Listed) or (self.place, self.kind) != (other.place, other.kind):
            return False
        if self.name is not None and other.name is not None:
            return self.name == other.name
        # A wrapped optimizer may know names that the same optimizer of another rank does not. Models may differ as long
        # as nobody has broadcast the parameters.
        return None in (self.checksum, other.checksum) or self.values != other.values or self.checksum == other.checksum

    def __str__(self) -> str:
        if self.name is not None:
            return f"{self.place} of name '{self.name}', {self.kind}"
        return f"{self.place} of {self.kind}" + ("" if self.checksum is None else f", checksum {self.checksum:08x}")


def _listed(optimizers: list[Optimizer]) -> Iterator[_Listed]:
    """The parameters of optimizers, in the order of their lists."""
    names = names_of(optimizers)
    places = {
        f"{f'inner optimizer {number}: ' * bool(number)}parameter {index} in group {place}": parameter
        for number, each in enumerate(optimizers)
        for place, group in enumerate(each.param_groups)
        for index, parameter in enumerate(group["params"])
    }
    nameless = [(place, each) for place, each in places.items() if each not in names and is_dense(each)]
    sums = [checksum for _, checksum in parameter_checksums(nameless).values()]
    checksums = dict(zip((place for place, _ in nameless), sums, strict=True))
    values = zlib.crc32(repr(sorted(sums)).encode())
    for place, parameter in places.items():
        kind = f"{parameter.dtype}" + ("" if is_lazy(parameter) else f" and shape {tuple(parameter.shape)}")
        yield _Listed(place, kind, names.get(parameter), checksums.get(place), values)


@dataclass(frozen=True)
class _Parameter:
    """Stands for a parameter of the optimizers in the structure that travels as a pickle."""

    number: int


@dataclass(frozen=True)
class _Number:
    """Stands for another tensor there."""

    number: int


@dataclass(frozen=True)
class _Place:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str  # the ranks' devices of that type are not of the same number


def _empty(place: _Place) -> Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device_type)


def _replaced(value: Any, kind: type | tuple[type, ...], replace: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, with `replace` applied to all objects of `kind`, also to keys."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {_replaced(key, kind, replace): _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, kind, replace) for item in value)
    return value


def _parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _kind(optimizer: Optimizer) -> str:
    # The wrapper is a subclass of what it wraps; a wrapped and an unwrapped optimizer have the same state.
    return getattr(optimizer, "wrapped_class", type(optimizer)).__name__


def _named_tensors(params: Any) -> Iterable[tuple[str, Tensor]]:
    wanted = "broadcast_parameters takes names and tensors; pass model.state_dict() or model.named_parameters(), not"
    if isinstance(params, Mapping) and "param_groups" in params:
        raise TypeError(f"{wanted} the state of an optimizer; for it call broadcast_optimizer_state(optimizer)")
    if isinstance(params, Module | Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{wanted} {type(params).__name__}")
    for number, item in enumerate(params.items() if isinstance(params, Mapping) else params):
        entry = (f"tensor {number}", item) if isinstance(item, Tensor) else item
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(f"{wanted} an iterable of {type(entry).__name__}")
        name, tensor = entry
        is_extra_state = name.rpartition(".")[2] == "_extra_state" and not isinstance(tensor, Tensor)
        if tensor is not None and not is_extra_state:
            if not isinstance(tensor, Tensor) or tensor.is_quantized:
                kind = "a quantized one" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UnsupportedTensorError(
                    f"broadcast_parameters: {name}: expected a torch.Tensor, got {kind}; "
                    "model.load_state_dict(hvd.broadcast_object(model.state_dict())) sends everything"
                )
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
    dtype = f"{tensor.dtype} and " if moves_as_bytes(tensor) else ""
    return f"{name} of {dtype}shape {tuple(tensor.shape)}"
