"""How the members of a process group agree before they have a process set: by PyTorch's store."""

from __future__ import annotations

import functools
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from horovodish.errors import RankLostError, StallError
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["Meeting", "tell_of_shutdown"]

_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.0002, 0.05
_NEWS_SECONDS = 5.0
"""The engine knows within this time why the store does not answer."""
_FAREWELL_SECONDS = 1.0
"""For so long a rank that ends waits for a store that may have ended before."""


class _Told:
    """The store that hears of this process's end. All groups of the process share it.

    Attributes:
        store: the last one; None: nothing is written.
        rank: of the world.
    """

    def __init__(self) -> None:
        self.store: Any = None
        self.rank = 0


def tell_of_shutdown(store: Any, rank: int) -> None:
    """Have this rank write to the store when its engine stops, so that no group waits for the rank any longer.

    Args:
        store: of a group.
        rank: of the world.
    """
    told = part(_Told)
    told.store, told.rank = _shared(store), rank
    told.store.set(_shutdown_of(rank), "")


def _say_shutdown() -> None:
    told = part(_Told)
    store, told.store = told.store, None
    if store is not None:
        key = _shutdown_of(told.rank)
        asks = threading.Thread(target=_ask, args=(lambda: store.set(key, "yes"), queue.SimpleQueue()), daemon=True)
        asks.start()
        asks.join(_FAREWELL_SECONDS)


basics.follow(stopped=_say_shutdown)


def _shared(store: Any) -> Any:
    """The store without the prefixes of groups."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _is_shut_down(store: Any, rank: int) -> bool:
    key = _shutdown_of(rank)
    return bool(store.check([key]) and store.get(key) == b"yes")


def _shutdown_of(rank: int) -> str:
    return f"horovodish: shutdown of rank {rank}"


class Meeting:
    """Each call gives every member's value to every member.

    Args:
        store: a `torch.distributed.Store` of this group alone. Another group may have used it before.
        rank: of this process within the group.
        ranks: of the world, by rank within the group.
        timeout: for each call.
        purpose: what the members do, for messages.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, purpose: str):
        self._rank, self._ranks, self._timeout, self._purpose = rank, ranks, timeout, purpose
        # PyTorch gives a store and a name again after `destroy_process_group`, perhaps to a group of other ranks.
        members = ",".join(map(str, ranks))
        count = self._answer(lambda: store.add(f"groups of {members}, {rank}", 1))
        self._store, self._shared = PrefixStore(f"{members}/{count}", store), _shared(store)
        self._round = 0

    def __call__(self, value: Any, seconds: float | None = None) -> list[Any]:
        """Every member's value, by rank within the group.

        Raises:
            StallError: a member did not come in time, or within `seconds`.
            RankLostError: a rank was lost meanwhile.
        """
        self._round += 1
        keys = self._keys(str(self._round))
        self._answer(lambda: self._store.set(keys[self._rank], json.dumps(value)))
        self._wait_for(keys, seconds)
        return [json.loads(each) for each in self._answer(lambda: [self._store.get(key) for key in keys])]

    def end(self) -> None:
        """Tell the first member that this one needs the store no more. The first member waits for the others.

        The store is part of the first rank's process: if it ended, the others could not read what they wait for.

        Raises:
            StallError, RankLostError: as above.
        """
        keys = self._keys("end")
        self._answer(lambda: self._store.set(keys[self._rank], ""), _NEWS_SECONDS)
        if self._rank == 0:
            self._wait_for(keys)

    def leave(self, value: Any) -> None:
        """Write what the next call and `end` would write, and wait for nobody."""

        def write() -> None:
            self._store.set(self._keys(str(self._round + 1))[self._rank], json.dumps(value))
            self._store.set(self._keys("end")[self._rank], "")

        with suppress(RankLostError, StallError):
            self._answer(write, _NEWS_SECONDS)

    def _keys(self, stage: str) -> list[str]:
        return [f"{stage}/{place}" for place in range(len(self._ranks))]

    def _wait_for(self, keys: list[str], seconds: float | None = None) -> None:
        limit = min(self._timeout.total_seconds(), seconds or math.inf)
        began, nap = time.monotonic(), _SHORTEST_NAP_SECONDS
        warns_at: float = basics.running().settings.stall_check_warning_time_seconds
        while not self._all_are_there(keys, limit):
            waited = time.monotonic() - began
            if waited > limit:
                raise StallError(f"{self._missing(keys)} within {waited:.0f} s. All its ranks must make the same calls")
            if 0 < warns_at < waited:
                self._warn(keys, warns_at)
                warns_at = math.inf
            if nap == _LONGEST_NAP_SECONDS:
                self._check_shutdowns(keys)
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP_SECONDS)

    def _check_shutdowns(self, keys: Sequence[str]) -> None:
        """Raise if a rank that did not come will never come."""
        for rank, key in zip(self._ranks, keys, strict=True):
            is_over = self._answer(functools.partial(_is_shut_down, self._shared, rank))
            if is_over and not self._has([key]):
                raise RankLostError(
                    f"{self._purpose}: rank {rank} did not come, and its script has ended or called shutdown(). "
                    "Remedy: make the same calls on all ranks of the group"
                )

    def _all_are_there(self, keys: list[str], seconds: float) -> bool:
        if self._has(keys, seconds):
            return True
        if loss := basics.loss():
            raise RankLostError(f"{self._purpose}: {loss}")
        return False

    def _has(self, keys: list[str], seconds: float = math.inf) -> bool:
        return bool(self._answer(lambda: self._store.check(keys), seconds))

    def _answer(self, ask: Callable[[], Any], seconds: float = math.inf) -> Any:
        """The store's answer. A thread asks, because a `TCPStore` waits forever if its process is stopped."""
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=_ask, args=(ask, answers), daemon=True).start()
        limit = min(self._timeout.total_seconds(), seconds)
        why = f" within {limit:g} s. The rank that holds it, most often rank 0, may be stopped"
        ends_at = time.monotonic() + limit
        while (left := ends_at - time.monotonic()) > 0:
            with suppress(queue.Empty):
                answer, problem = answers.get(timeout=min(left, _LONGEST_NAP_SECONDS))
                if problem is None:
                    return answer
                ends_at, why = time.monotonic() + _NEWS_SECONDS, f": {problem}"  # the rank that holds it has ended
            if loss := basics.loss():
                raise RankLostError(f"{self._purpose}: {loss}")
        raise StallError(f"{self._purpose}: the store of torch.distributed does not answer{why}")

    def _missing(self, keys: Sequence[str]) -> str:
        missing = [str(rank) for rank, key in zip(self._ranks, keys, strict=True) if not self._has([key])]
        who = f"rank {', '.join(missing)}" if missing else "a rank"  # it has come meanwhile
        return f"{self._purpose}: {who} did not come"

    def _warn(self, keys: Sequence[str], seconds: float) -> None:
        print(f"horovodish: warning: {self._missing(keys)} for {seconds:g} s", file=sys.stderr, flush=True)


def _ask(ask: Callable[[], Any], answers: queue.SimpleQueue[tuple[Any, Exception | None]]) -> None:
    try:
        answers.put((ask(), None))
    except Exception as problem:
        answers.put((None, problem))
