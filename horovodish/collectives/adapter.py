"""A collective, from the public function to the engine.

An `Operation` says what the ranks do together. An `Adapter` knows the tensors of one framework.
`Adapter.start` checks both, hands the operation to the engine and makes its results; a shim has no other code for that.
`functions.py` calls it for users, `objects.py` and `named_tensors.py` beside it build on that.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from horovodish import _native
from horovodish.collectives.arrays import ITEM_BYTES
from horovodish.collectives.devices import ON_HOST, Placement
from horovodish.collectives.operation import Member, Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Adasum, ReduceOp, chosen_op
from horovodish.collectives.repeated_calls import earlier_call, keep_call
from horovodish.collectives.submission import Handle, generated_name, refuse, settle, shown, submit
from horovodish.launch import failures
from horovodish.runtime import basics

__all__ = [
    "Adapter",
    "check_has_rows",
    "checked",
    "checked_group",
    "checked_op",
    "checked_root",
    "checked_splits",
    "identified",
    "dealt_rows",
    "only",
    "result_shape",
    "split_numbers",
    "variables_to_send",
]


class Shaped(Protocol):
    """The attributes that tensors of every framework share with NumPy's arrays."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def ndim(self) -> int: ...

    def reshape(self, rows: int, /) -> Any: ...


T = TypeVar("T", bound=Shaped)
R = TypeVar("R")

_REDUCES = frozenset({"allreduce", "reducescatter"})
_ALLOCATES = frozenset({"allgather", "alltoall"})
"""The engine allocates the results of these, because only it knows how many rows come."""
_REPEATABLE = frozenset({"allreduce", "broadcast"})
_ROWS = {"alltoall": "send", "reducescatter": "deal out"}
"""Verbs for messages: what each operation does with the rows of a tensor."""


def identified(operation: Operation) -> tuple[str, int]:
    """The name of an operation, counted here if it has none, and the number of its process set.

    Raises:
        ValueError: this rank is not in the process set, or the set is not in use.
        TypeError: it is no process set.
    """
    identity = checked_id(operation.process_set)
    return (generated_name(operation.kind, identity) if operation.name is None else operation.name), identity


def checked(operation: Operation) -> Operation:
    """An operation that has a name, with its reduce op or its root. Raises as `checked_op` and `checked_root`."""
    if operation.kind in _REDUCES:
        op = checked_op(operation.kind, str(operation.name), operation.average, operation.op)
        return operation._replace(op=op, average=None)
    if operation.kind == "broadcast":
        return operation._replace(root_rank=checked_root(operation.root_rank, operation.process_set))
    return operation


