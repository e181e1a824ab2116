"""Steps that go on when some of the ranks have a gradient: m-of-n. Each rank's thread adds up what there is.

The main thread of a rank gives its gradient, and takes the averages of all steps that it has not applied yet. Its
thread tells the first rank that there is a gradient. The first rank decides when a step goes on, and tells all threads.
The threads add up the gradients that have come since the last step, by a plain allreduce. So a late gradient is a part
of the next step, and each gradient counts once. The average is over the gradients that came.

Sources: Chen et al., "Revisiting distributed synchronous SGD", 2016, which drops what is late; Ho et al., "More
effective distributed ML via a stale synchronous parallel parameter server", 2013, for the bound.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import itertools
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from horovodish import _native
from horovodish.collectives.adding_sets import before_removal
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.consistency import FIRST_APART
from horovodish.collectives.functions import around_join
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import Handle, cancel
from horovodish.collectives.transfers import receive, send
from horovodish.errors import HorovodInternalError, MismatchError, NotInitializedError, StallError
from horovodish.launch import failures
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["Average", "LateSteps", "Optimizer", "follow", "missed_steps", "take_names"]

GRACE_SHARE = 0.1
"""A step that could go on waits so long for ranks that were in time for the last one, as a share of what that took."""
_LOOK_SECONDS = 0.0005
"""How often the first rank looks whether its own main thread has a gradient."""
_SLICE_SECONDS = 0.1
_STOP_SECONDS = 5.0
_WORD_SECONDS = 1.0
"""How often the first rank sends to the other threads, so that their wait does not count as a stall."""
NEXT_STEP = ": the next step"
"""Ends the name of the operation that the first rank uses to announce a step. The other ranks wait in it meanwhile."""
_PARTED = "change parameters alike on every rank: by optimizer.step(), and broadcast what one rank loads or sets"
_END, _GO, _WAIT, _MEET, _STALL = range(5)
_ENDED, _AWAY = -1, -2
"""In place of a step: the rank takes no more steps, or none until all ranks have said so."""


class Average(NamedTuple):
    """The average gradients that a step applies.

    Attributes:
        step: its number, from 1.
        gradients: the average of those that came, in the order and the shapes of `contribute`.
        options: of the first rank among those that were in time, such as its learning rates.
        came: how many gradients that is.
    """

    step: int
    gradients: list[np.ndarray]
    options: np.ndarray
    came: int


class Optimizer(Protocol):
    """Makes the steps of one optimizer when it takes the first one."""

    def take_name(self) -> None:
        """Number the optimizer within its process set, if it has no number on this engine yet."""

    def must_begin(self) -> bool:
        """Whether `begin()` makes steps."""

    def begin(self) -> None:
        """Make the steps, if there are none on this engine yet. Does not block."""


class _Told(NamedTuple):
    """A rank's last message.

    Attributes:
        given: how many gradients it has given so far.
        step: the step that the last one is for, or `_ENDED`, or `_AWAY`.
        checksum: of the parameters before that step, if the ranks compare them there; 0: they do not.
        options: as the options of `Average`.
    """

    given: int
    step: int
    checksum: float
    options: np.ndarray


class LateSteps:
    """The steps of one optimizer. Every rank of the process set makes one, with the same arguments.

    Attributes:
        process_set: the ranks.

    Args:
        name: of the reductions.
        process_set: the ranks.
        wait_for: with how many gradients for a step it goes on.
        stale: how many steps a rank may lag before the others wait for it.
        like: arrays of the shapes and dtypes of the gradients.
        options: how many numbers describe the options of the optimizer.
        done: how many steps were taken before.
        catch_up: takes steps that this rank has missed, where it waits for the others.
        remedy: what to do if ranks have different parameters.
        check: waits for the other ranks before the first step, and raises if they don't take such steps.
    """

    def __init__(
        self,
        name: str,
        process_set: ProcessSet,
        wait_for: int,
        stale: int,
        like: Sequence[np.ndarray],
        options: int,
        done: int,
        catch_up: Callable[[list[Average]], None],
        remedy: str,
        check: Callable[[], None] = lambda: None,
    ):
        self._name, self.process_set, self._wait_for, self._stale = name, process_set, wait_for, stale
        self._ranks, self._place = process_set.ranks, process_set.rank()
        self._like, self._options, self._remedy = like, options, remedy
        self._catch_up, self._check, self._is_away, self._all_are_away = catch_up, check, False, False
        self._has_left = False
        self._engine = basics.engine()
        self._tag = 1 << 31 | zlib.crc32(name.encode()) >> 1  # apart from other optimizers, and from tags of scripts
        self._changed = threading.Condition()
        self._pending = [np.zeros_like(each) for each in like]
        self._given = 0  # gradients of this rank; the next reduction takes the ones that it has not taken yet
        self._averages: deque[Average] = deque()
        self._problem: BaseException | None = None
        self._difference = ""  # between the ranks' parameters; the main thread of the first rank warns of it
        self._has_differed = False  # once is enough
        self._done = done
        self._told = {place: _Told(0, done, 0, np.zeros(options)) for place in range(len(self._ranks))}
        self._taken = np.zeros(len(self._ranks))  # how many gradients of each rank were reduced
        self._grace = 0.0
        self._could, self._waits_since, self._has_warned = 0.0, 0.0, False
        self._missing: list[int] = []  # on the first rank, the ranks that the others wait for
        self._begin_to_wait()
        self._in_time = set(self._told)  # for the last step
        self._checksums: dict[int, tuple[int, float]] = {}  # by step: the first rank that has told its own
        self._receiving: Handle[int] | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._serve,), name="hvd-late-steps", daemon=True)
        self._thread.start()
        part(_Running).steps.add(self)

    # -- the main thread

    def contribute(self, gradients: Sequence[np.ndarray], step: int, checksum: float, options: np.ndarray) -> None:
        """Give this rank's gradient for a step. Does not block.

        Args:
            gradients: of the shapes that were announced.
            step: its number.
            checksum: of the parameters before it, if the ranks are to compare them; 0: they are not.
            options: what describes the optimizer's options.

        Raises:
            ValueError: another optimizer has given one since this one did, and no `join()` was between them.
        """
        running = part(_Running)
        if self in running.earlier:
            raise ValueError(
                f"{self._name}: two optimizers with wait_for= take steps in turns without hvd.join() between them, so "
                "ranks could wait for each other in different optimizers. Remedy: give all parameters to one "
                "optimizer, or leave wait_for= out"
            )
        if running.latest not in (None, self):
            running.earlier.add(running.latest)
        running.latest = self
        with self._changed:
            for total, each in zip(self._pending, gradients, strict=True):
                total += each
            self._given += 1
            told = _Told(self._given, step, checksum, options)
        self._tell(told)

    def are_over(self) -> bool:
        """Whether this rank takes no more of them: it has left, or the engine has ended."""
        return self._has_left or not basics.is_initialized() or self._engine is not basics.engine()

    def end(self) -> None:
        """Take no more steps. Waits until the other ranks take none either, and serves them until then."""
        _leave([self])

    def leave(self) -> None:
        """Say that this rank takes no more steps. Does not block."""
        self._say(_ENDED)

    def pause(self) -> None:
        """Say that this rank takes no steps until all ranks have said so. Does not block."""
        self._say(_AWAY)

    def _say(self, word: int) -> None:
        with self._changed:
            if self._problem is not None:
                return
            self._is_away, self._has_left = word == _AWAY, word == _ENDED
            told = _Told(self._given, word, 0, np.zeros(self._options))
        with contextlib.suppress(HorovodInternalError):  # a rank was lost
            self._tell(told)

    def await_pauses(self) -> bool:
        """Wait a moment until all ranks have called `pause()`, and take the steps that this rank has missed so far.

        Returns:
            Whether all ranks have called it; otherwise call this again.

        Raises:
            HorovodInternalError: a reduction failed, or a rank was lost.
        """
        with self._changed:
            if self._waits_for_pauses() and not self._averages and self._problem is None:
                self._changed.wait(_SLICE_SECONDS)
            waits = self._waits_for_pauses()
            is_missing = self._averages or (waits and self._problem is not None)
        if is_missing:
            self._catch_up(self.averages())
        return not waits

    def _waits_for_pauses(self) -> bool:
        return self._is_away and not self._all_are_away

    def resume(self) -> None:
        """End a pause."""
        with self._changed:
            self._is_away = self._all_are_away = False
            self._changed.notify_all()

    def await_others(self) -> None:
        """Wait until no rank takes more steps, after `leave()`, or until a reduction has failed."""
        while self._thread.is_alive():
            self._thread.join(_SLICE_SECONDS)

    def stopped(self) -> None:
        """The engine has stopped, and so does the thread."""
        self._thread.join(_STOP_SECONDS)

    def _tell(self, told: _Told) -> None:
        if self._place:
            self._send(np.array([*told[:-1], *told.options]))
        else:
            self._hear(0, told)

    def _send(self, message: np.ndarray) -> None:
        name = f"{self._name}: a gradient"
        send(ARRAYS, message, self._ranks[0], self._tag, name=name, process_set=self.process_set)

    def put_back(self, averages: list[Average]) -> None:
        """Have the next call of `averages()` give these first: this rank has not taken their steps."""
        with self._changed:
            self._averages.extendleft(reversed(averages))

    def averages(self) -> list[Average]:
        """The averages of the steps that this rank has not applied, at least one. Blocks until there is one.

        Raises:
            HorovodInternalError: a reduction failed, or a rank was lost.
        """
        begun = time.monotonic_ns()
        with self._changed:
            while not self._averages and self._problem is None:
                self._changed.wait(_SLICE_SECONDS)
            self._engine.waited(begun)
            found = list(self._averages)
            self._averages.clear()
            difference, self._difference = self._difference, ""
        if difference:
            failures.warn(difference)
        if not found:
            assert self._problem is not None
            raise self._problem
        return found

    # -- its thread

    def _serve(self) -> None:
        _native.record_no_waits()
        try:
            self._check()
            self._check_steps()
            while (word := self._told_by_first(None if self._place else self._decided()))[0] != _END:
                if word[0] == _GO:
                    self._reduce(word[1:])
                    continue
                self._end_receive()
                if word[0] == _STALL:
                    limit = basics.running().settings.stall_check_shutdown_time_seconds
                    ranks = f"ranks {self._missing}" if self._missing else f"ranks that rank {self._ranks[0]} names"
                    raise StallError(
                        f"{self._name}: step {self._done + 1} has waited more than {limit:g} s for {ranks}. Remedy: "
                        "call hvd.join() on a rank that takes no more steps, or raise the limit "
                        "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS"
                    )
                if word[0] == _MEET:
                    if self._has_left:
                        return  # the engines of the others say that they joined without this rank
                    self._rest()
            self._end_receive()  # before any rank leaves
            self._told_by_first(self._word(_END))
            self._problem = HorovodInternalError(
                f"{self._name}: fewer than wait_for={self._wait_for} ranks take further steps. Remedy: end the loop at "
                "the same optimizer.steps on every rank"
            )
        except (HorovodInternalError, NotInitializedError) as problem:  # the second one at the end of the engine
            _, failed, why = str(problem).partition(" failed on rank ")
            step = f"{self._name}: step {self._done + 1}{failed}{why}"
            with self._changed:
                self._problem = type(problem)(step) if failed else problem
                self._changed.notify_all()
        finally:
            self._engine.describe_wait(self._name, "")

    def _check_steps(self) -> None:
        """Raise MismatchError on every rank if ranks begin with other numbers of steps or options. Collective."""
        told = np.zeros((len(self._ranks), 2))
        told[self._place] = self._done, self._options
        operation = Operation("allreduce", f"{self._name}: steps so far", self.process_set, Sum, in_place=True)
        ARRAYS.start(operation, [told], lambda *_: None, waits=True).wait()
        for (first, other), what, remedy in zip(
            ((its[0], its) for its in told.T),
            ("has taken {:.0f} steps", "has parameter groups with {:.0f} numbers, such as learning rates"),
            ("load the same checkpoint on every rank", "give every rank the same options"),
            strict=True,
        ):
            differs = int(np.argmax(other != first))
            if other[differs] != first:
                raise MismatchError(
                    f"{self._name}: rank {self._ranks[0]} {what.format(first)}, and rank {self._ranks[differs]} "
                    f"{other[differs]:.0f}. Remedy: {remedy}"
                )

    def _rest(self) -> None:
        """Submit nothing until the end of the pause: the engine of a rank that has joined would not expect it."""
        with self._changed:
            self._all_are_away = self._is_away
            self._changed.notify_all()
            while self._all_are_away:
                self._changed.wait(_SLICE_SECONDS)

    def _end_receive(self) -> None:
        """End the first rank's receive, which would count as stalled after a while."""
        while self._receiving is not None:
            if cancel(self._receiving):
                self._receiving = None
            else:  # a message has come, or comes
                self._look()

    def _word(self, kind: int, options: np.ndarray | float = 0.0) -> np.ndarray:
        """The first rank's message to the others: whether a step goes on, and with which options."""
        word = np.empty(1 + self._options)
        word[0], word[1:] = kind, options
        return word

    def _told_by_first(self, word: np.ndarray | None) -> np.ndarray:
        """Tell the others the first rank's word, and return it. Collective; blocks."""
        word = self._word(_END) if word is None else word
        name = f"{self._name}{NEXT_STEP}"
        operation = Operation("broadcast", name, self.process_set, root_rank=self._ranks[0], in_place=True)
        ARRAYS.start(operation, [word], lambda *_: None, waits=True).wait()
        return word

    def _decided(self) -> np.ndarray:
        """On the first rank: wait a while until a step can go on, or no step will."""
        step, began = self._done + 1, time.monotonic()
        while time.monotonic() - began < _WORD_SECONDS:
            in_time = [place for place, told in self._told.items() if told.step == step]
            takes_steps = [place for place, told in self._told.items() if told.step != _ENDED]
            here = [place for place in takes_steps if self._told[place].step != _AWAY]
            lags = [step - self._told[place].step for place in here if place not in in_time]
            if not takes_steps or (in_time and len(takes_steps) < self._wait_for):
                return self._word(_END)
            if not here:
                self._told.update({place: self._told[place]._replace(step=self._done) for place in takes_steps})
                self._begin_to_wait()
                return self._word(_MEET)
            if len(in_time) >= min(self._wait_for, len(here)) and max(lags, default=0) <= self._stale:
                self._could = self._could or time.monotonic()
                awaited = self._in_time.intersection(here).difference(in_time)
                if not awaited or time.monotonic() - self._could >= self._grace:
                    self._in_time = {*in_time}
                    late = set(here).difference(in_time)
                    number = self.process_set.process_set_id
                    part(_Running).missed.update((number, self._ranks[place]) for place in late)
                    self._grace = GRACE_SHARE * (time.monotonic() - self._began)
                    self._begin_to_wait()
                    return self._word(_GO, self._told[in_time[0]].options)
            self._look()
        self._missing = missing = [self._ranks[place] for place in here if place not in in_time]
        # A step that could go on waits for its grace only.
        does_wait = not self._could and (in_time or len(here) < len(takes_steps))
        self._waits_since = (self._waits_since or time.monotonic()) if does_wait else 0.0
        waited = time.monotonic() - self._waits_since if does_wait else 0.0
        self._describe_wait(step, waited, [self._ranks[place] for place in in_time], missing)
        knobs = basics.running().settings
        if knobs.stall_check and 0 < knobs.stall_check_shutdown_time_seconds < waited:
            return self._word(_STALL)
        seconds = knobs.stall_check_warning_time_seconds if knobs.stall_check else 0.0
        if 0 < seconds < waited and not self._has_warned:
            self._has_warned = True
            print(
                f"horovodish: warning: {self._name}: step {step} has waited {seconds:.0f} s for ranks {missing}. A "
                f"step goes on with {self._wait_for} ranks, unless another rank lags {self._stale} steps",
                file=sys.stderr,
                flush=True,
            )
        return self._word(_WAIT)

    def _begin_to_wait(self) -> None:
        """The first rank waits for the next step, which no rank waits for yet."""
        self._began, self._could, self._waits_since, self._has_warned = time.monotonic(), 0.0, 0.0, False
        self._engine.describe_wait(self._name, "")

    def _describe_wait(self, step: int, waited: float, in_time: list[int], missing: list[int]) -> None:
        """Let `horovodish status` name the ranks without a gradient, if another rank waits for them."""
        call = f"step() number {step} of '{self._name}' with wait_for={self._wait_for}"
        line = f"missing\t{self.process_set.process_set_id or 0}\t{waited}\t{self._name}\t{call}\t{in_time}\t{missing}"
        self._engine.describe_wait(self._name, line if in_time and missing else "")

    def _receive(self) -> Handle[int]:
        """The handle that receives the next message, into `_message`."""
        if self._receiving is None:
            self._message = np.zeros(3 + self._options)
            name = f"{self._name}: a gradient"
            self._receiving = receive(ARRAYS, self._message, tag=self._tag, name=name, process_set=self.process_set)
        return self._receiving

    def _look(self) -> None:
        """Wait a moment for what another rank tells."""
        receiving = self._receive()
        if receiving.settles_within(_LOOK_SECONDS):
            place = self._ranks.index(receiving.wait())
            self._receiving = None
            given, step, checksum, *options = self._message
            self._hear(place, _Told(int(given), int(step), checksum, np.array(options)))

    def _hear(self, place: int, told: _Told) -> None:
        self._told[place] = told
        if not told.checksum:
            return
        other, checksum = self._checksums.setdefault(told.step, (place, told.checksum))
        if checksum != told.checksum and not self._has_differed:
            self._has_differed = True
            remedy = self._remedy if told.step < FIRST_APART else _PARTED
            self._difference = (
                f"{self._name}: before step {told.step}, the parameters of rank {self._ranks[other]} and rank "
                f"{self._ranks[place]} differ. Remedy: {remedy}"
            )

    def _reduce(self, options: np.ndarray) -> None:
        """Add up what all ranks have, and divide by how many gradients came. Collective; blocks."""
        self._engine.begin_step()
        with self._changed:
            sums, self._pending = self._pending, [np.zeros_like(each) for each in self._like]
            taken = np.zeros(len(self._ranks))
            taken[self._place] = self._given
        operation = Operation("allreduce", self._name, self.process_set, Sum, in_place=True)
        ARRAYS.start(operation, [*sums, taken], lambda *_: None, waits=True).wait()
        came = int((taken - self._taken).sum())
        self._taken = taken
        with self._changed:
            self._done += 1
            if not self._has_left:  # else no one would take them
                gradients = [np.asarray(each / came) for each in sums]  # of an array of shape () NumPy makes a number
                self._averages.append(Average(self._done, gradients, options, came))
            self._changed.notify_all()


