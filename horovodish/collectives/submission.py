"""From Python to the engine and back: `submit` and the `Handle` that it gives. Every framework's shim uses it."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt

from horovodish import _native
from horovodish.collectives import pickling
from horovodish.collectives.devices import ON_HOST, Placement
from horovodish.collectives.operation import Member, Operation, text_of
from horovodish.collectives.process_sets import ProcessSet, added
from horovodish.collectives.reduce_ops import Sum
from horovodish.errors import NotInitializedError, from_native
from horovodish.launch import failures
from horovodish.runtime import basics
from horovodish.runtime.process import part

T = TypeVar("T")

WAIT_SLICE_SECONDS = 0.1
"""How long a wait stays in native code before Python may look at signals, so that Ctrl-C works."""

_UNKNOWN: Any = object()


class _Session:
    """The state of one engine. Every `init()` makes a new one, so that all ranks count names from the same start."""

    def __init__(self, engine: _native.Engine) -> None:
        self.counters: Counter[tuple[str, int]] = Counter()  # by kind and process set
        self.engine = engine


@dataclass
class _Rank:
    """The session of a rank, between `init()` and `shutdown()`."""

    session: _Session | None = None


def _running_session() -> _Session:
    engine, session = basics.engine(), part(_Rank).session
    if session is None or session.engine is not engine:
        raise NotInitializedError("another thread is within init() or shutdown(): call horovodish before or after them")
    return session


def _begin_session(_: object) -> None:
    part(_Rank).session = _Session(basics.engine())


def _end_session() -> None:
    part(_Rank).session = None


class Handle(Generic[T]):
    """An operation under way. It ends in a result or in an exception, never in nothing.

    It may be dropped: the operation goes on, and its tensors stay alive until it is done.
    """

    __slots__ = ("_current_stream", "_finish", "_finishing", "_value", "name", "native")

    def __init__(
        self,
        name: str,
        native: _native.Handle,
        finish: Callable[[_native.Handle], T],
        current_stream: Callable[[], int] | None = None,
    ):
        self.name = name
        self.native = native
        self._finish = finish
        self._finishing = threading.RLock()  # a handler of a signal may wait while its thread does
        self._current_stream = current_stream
        self._value: T = _UNKNOWN

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}: {'settled' if self.poll() else 'pending'}>"

    def poll(self) -> bool:
        """Whether the operation has ended, in a result or an error. Never blocks."""
        return self.native.poll()

    def settles_within(self, seconds: float) -> bool:
        """Wait at most this long, and say whether the operation has ended. Ctrl-C interrupts after this time only."""
        return self.native.wait(seconds)

    def wait(self) -> T:
        """Wait for the operation and give its result; Ctrl-C interrupts the wait, and it may be called again.

        Several threads may wait. The first one makes the result, and the others get it, too.

        Of CUDA tensors the result is on its way when this returns: the stream that is current in the calling thread
        waits for it, and the host does not.

        Returns:
            The result; the same one each time.

        Raises:
            HorovodInternalError: the operation failed; the class and the message say why. On a GPU it may fail after
                this has returned a result, and then the next call raises.
            ForkedProcessError: in a forked child, when the operation was under way at the fork.
        """
        native = self.native
        if self._value is not _UNKNOWN:
            if self._current_stream is None:
                return self._value
            if native.error() is None:  # the operation may have been lost since an earlier call
                native.order_after(self._current_stream())
                return self._value
        settle(native, self._current_stream)
        with self._finishing:  # another thread must not write what the caller has changed since
            if self._value is _UNKNOWN:
                value = self._finish(native)
                if self._current_stream is not None:
                    native.finished_on(self._current_stream())
                self._value = value  # last, because a thread that finds it looks no further
                return value
        return self.wait()


def settle(native: _native.Handle, current_stream: Callable[[], int] | None = None) -> None:
    """Wait for an operation, and let go of its memory. Ctrl-C interrupts the wait, and it may be called again.

    Raises:
        HorovodInternalError: the operation failed.
        ForkedProcessError: as `Handle.wait`.
    """
    while not native.wait(WAIT_SLICE_SECONDS):
        pass
    error = native.error()
    if current_stream is not None and error is None:
        native.order_after(current_stream())
    native.release()
    if error is not None:
        raise from_native(*error)


def poll(handle: Handle[Any]) -> bool:
    """Whether an asynchronous operation has ended, in a result or an error. Never blocks; not collective.

    Args:
        handle: what an `..._async` function gave.

    Returns:
        True once `synchronize(handle)` would return or raise at once.

    Raises:
        TypeError: `handle` is not a handle.

    Example:
        >>> handle = hvd.allreduce_async(gradient, name="gradient")
        >>> while not hvd.poll(handle):
        ...     compute_something_else()
    """
    return _checked(handle).poll()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous operation and give its result. Blocks without the GIL; not collective.

    Args:
        handle: what an `..._async` function gave. It may be synchronized more than once, with the same result.

    Returns:
        What the function without `_async` returns.

    Raises:
        MismatchError: the ranks disagree about the tensor; every rank raises it.
        RankLostError: a rank died, raised or left while it was needed.
        EngineStoppedError: `shutdown()` was called in the meantime.
        TypeError: `handle` is not a handle.

    Example:
        >>> handle = hvd.allreduce_async(gradient, name="gradient")
        >>> average = hvd.synchronize(handle)
    """
    return _checked(handle).wait()


