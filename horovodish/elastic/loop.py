"""Training that goes on when ranks are lost, and when new ones are there."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from horovodish.collectives.functions import barrier
from horovodish.elastic import membership
from horovodish.elastic.exchange import Outcome, exchange
from horovodish.elastic.state import OfAll, State
from horovodish.errors import EngineStoppedError, HostsUpdatedInterrupt, LaunchError, MismatchError, StallError
from horovodish.gradients import windows
from horovodish.launch import failures, run_folder
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["attempt", "run"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

_PROBLEMS = (Exception, HostsUpdatedInterrupt)
"""The exceptions that a recovery may follow."""


class _Note(NamedTuple):
    """A rank's message about the recovery that it is in.

    Attributes:
        ranks: how many there were in the world that it has left.
        is_told: whether the launcher has told it to leave.
        commits: how many it has made since the last recovery without a cause; None if there was none.
        at: the number of the state whose block it is in, or was about to begin.
        is_begun: whether that state has a commit of all ranks.
        left: the state that had the block before, by its number, and the number of the commit at the end of that block;
            None if all blocks had one state.
    """

    ranks: int
    is_told: bool
    commits: int | None
    at: int
    is_begun: bool
    left: tuple[int, int] | None


class _Loop:
    """The blocks of this process.

    Attributes:
        states: the state of the last block, and the state of the block before it: other ranks may still be there.
        entered: all states that had a block.
        have_begun_again: whether the ranks have changed since the beginning of the job.
        commits: how many this rank had made when the ranks last began again without a cause; None if they never did.
        deferred: a problem at the end of a block. The next block recovers from it.
        uncommitted: the state of the last block, if the end of that block is no commit.
    """

    def __init__(self) -> None:
        self.states: list[State] = []
        self.entered: weakref.WeakSet[State] = weakref.WeakSet()
        self.have_begun_again = membership.start() > 0
        self.commits: int | None = None
        self.deferred: Exception | None = None
        self.uncommitted: State | None = None

    def enter(self, state: State) -> None:
        """A block of this state begins."""
        if part(OfAll).in_block is not None:
            raise RuntimeError(
                "a block of hvd.elastic.attempt or run began within another one. A recovery goes back to the beginning "
                "of a block, so run them one after the other"
            )
        if not isinstance(state, State):
            raise TypeError(
                "hvd.elastic.run and attempt need a state, such as hvd.elastic.TorchState(model, optimizer, epoch=0), "
                f"not a {type(state).__name__}"
            )
        for method in ("save", "restore", "sync"):
            if getattr(type(state), method) is not getattr(State, method):
                raise TypeError(
                    f"{type(state).__name__} has a {method}() of its own, which a recovery would not call. Put its "
                    "data into attributes of the state: models stay the same objects, and values are pickled"
                )
        basics.init()
        membership.follow()
        before = self.states[-1] if self.states else state
        self.states = [*[each for each in self.states if each is not state][-1:], state]
        self.entered.add(state)
        while True:
            try:
                if self.deferred:
                    raise self.deferred
                if before is not state:
                    state._turn = 1 + max(before._turn, state._turn)
                    # A phase is over: no rank must go back into it. Both states may have a model in common.
                    for each in (before, state):
                        if each.is_synced:
                            each._commit(copies=True)
                basics.check_no_loss()
                state.check_host_updates()
                if not state.is_synced:
                    self._check_parts(state)
                    outcome = exchange([state])
                    self._keep_newer(state)
                    if self.have_begun_again:
                        state.on_reset()
                    _tell(outcome)
                else:
                    state._finish()  # the script may leave its loop in this block, and would then see no recovery
                return
            except _PROBLEMS as problem:
                self.deferred = None
                self.recover(problem)

    def end_block(self, state: State) -> None:
        """A block has come to its end. A recovery here would not be seen by a script that leaves the loop."""
        try:
            if basics.has_failed():
                basics.check_no_loss()
            is_committed = state._commit(copies=membership.hosts_updated() and not state._has_parts())
            self.uncommitted = None if is_committed else state
        except Exception as problem:
            if not _comes_of_other_ranks(problem):
                raise
            self.deferred, self.uncommitted = problem, state
            warnings.warn(
                "a collective has failed, but its block went on to its end. The next block of hvd.elastic goes back to "
                "a commit; without a next block, this block's results may be wrong. Do not catch such errors",
                RuntimeWarning,
                stacklevel=4,
            )

    @contextlib.contextmanager
    def inside(self, state: State) -> Iterator[None]:
        """While a block of a state runs."""
        part(OfAll).in_block = state
        try:
            yield
        finally:
            part(OfAll).in_block = None

    def recover(self, problem: BaseException) -> None:
        """After a problem, begin again with the remaining ranks, from the commit that they agree on.

        Raises:
            BaseException: `problem`, unless it comes of other ranks, or when the ranks have begun again because of the
                like of it before and not all of them have made a commit since.
        """
        seen: list[BaseException] = []
        while True:
            if not _comes_of_other_ranks(problem, seen):
                raise problem
            seen += failures.chain(problem)
            is_told = basics.is_cut_off() or isinstance(problem, HostsUpdatedInterrupt)
            if not (is_told or basics.loss() or membership.can_regroup()):
                raise problem
            if not (membership.is_elastic() or membership.can_regroup()):
                if basics.left_in_order():
                    raise problem
                raise membership.cannot_regroup().with_traceback(problem.__traceback__) from None
            commits = None if self.commits is None else part(OfAll).commits - self.commits
            ranks = basics.size() if basics.has_engine() else 0
            state = self.states[-1]
            note = _Note(ranks, is_told, commits, state._number, state._position[0] >= 0, self._left())
            # In this order: regroup() tells the launcher that this rank has left the old world.
            basics.shutdown()
            membership.regroup(self._keep)
            self.have_begun_again = True
            try:
                for state in self.entered:
                    if state not in self.states:
                        state._is_synced = False  # the ranks exchange it when its next block begins
                for state in self.states:
                    state._let_go()
                windows.restart()
                begun = [state for state in self.states if state._position[0] >= 0]
                outcome = exchange(begun, note, in_recovery=True)
                self._check_progress(outcome, problem)
                self._check_places(outcome)
                if self.states[-1].is_synced:
                    self._keep_newer(self.states[-1])
                for state in self.states:
                    if state.is_synced:
                        state.on_reset()
                if begun:  # else `enter` tells the launcher when the ranks have exchanged their first state
                    _tell(outcome)
                return
            except _PROBLEMS as another:
                # Two stalls in a row: nothing has changed since the first one, and the ranks cannot even agree.
                if another is problem or (isinstance(another, StallError) and isinstance(problem, StallError)):
                    raise
                problem = another

    def _keep_newer(self, state: State) -> None:
        """See that a state whose commit is older than another state leaves a model in common as the newer one has it.

        A script that takes turns with its states comes again to one that had its last block before another's.
        """
        if len(self.entered) > 1:
            gc.collect()  # ranks free states that nothing refers to any more at different times
        others = [each for each in self.entered if each is not state and each.is_synced]
        newer = [each for each in others if each._turn > state._turn]
        if newer:
            for each in sorted(newer, key=lambda each: each._turn):
                each.restore()
            state._turn = 1 + max(each._turn for each in newer)
            state._commit(copies=True)
            if self.commits is not None:
                self.commits += 1  # the script has not come further
            barrier()  # before a rank of this host copies other commits over those that were restored

    def _check_parts(self, state: State) -> None:
        """Have new processes begin again if parts of a state that was never copied are gone."""
        if state._position[0] < 0 and state._has_lost_parts():
            self._begin_anew("before training had begun, and its part of a sharded optimizer's state with it")

    def _left(self) -> tuple[int, int] | None:
        """As `_Note.left`."""
        if len(self.states) < 2:
            return None
        before = self.states[0]
        return before._number, before._position[2] + (before is self.uncommitted)

    def _check_places(self, outcome: Outcome) -> None:
        """Have new processes begin again if ranks are in blocks of different states: no script goes back.

        Likewise if a state is behind the end of its last block. Without a launcher the ranks go on if the later state
        has not begun: then none of them begins it before all of them do.
        """
        if _are_apart(outcome.notes) and (membership.is_elastic() or all(note.is_begun for note in outcome.notes)):
            self._begin_anew("while others were in blocks of different states")
        left = [note.left for note in outcome.notes if note.left]
        now = {state._number: state._position[2] for state in self.states if state.is_synced}
        if any(now.get(number, commit) < commit for number, commit in left):
            self._begin_anew("between the blocks of two states, before all hosts had the first one's last commit")

    def _begin_anew(self, when: str) -> None:
        if not membership.is_elastic():
            raise LaunchError(f"a rank was lost {when}. Remedy: start the job again")
        basics.shutdown()
        membership.regroup(self._keep, anew=True)

    def _check_progress(self, outcome: Outcome, problem: BaseException) -> None:
        """Raise the problem if it is of no use to go on."""
        notes: list[_Note] = outcome.notes
        if any(note.is_told or note.ranks != basics.size() for note in notes):
            self.commits = None
        elif any(note.commits == 0 for note in notes) or _are_apart(notes):
            raise problem
        else:
            self.commits = part(OfAll).commits

    def _keep(self) -> None:
        """These processes end: leave in memory of the host what they only hold."""
        for state in self.states:
            state._copy_held()


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training function continue when ranks are lost or new ranks have come. Every rank calls it.

    When a collective fails because a rank is lost, the remaining ranks call `init()` again among themselves, go back to
    the newest commit of any of them, and call the function again. The function must therefore begin where the state
    says. The state is committed when the function returns.

    Args:
        function: trains. Its first argument is a `State`.

    Returns:
        A function that does this and returns the result of `function`.

    Raises:
        TypeError: the first argument is no `State`.
        LaunchError: a rank was lost, and the ranks were not started with `horovodish run --min-np`, nor under an
            `mpirun` with fault tolerance.
        RuntimeError: within a block of another state.
        All exceptions of `function` that no lost rank has caused. After an error of a collective without a lost rank,
        such as `StallError`, the function runs again once. The error is raised if it comes again before every rank
        has made a commit, or if the ranks are in blocks of different states.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.epoch < 10:
        ...         train_one_epoch(state)
        ...         state.epoch += 1
        ...         state.commit()
        >>> train(state)
    """

    @functools.wraps(function)
    def elastic(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            part(_Loop).enter(state)
            with part(_Loop).inside(state):
                try:
                    result = function(state, *args, **kwargs)
                    basics.check_no_loss()
                    part(_Loop).uncommitted = None if state._commit(copies=True) else state
                    return result
                except _PROBLEMS as problem:
                    part(_Loop).recover(problem)

    return elastic


@contextlib.contextmanager
def attempt(state: State) -> Iterator[None]:
    """Run a block of code. If ranks are lost or new ranks have come, leave it and go on after it. Every rank enters it.

    When a collective in the block fails because a rank is lost, the block is left. The remaining ranks call `init()`
    again among themselves and go back to the newest commit of any of them. Then the code after the block runs, so a
    loop around it repeats the interrupted step. The end of the block is a commit. Read the state only inside the block:
    a new process has no state before its first block. A step without losses or new ranks sends no extra message.

    A block begins when JAX and GPUs have finished the work of the block before. Under `run` they run ahead.

    Args:
        state: the same one each time.

    Raises:
        TypeError: `state` is no `State`.
        LaunchError: as `run`.
        RuntimeError: within another block.
        All exceptions of the block that no lost rank has caused; see `run`.

    Example:
        >>> state = hvd.elastic.ObjectState(step=0, total=0.0)
        >>> while True:
        ...     with hvd.elastic.attempt(state):
        ...         if state.step == 10:
        ...             break
        ...         state.total += hvd.allreduce(np.ones(1)).item()
        ...         state.step += 1
    """
    part(_Loop).enter(state)
    with part(_Loop).inside(state):
        try:
            yield
        except _PROBLEMS as problem:
            part(_Loop).recover(problem)
            return
        part(_Loop).end_block(state)


def _are_apart(notes: Sequence[_Note]) -> bool:
    """Whether ranks are in blocks of different states."""
    return len({note.at for note in notes}) > 1


def _tell(outcome: Outcome) -> None:
    run_folder.reached("training", outcome.commit, outcome.repeated)
    if basics.rank() == 0 and outcome.commit and not membership.is_elastic():  # its launcher says it
        print(f"horovodish: continuing from commit {outcome.commit}", file=sys.stderr, flush=True)


def _comes_of_other_ranks(problem: BaseException, handled: Sequence[BaseException] = ()) -> bool:
    """Whether an exception says that the world has changed. JAX and TensorFlow have classes of their own for that.

    Args:
        problem: the exception.
        handled: those that a recovery has handled, and during which this one was raised.
    """
    if basics.is_cut_off():
        return True  # of whatever class: a bug of the user's will come back on the next attempt
    loss = basics.loss()
    for each in failures.chain(problem):
        if any(each is other for other in handled):
            return False
        if isinstance(each, MismatchError):
            return False
        if failures.says_so(each, loss) or isinstance(each, (EngineStoppedError, StallError, HostsUpdatedInterrupt)):
            return True
    return False