class Adapter(ABC, Generic[T]):
    """One framework's tensors, as the engine needs them.

    Attributes:
        noun: what messages call a tensor.
    """

    noun: ClassVar[str]

    @abstractmethod
    def source(self, tensor: Any, name: str) -> T:
        """The tensor, or a copy, row-major in memory that the engine can read.

        Raises:
            UnsupportedTensorError: the engine cannot take it. `name` is what the message calls it.
        """

    @abstractmethod
    def target(self, tensor: Any, name: str) -> T:
        """The tensor itself, row-major in memory that the engine can write. Raises as `source`."""

    @abstractmethod
    def empty(self, source: T, shape: Sequence[int] | None) -> T:
        """A new tensor with the dtype and device of `source`; None: also with its shape."""

    @abstractmethod
    def member(self, source: T, target: T | None, name: str, op: ReduceOp | None) -> Member:
        """The memory of one tensor and of its result; None: the engine allocates it.

        Args:
            source, target: what the methods above gave.
            name: what a message calls the tensor.
            op: how it is reduced; None where it is only moved.

        Raises:
            UnsupportedTensorError: the engine cannot take the dtype, or cannot reduce it in that way.
        """

    @abstractmethod
    def received(self, native: _native.Handle, index: int, source: T, rows: int, placement: Placement) -> T:
        """The result that the engine has allocated, with the dtype and the trailing dimensions of `source`."""

    @abstractmethod
    def row_counts(self, counts: Sequence[int]) -> T:
        """How many rows came from each rank, as a tensor of int64 in host memory."""

    def placement(self, operation: Operation, sources: Sequence[T], members: Sequence[Member]) -> Placement:
        """Where the operation takes place. Without `members`, only whether the tensors are in host memory.

        Raises:
            UnsupportedTensorError: the tensors cannot be used together.
        """
        return ON_HOST

    def copies(self, sources: Sequence[T], targets: Sequence[T]) -> tuple[list[T], list[T]]:
        """For staged placement: copies of `sources` in host memory, and empty host memory for each of `targets`."""
        raise NotImplementedError

    def copy_back(self, arrivals: Sequence[T], targets: Sequence[T]) -> None:
        """The opposite of `copies`."""
        raise NotImplementedError

    def work_so_far(self, target: T) -> Callable[[], None]:
        """For staged placement: a function that makes the calling thread's stream wait for the work that the current
        stream has now, which may write to `target`.
        """
        raise NotImplementedError

    def written(self, targets: Sequence[T]) -> None:
        """The engine has written into tensors of the caller's."""

    def one(self, operation: Operation, tensor: Any) -> Handle[T]:
        """As `start`, of one tensor."""
        return self.start(operation, [tensor], only)

    def now(self, operation: Operation, tensor: Any) -> T:
        """As `one`, and gives the result. Blocks.

        The second allreduce or broadcast of its kind is submitted as the first one once more, with other memory. That
        leaves out the checks that would find the same.
        """
        name, identity = identified(operation)
        key = earlier = None
        source: T = tensor
        target: T = tensor
        if operation.kind in _REPEATABLE:
            label = operation.name or shown(name)
            try:
                source = self.target(tensor, label) if operation.in_place else self.source(tensor, label)
                if self.placement(operation, [source], []) is ON_HOST:
                    target = source if operation.in_place else self.empty(source, None)
                    start, target_start, dtype, shape = self.member(source, target, label, None)
                    key = basics.engine(), identity, operation, dtype, shape
                    earlier = earlier_call(key)
            except Exception:
                earlier = None  # `start` finds the same problem, and tells the other ranks
        if earlier is None:
            source = target = tensor  # `start` makes its own, and large ones may fit only once
            handle = self.start(operation._replace(name=name), [tensor], only, waits=True)
            result = handle.wait()
            if key is not None:
                keep_call(key, handle.native)
            return result
        settle(earlier.again(name, start, target_start, (source, target)))
        if operation.in_place:
            self.written([target])
        return target

    def group(self, operation: Operation, tensors: Sequence[Any], *, waits: bool = False) -> Handle[list[T]]:
        """As `start`, of a group."""
        return self.start(operation, tensors, _every, waits=waits)

    def start(
        self,
        operation: Operation,
        tensors: Sequence[Any],
        result: Callable[[list[T], list[list[int]]], R],
        *,
        waits: bool = False,
    ) -> Handle[R]:
        """Check an operation, hand it to the engine and give its handle. Collective; does not block.

        Args:
            operation: what to do.
            tensors: the members; none for a barrier.
            result: makes the caller's result of the results by member and, where the engine allocates them, of how many
                rows of each came from each rank.
            waits: the caller waits at once.

        Raises:
            What `horovodish.collectives` lists.
        """
        kind, _, process_set, op, average, prescale, postscale, root, splits, in_place, member_names, family, *_ = (
            operation
        )
        # Before the checks: a rank whose arguments are wrong counts the call, too, and refuses it by the same name.
        name, identity = identified(operation)
        label = shown(name) if isinstance(name, str) else name
        allocates = kind in _ALLOCATES
        try:
            if kind in _REDUCES:
                op = reduced_by = checked_op(kind, label, average, op)
            else:
                op = reduced_by = None
            if kind == "broadcast":
                root = checked_root(root, process_set)
            if result is not only and kind != "barrier":
                tensors = checked_group(tensors, kind, self.noun)
            sources: list[T] = []
            targets: list[T] = []
            members: list[Member] = []
            for tensor in tensors:
                source = self.target(tensor, label) if in_place else self.source(tensor, label)
                if kind == "allgather" and not source.ndim:
                    source = source.reshape(1)
                elif kind in _ROWS:
                    check_has_rows(kind, label, source.ndim, self.noun)
                if allocates:
                    members.append(self.member(source, None, label, None))
                else:
                    shape = result_shape(operation, source.shape) if kind == "reducescatter" else None
                    target = source if in_place else self.empty(source, shape)
                    members.append(self.member(source, target, label, reduced_by))
                    targets.append(target)
                sources.append(source)
            if in_place and len(members) > 1:
                _check_targets_differ(members, label)
            rows: Sequence[int] = ()
            if kind == "alltoall":
                rows = checked_splits(splits, members[0][3][0], process_set.size(), label)
            operation = Operation(
                kind,
                name,
                process_set,
                op,
                None,
                prescale,
                postscale,
                root,
                rows,
                in_place,
                member_names,
                family,
                codec=operation.codec,
            )
            placement = self.placement(operation, sources, members)
            arrivals = targets
            if placement.is_staged:
                sources, arrivals = self.copies(sources, targets)
                members = [self.member(*pair, label, reduced_by) for pair in zip(sources, arrivals, strict=True)]
        except Exception as problem:
            refuse(kind, name, identity, problem)
            raise

        templates = sources if allocates else []  # what a result is made after; inputs need not outlive the operation

        def results(native: _native.Handle) -> R:
            if allocates:
                received, counts = [], []
                for index, source in enumerate(templates):
                    rows = native.rows(index)
                    received.append(self.received(native, index, source, sum(rows), placement))
                    counts.append(rows)
                return result(received, counts)
            if placement.is_staged:
                self.copy_back(arrivals, targets)
            if in_place:
                self.written(targets)
            return result(targets, [])

        return submit(operation, members, (sources, arrivals), results, placement, waits)