def cancel(handle: Handle[Any]) -> bool:
    """Take a send or a receive back that has not begun to move. It then fails. Not collective; does not block.

    Args:
        handle: of the send or the receive.

    Returns:
        False if it goes on: it has begun to move or has ended, or is a collective.
    """
    return handle.native.cancel()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise TypeError(f"expected a handle from an ..._async function, got {type(handle).__name__}")
    return handle


def generated_name(kind: str, process_set_id: int = 0) -> str:
    """A name for an operation that the caller did not name, such as "allreduce.noname.1".

    It is the same on every rank of the process set as long as they call operations of one kind in the same order.

    Args:
        kind: of operation; operations of different kinds are counted apart.
        process_set_id: where the operation takes place; counted apart, too.

    Returns:
        The kind and a number, counted from 1 since `init()`.

    Raises:
        NotInitializedError: before `init()`.
    """
    return f"{kind}.noname.{counted(kind, process_set_id)}"


def shown(name: str) -> str:
    """The name of an operation in messages: the caller's name, or without one "call 1 of allreduce".

    A name without a number, such as "process group 0.noname.slot 1", is "a call of process group 0".
    """
    kind, _, number = name.partition(".noname.")
    digits = number.partition(".")[0]
    return f"{f'call {digits}' if digits.isdigit() else 'a call'} of {kind}" if number else name


def counted(kind: str, process_set_id: int) -> int:
    """Count one more of something that happens on every rank of a process set. Not collective.

    Ranks that have joined count less; `agree_on_counters` makes up for it.

    Args:
        kind: the kind of call that is counted.
        process_set_id: where it happens; counted apart for each.

    Returns:
        How many there are since `init()`, with this one.

    Raises:
        NotInitializedError: before `init()`.
    """
    counters = _running_session().counters
    counters[kind, process_set_id] += 1
    return counters[kind, process_set_id]


def agree_on_counters(process_sets: Sequence[ProcessSet]) -> None:
    """After a join: ranks that ran out of data early have counted fewer calls and steps; all go on from the largest.

    Args:
        process_sets: those that this rank has joined.
    """
    numbers = {process_set.process_set_id for process_set in process_sets}
    counters, steps = _running_session().counters, basics.engine().steps()
    own = counters, _native.executions(), steps
    most = 0
    for theirs, executions, their_steps in gather_objects(own, "join.noname.counters", 0).values():
        most = max(most, their_steps)
        for key, count in theirs.items():
            if key[1] in numbers:
                counters[key] = max(counters[key], count)
        of_sets = {key: count for key, count in executions.items() if int(key.partition(" ")[0]) in numbers}
        _native.count_at_least(of_sets)
    basics.engine().go_on_from_step(most)
    if not steps and most:
        failures.warn(
            f"rank {basics.rank()} has joined before its first step, and another rank has made {most}: it had no "
            "batch. Remedy: give every rank equally many samples, or make batches smaller"
        )


def gather_objects(
    value: object, name: str, process_set_id: int, *, load: Callable[[Any], Any] = pickle.loads
) -> dict[int, Any]:
    """The objects of the ranks of a process set that have not joined, as copies. Collective; blocks.

    Args:
        value: this rank's object.
        name: the operation's name.
        process_set_id: the ranks that take part.
        load: makes an object of its pickled bytes.

    Returns:
        The object of each of these ranks by its place in the set, in ascending order.
    """
    return gather_objects_async(value, name, process_set_id, waits=True, load=load).wait()


