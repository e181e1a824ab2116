"""Training that goes on when ranks are lost, and when new ones are there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from horovodish import basics
from horovodish.elastic import membership
from horovodish.elastic.state import State
from horovodish.errors import EngineStoppedError, HostsUpdatedInterrupt, MismatchError, RankLostError, StallError

__all__ = ["run"]

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
        Whatever `function` raises that does not come of a lost rank.
        LaunchError: a rank was lost, and the ranks were not started with `horovodish run --min-np`, nor under an
            `mpirun` with fault tolerance.

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
        basics.init()
        membership.follow()
        is_reset = False
        while True:
            try:
                if is_reset:
                    state.on_reset()
                state.sync()
                return function(state, *args, **kwargs)
            except Exception as problem:
                if not _comes_of_other_ranks(problem):
                    raise
            basics.shutdown()
            state.cut_off()
            membership.regroup(state.save)
            is_reset = True

    return elastic


def _comes_of_other_ranks(problem: BaseException | None) -> bool:
    """Whether it says that the world has changed. JAX and TensorFlow have classes of their own for that."""
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
