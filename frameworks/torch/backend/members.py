"""The ranks of a process group as the engine knows them, and how they submit operations in PyTorch's order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from horovodish import _native
from horovodish.collectives.adding_sets import add_members_set, remove_members_set
from horovodish.collectives.devices import Placement, problem_for_nccl
from horovodish.collectives.operation import Member, Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle, refuse, submit
from horovodish.errors import NotInitializedError, RankLostError, UnsupportedTensorError
from horovodish.runtime import basics
from horovodish.torch.adapter import TENSORS
from horovodish.torch.backend.futures import depth
from horovodish.torch.backend.meeting import Meeting, tell_of_shutdown
from horovodish.torch.tensors import check_tensor, member

__all__ = ["Call", "Finish", "Members", "Part"]

_SLOTS = 64
"""Operations reuse this many names in turn, so that the response cache knows them. As many may be under way.

The names do not count as user-given: a slot is not the number of a call, so messages don't show it.
"""

Finish = Callable[[_native.Handle, Placement], list[Tensor]]
"""Makes the caller's tensors of an operation that has ended, and gives them."""


class Part(NamedTuple):
    """A tensor of an operation.

    Attributes:
        source: this rank's values; contiguous.
        target: where the result goes; contiguous, None where the engine allocates it.
        shape: of the whole, the same on every rank; None: the shape of the source.
        source_begin: where in the whole the source begins, in elements.
    """

    source: Tensor
    target: Tensor | None = None
    shape: tuple[int, ...] | None = None
    source_begin: int = 0


class Call(NamedTuple):
    """A call of a group's method. Its text is what messages call it.

    Attributes:
        method: of the process group.
        number: from 1, among the calls of its depth.
        depth: how deeply it is within callbacks of futures.
        label: of the group.
    """

    method: str
    number: int
    depth: int
    label: str

    @property
    def function(self) -> str:
        """Equal for a function of one tensor, of several and of lists: members may differ in that."""
        return self.method.removesuffix("_coalesced").removesuffix("_single")

    def __str__(self) -> str:
        where = " in callbacks" * bool(self.depth)
        return f"{self.method}, call {self.number}{where} of {self.label}"


class _Sequence:
    """The calls of one depth.

    Attributes:
        lock: whoever calls holds it from `begin` to `submit`, so that threads that call at once get a number each.
        call: the latest one.
        under_way: the operations of the latest calls, the oldest first.
    """

    def __init__(self, label: str, group: str, depth: int) -> None:
        self.lock = threading.RLock()  # a handler of a signal may call while its thread does
        self.call = Call("", 0, depth, group)
        self.under_way: deque[Handle[list[Tensor]]] = deque()
        self._names = [f"{label}.noname.slot {slot}" for slot in range(_SLOTS)]

    def name(self) -> str:
        return self._names[self.call.number % _SLOTS]