class _Running:
    """The steps that this rank takes, and the optimizers that may yet begin to take some."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self.numbers = itertools.count()
        self.steps: weakref.WeakSet[LateSteps] = weakref.WeakSet()
        self.latest: LateSteps | None = None  # to take a step since the last join
        self.earlier: weakref.WeakSet[LateSteps] = weakref.WeakSet()  # those before it
        self.missed: Counter[tuple[int | None, int]] = Counter()  # by set and rank, on its first rank


def missed_steps(process_set: ProcessSet) -> dict[int, int]:
    """On the first rank of a set, by rank: how many steps went on before the rank had a gradient for them."""
    missed, number = part(_Running).missed, process_set.process_set_id
    return {rank: missed[number, rank] for rank in process_set.ranks}


def follow(optimizer: Optimizer) -> None:
    """From now on, `join()` begins its steps, so that a rank without any step takes part in the others' steps."""
    part(_Running).optimizers[next(part(_Running).numbers)] = optimizer


def take_names() -> None:
    """Number all optimizers in the order of their creation: ranks may begin their steps in a different order.

    Ranks free optimizers that nothing refers to any more at different times, so they do it here.
    """
    gc.collect()
    for optimizer in list(part(_Running).optimizers.values()):
        optimizer.take_name()


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    if any(optimizer.must_begin() for optimizer in part(_Running).optimizers.values()):
        gc.collect()  # as in `take_names`
    for optimizer in list(part(_Running).optimizers.values()):
        optimizer.begin()
    running = list(part(_Running).steps)
    for steps in running:  # of all optimizers, as in `_finish`
        steps.pause()
    try:
        waiting = running
        while waiting:  # for all at a time, so that the averages of none of them pile up
            waiting = [steps for steps in waiting if not steps.await_pauses()]
        _begin_turn()
        yield
    finally:
        for steps in running:
            steps.resume()


def _finish() -> None:
    if failures.exit_status:
        return  # the others are to be told at once
    _leave(list(part(_Running).steps))


def _begin_turn() -> None:
    """No rank is in a step: from here on, each optimizer may be the first one."""
    part(_Running).latest = None
    part(_Running).earlier.clear()


def _leave_set(process_set: ProcessSet) -> None:
    _leave([steps for steps in part(_Running).steps if steps.process_set is process_set])


def _leave(running: list[LateSteps]) -> None:
    for steps in running:  # of all optimizers, because ranks wait for them in different orders
        steps.leave()
    for steps in running:
        steps.await_others()
    part(_Running).steps.difference_update(running)


def _stopped() -> None:
    if failures.reason is None and not failures.exit_status:  # else the process ends, and its threads never return
        for steps in list(part(_Running).steps):
            steps.stopped()
    part(_Running).steps.clear()
    _begin_turn()
    part(_Running).missed.clear()


basics.follow(finish=_finish, stopped=_stopped)
around_join(_paused)
before_removal(_leave_set)
