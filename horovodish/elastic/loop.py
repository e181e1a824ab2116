"""Training that goes on when ranks are lost, and when new ones are there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from horovodish import basics, run_folder
from horovodish.elastic import membership
from horovodish.elastic.state import State
from horovodish.errors import EngineStoppedError, HostsUpdatedInterrupt, MismatchError, RankLostError, StallError

__all__ = ["attempt", "run"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training function go on when ranks are lost or new ones are there. Every rank calls it.

    The function is called with the state of the rank that is furthest. When a collective fails because a rank is lost,
    the ranks that are left call `init()` again among themselves, take the state of the furthest one of them, and call
    the function again. It must therefore begin where the state says.

    Args:
        function: trains. Its first argument is a `State`.

    Returns:
        The function that does so; it returns what `function` returns.

    Raises:
        TypeError: the first argument is no `State`.
        LaunchError: a rank was lost, and the ranks were not started with `horovodish run --min-np`, nor under an
            `mpirun` with fault tolerance.
        Whatever `function` raises that does not come of a lost rank.

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
            with attempt(state):
                return function(state, *args, **kwargs)

    return elastic


@contextlib.contextmanager
def attempt(state: State) -> Iterator[None]:
    """Leave a block of code, but go on after it, when ranks are lost or new ones are there. Every rank enters it.

    The block runs with the state of the rank that is furthest. When a collective in it fails because a rank is lost,
    the block is left. The ranks that are left call `init()` again among themselves and take the state of the furthest
    one of them. Then the code after the block runs, so a loop around it repeats the step in flight. Look at the state
    inside of the block: before the first one, new processes do not know it yet. In a step where nothing happens, no
    message is sent.

    Args:
        state: the same one each time.

    Raises:
        TypeError: `state` is no `State`.
        LaunchError: as `run`.
        Whatever the block raises that does not come of a lost rank.

    Example:
        >>> state = hvd.elastic.ObjectState(step=0, total=0.0)
        >>> while True:
        ...     with hvd.elastic.attempt(state):
        ...         if state.step == 10:
        ...             break
        ...         state.total += hvd.allreduce(np.ones(1)).item()
        ...         state.step += 1
    """
    if not isinstance(state, State):
        raise TypeError(
            "hvd.elastic.run and attempt need a state, such as hvd.elastic.TorchState(model, optimizer, epoch=0), "
            f"not a {type(state).__name__}"
        )
    basics.init()
    membership.follow()
    if not state.is_synced:
        _sync(state)
    try:
        yield
    except Exception as problem:
        if not _comes_of_other_ranks(problem):
            raise
        _leave_world(state)
        _sync(state, is_reset=True)


def _sync(state: State, *, is_reset: bool = False) -> None:
    while True:
        try:
            if is_reset:
                state.on_reset()
            state.sync()
            if membership.start() > 0 and not is_reset:
                state.on_reset()  # what earlier processes have left is of as many ranks as there were then
            run_folder.reached("training")
            return
        except Exception as problem:
            if not _comes_of_other_ranks(problem):
                raise
        _leave_world(state)
        is_reset = True


def _leave_world(state: State) -> None:
    """For the next one, of the ranks that are left."""
    basics.shutdown()
    state.cut_off()
    membership.regroup(state.save)


def _comes_of_other_ranks(problem: BaseException | None) -> bool:
    """Whether it says that the world has changed. JAX and TensorFlow have classes of their own for that."""
    if basics.is_cut_off():
        return True  # of whatever class: what has another cause comes again in the next try
    loss = basics.loss()
    while problem is not None:
        if isinstance(problem, (RankLostError, EngineStoppedError, StallError, HostsUpdatedInterrupt)):
            return True
        if isinstance(problem, MismatchError):
            return False
        if loss and loss in str(problem):
            return True
        problem = problem.__cause__ or problem.__context__
    return False