class Members:
    """The members of a group, in the order of their ranks. Each makes this object, and waits for the others.

    Args:
        store: of this group alone.
        own: the rank of this process within the group.
        ranks: of the world, ascending.
        label: what messages call the group.
        timeout: how long a call waits for other members.

    Raises:
        StallError: a member does not come in time.
        RankLostError: a member was lost, or has ended before it came.
        HorovodInternalError: another member failed to make the group.
    """

    def __init__(self, store: Any, own: int, ranks: Sequence[int], label: str, timeout: timedelta):
        self.own, self.ranks, self.label, self.timeout = own, list(ranks), label, timeout
        self._meeting = Meeting(store, own, ranks, timeout, label)
        tell_of_shutdown(store, basics.rank())
        self._set: ProcessSet | None = add_members_set(ranks, self._meeting, timeout.total_seconds(), label)
        self._sequences = [self._sequence(0)]
        self._growing = threading.Lock()

    def lock(self) -> threading.RLock:
        """The lock that this thread holds while it calls `begin` and then `submit` or `refuse`."""
        level = depth()
        if level >= len(self._sequences):
            with self._growing:
                while level >= len(self._sequences):
                    self._sequences.append(self._sequence(len(self._sequences)))
        return self._sequences[level].lock

    def begin(self, method: str) -> None:
        """Count one more call, which all members make.

        Raises:
            NotInitializedError: `hvd.shutdown()`, or a recovery, has ended the group.
        """
        self.process_set()
        sequence = self._sequences[depth()]
        sequence.call = Call(method, sequence.call.number + 1, sequence.call.depth, self.label)

    def call(self) -> Call:
        """The call that this thread has begun."""
        return self._sequences[depth()].call

    def _sequence(self, level: int) -> _Sequence:
        return _Sequence(f"{self.label}, callbacks {level}" if level else self.label, self.label, level)

    def process_set(self) -> ProcessSet:
        """The members as the engine knows them. Raises as `begin`."""
        if self._set is None or self._set.process_set_id is None:
            raise NotInitializedError(
                f"{self.label} has ended, or was made before the last init(). Remedy: call "
                "torch.distributed.destroy_process_group() and init_process_group() again"
            )
        return self._set

    def submit(
        self, kind: str, parts: Sequence[Part], finish: Finish, waits: bool, variant: str = "", **details: Any
    ) -> tuple[Handle[list[Tensor]], int]:
        """Hand the operation of the call that has begun to the engine. Blocks where too many are under way.

        Args:
            kind, details: of the operation.
            parts: its tensors.
            finish: makes the result.
            waits: the caller waits at once.
            variant: what the members must agree on, and the engine does not see.

        Returns:
            The handle and the device of its tensors.
        """
        sequence = self._sequences[depth()]
        name = sequence.name()
        function = sequence.call.function + variant
        operation = Operation(kind, name, self.process_set(), function=function, **details)
        members = [_member(part, sequence.call, operation.op) for part in parts]
        placement = TENSORS.placement(operation, [part.source for part in parts], members)
        if placement.is_staged:
            problem = problem_for_nccl(operation, [code for _, _, code, _ in members])
            raise UnsupportedTensorError(f"{self.label}: {problem}")
        while sequence.under_way and sequence.under_way[0].poll():
            sequence.under_way.popleft()  # a handle keeps its tensors
        if len(sequence.under_way) == _SLOTS:
            oldest = sequence.under_way.popleft()
            while not oldest.settles_within(WAIT_SLICE_SECONDS):
                pass
        handle = submit(operation, members, parts, lambda native: finish(native, placement), placement, waits)
        sequence.under_way.append(handle)
        return handle, placement.device

    def refuse(self, problem: Exception) -> None:
        """Tell the other members why this rank cannot take part in the call that has begun."""
        identity = self.process_set().process_set_id
        assert identity is not None
        refuse("barrier", self._sequences[depth()].name(), identity, problem)

    def end(self, is_last: bool) -> None:
        """Every member must call it. It waits some seconds for calls under way and for the other members.

        Args:
            is_last: the process may end afterwards. Its first rank, which holds the store, then waits for the others.
        """
        process_set, self._set = self._set, None
        if process_set is None or process_set.process_set_id is None or basics.loss():
            return
        calls = self._sequences[0].call.number
        reason = (
            f"rank {basics.rank()} has called destroy_process_group() after {calls} calls of {self.label}\nRemedy: all "
            "its ranks must make the same calls before they end it"
        )
        with suppress(RankLostError):
            if not remove_members_set(process_set, self._meeting, reason):
                self._meeting.leave(True)
                if not is_last or self.own > 0:
                    return
            self._meeting.end()


def _member(part: Part, call: Call, op: ReduceOp | None) -> Member:
    """As the engine knows a part.

    Raises:
        UnsupportedTensorError: the engine cannot read or write the memory of a tensor.
    """
    source, target, shape, source_begin = part
    check_tensor(source, call)
    if target is not None and target is not source:
        check_tensor(target, call)
    begin, target_at, code, own_shape = member(source, target, call, op)
    if shape is None:
        return begin, target_at, code, own_shape
    return begin - source_begin * source.element_size(), target_at, code, shape