def only(results: Sequence[T], _: object = None) -> T:
    """The result of a group of one."""
    return results[0]


def _every(results: list[T], _: object) -> list[T]:
    return results


def checked_op(kind: str, name: str, average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the reduce op of a reduction.

    Raises:
        ValueError: as `chosen_op`, or this kind of reduction has no such op.
    """
    chosen = chosen_op(average, op)
    if chosen is Adasum and kind != "allreduce":
        raise ValueError(f"{name}: op=Adasum is for allreduce; use op=Average or op=Sum")
    return chosen


def checked_group(tensors: Iterable[Any], kind: str, noun: str) -> list[Any]:
    """Return the members of a group. An iterator can be read only once, so it is read here.

    Raises:
        TypeError: one tensor instead of a group, whose rows would be taken for the members; or a dict.
        ValueError: the group is empty.
    """
    is_tensor = hasattr(tensors, "__dlpack__") or hasattr(tensors, "shape")
    if is_tensor or isinstance(tensors, Mapping):
        got = f"one {noun}" if is_tensor else type(tensors).__name__
        raise TypeError(f"grouped_{kind}: expected a list of {noun}s, got {got}; pass [{noun}]")
    members = list(tensors)
    if not members:
        raise ValueError(f"grouped_{kind}: the group is empty; pass at least one {noun}")
    return members


def check_has_rows(kind: str, name: str, dimensions: int | None, noun: str) -> None:
    """Raise ValueError if a tensor has zero dimensions. `kind` moves rows; None: their number is not known yet."""
    if dimensions == 0:
        raise ValueError(
            f"{name}: this {noun} of zero dimensions has no rows to {_ROWS[kind]}; pass one with a dimension"
        )


def _check_targets_differ(members: Sequence[Member], name: str) -> None:
    """Raise unless every member of a group in place has memory of its own."""
    places = [
        (target, target + length * ITEM_BYTES[dtype], index)
        for index, (_, target, dtype, shape) in enumerate(members)
        if (length := math.prod(shape))
    ]
    places.sort()
    for (_, end, one), (begin, _, other) in pairwise(places):
        if begin < end:
            raise ValueError(
                f"{name}: numbers {min(one, other)} and {max(one, other)} of the group share memory, which cannot "
                "take two results; pass each part once, or use the function that is not in place"
            )


def checked_root(root_rank: int, process_set: ProcessSet = global_process_set) -> int:
    """`root_rank` as an int, once it is clear that the process set has this rank.

    Raises:
        ValueError: it has not.
        TypeError: it is no integer.
    """
    try:
        root = operator.index(root_rank)
    except TypeError:
        kind = type(root_rank).__name__
        wrong = f"root_rank must be an int, the number of a rank, and not {kind}; look at the order of the arguments"
        raise TypeError(wrong) from None
    if process_set is global_process_set:
        if not 0 <= root < basics.size():
            raise ValueError(f"root_rank={root} does not exist: the ranks are 0 to {basics.size() - 1}")
    elif root not in process_set.ranks:
        raise ValueError(f"root_rank={root} is not in the process set of ranks {process_set.ranks}")
    return root


def variables_to_send(variables: Any) -> list[Any]:
    """What `broadcast_variables` was given, as a list. Warns if it is empty, as it is for a model that is not built.

    Raises:
        TypeError: it is not iterable.
    """
    if not isinstance(variables, Iterable):
        raise TypeError(f"broadcast_variables takes the variables and then root_rank, not {type(variables).__name__}")
    listed = list(variables)
    if not listed:
        failures.warn("broadcast_variables was given no variables. Remedy: build the model or the optimizer before it")
    return listed


def split_numbers(splits: Any) -> Any:
    """An array, a tensor or an iterator of splits as a list; anything else as it is."""
    if hasattr(splits, "tolist"):
        return splits.tolist()
    return list(splits) if isinstance(splits, Iterable) else splits


def checked_splits(splits: Any, rows: int, ranks: int, name: str) -> list[int]:
    """How many of an alltoall's rows go to each rank.

    Args:
        splits: as numbers, an array or a tensor; None: as many to each.
        rows: how many there are.
        ranks: how many take part.
        name: of the operation.

    Raises:
        ValueError: `splits` is not one non-negative number per rank, or does not add up to `rows`; or it is None and
            `rows` cannot be divided by `ranks`.
    """
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"{name}: {rows} rows cannot be divided evenly by {ranks} ranks; pass splits, one number per rank"
            )
        return [rows // ranks] * ranks
    try:
        counts = [operator.index(count) for count in split_numbers(splits)]
    except TypeError:
        raise ValueError(f"{name}: splits={splits!r} must be {ranks} whole numbers, one per rank") from None
    if len(counts) != ranks or min(counts, default=0) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name}: splits {counts} must be {ranks} non-negative numbers, one per rank, that add up to the "
            f"{rows} rows of the array; they add up to {sum(counts)}"
        )
    return counts


def result_shape(operation: Operation, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what comes of a tensor, where every rank gives as many rows; with `splits`, it is not known."""
    if operation.kind == "allgather":
        return (shape[0] * operation.process_set.size(), *shape[1:])
    if operation.kind == "reducescatter":
        return (dealt_rows(shape[0], operation.process_set)[operation.process_set.rank()], *shape[1:])
    return tuple(shape)


def dealt_rows(rows: int, process_set: ProcessSet) -> list[int]:
    """How many of its `rows` a reducescatter gives to each rank of the set."""
    base, more = divmod(rows, process_set.size())
    return [base + (rank < more) for rank in range(process_set.size())]