def gather_objects_async(
    value: object,
    name: str,
    process_set_id: int,
    *,
    waits: bool = False,
    load: Callable[[Any], Any] = pickle.loads,
) -> Handle[dict[int, Any]]:
    """As `gather_objects`, but gives a handle. Collective; does not block. `waits`: as for `submit`."""
    source = pickled(value, "allgather", name, process_set_id)

    def by_rank(native: _native.Handle) -> dict[int, Any]:
        gathered, begin, values = native.output(0), 0, {}
        for place, length in enumerate(native.rows(0)):
            if length:  # no rows: a rank that has joined
                values[place] = load(gathered[begin : begin + length])
                begin += length
        return values

    return submit(
        Operation("allgather", name, added(process_set_id)),
        [(_native.address(source), 0, _native.DTYPES["uint8"], source.shape)],
        keep_alive=source,
        result=by_rank,
        waits=waits,
    )


def pickled(value: object, kind: str, name: str, process_set_id: int) -> npt.NDArray[np.uint8]:
    """An object as bytes that operation `name` of that kind is to send.

    Raises:
        Exception: the object cannot be pickled.
    """
    with RefuseOnError(kind, name, process_set_id):
        return np.frombuffer(pickling.dumps(value), np.uint8)


class RefuseOnError:
    """Wraps the checks of an operation's arguments, so that no rank waits for one that cannot take part.

    An exception within passes through. The ranks that wait for the operation then raise `MismatchError` with its text.
    The name may be used again at once.

    Args:
        kind: a key of `_native.KINDS`.
        name: the operation's name.
        process_set_id: of the process set, which contains this rank.

    Example:
        >>> with RefuseOnError("alltoall", name, 0):
        ...     counts = checked_splits(splits, rows, ranks, name)
    """

    __slots__ = ("_kind", "_name", "_process_set_id")

    def __init__(self, kind: str, name: str, process_set_id: int):
        self._kind = kind
        self._name = name
        self._process_set_id = process_set_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, traceback: object) -> None:
        if isinstance(problem, Exception):
            refuse(self._kind, self._name, self._process_set_id, problem)


def refuse(kind: str, name: str, process_set_id: int, problem: Exception) -> None:
    """As `RefuseOnError`, which is slower, once there is a problem."""
    text = str(problem)
    why = text if text.startswith((f"{name}:", f"{shown(name)}:")) else f"{shown(name)}: {text}"
    why = why.encode(errors="backslashreplace").decode()  # it may quote a file's name that is no UTF-8
    basics.engine().refuse(_native.KINDS[kind], name, process_set_id, why)


def submit(
    operation: Operation,
    members: list[Member],
    keep_alive: object,
    result: Callable[[_native.Handle], T],
    placement: Placement = ON_HOST,
    waits: bool = False,
) -> Handle[T]:
    """Hand one operation to the engine. Does not block; every rank must submit the same one.

    Args:
        operation: what to do, named and checked.
        members: the tensors.
        keep_alive: whatever owns their memory; referenced until nothing uses it any more.
        result: makes the caller's result from the settled native handle; called once, in the thread that waits.
        placement: where the memory is.
        waits: the caller is about to wait, so that the engine's thread need not be woken.

    Returns:
        The operation's handle.

    Raises:
        DuplicateNameError: an operation of that name is under way.
        NotInitializedError: before `init()` or after `shutdown()`.
        ForkedProcessError: in a forked child.
        ValueError: a CUDA graph is being captured, or a factor is no number, or the name no text.
    """
    name: Any  # checked below, if the engine refuses it
    (
        kind,
        name,
        process_set,
        op,
        _,
        prescale_factor,
        postscale_factor,
        root,
        splits,
        _,
        member_names,
        family,
        by_elements,
        ends,
        tag,
        codec,
        function,
    ) = operation
    process_set_id: Any = process_set.process_set_id  # a number, because the set is in use
    device, current_stream, _ = placement
    session = _running_session()
    try:
        native = session.engine.enqueue(
            _native.KINDS[kind],
            name,
            Sum if op is None else op,
            prescale_factor,
            postscale_factor,
            root,
            members,
            device,
            waits,
            process_set_id,
            () if splits is None else splits,
            member_names,
            None if current_stream is None else current_stream(),
            family,
            by_elements,
            ends,
            tag,
            text_of(codec),
            function,
            keep_alive,
        )
    except TypeError:
        _check_name(name)
        with RefuseOnError(kind, name, process_set_id):
            _check_factor(prescale_factor, "prescale_factor")
            _check_factor(postscale_factor, "postscale_factor")
        raise
    return Handle(name, native, result, current_stream)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} must be text, the same on every rank")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"name={name!r} cannot be sent to other ranks: it is not valid UTF-8") from None


def _check_factor(value: object, what: str) -> None:
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"{what}={value!r} is not a number")


basics.follow(started=_begin_session, stopped=_end_session)
