"""The actions of the random scripts of `search_elastic.py`, with NumPy arrays, and digests of states."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from elastic_plans import Action, Phase

from horovodish.runtime import basics

PERIOD = 16  # keeps numbers small, so that sums are exact


def digest(state: Any) -> str:
    """Return a digest of all values of a state. Samplers are left out, because each rank knows its own part."""
    found = hashlib.blake2b(digest_size=8)
    _feed(found, state._live)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        found.update(b"{")
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"[{len(value)}".encode())
        for each in value:
            _feed(found, each)
    elif hasattr(value, "record_batch"):
        pass
    elif hasattr(value, "state_dict"):
        _feed(found, {**value.state_dict()})
    elif hasattr(value, "__array__") or hasattr(value, "numpy"):
        array = np.ascontiguousarray(value.detach() if hasattr(value, "detach") else value)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8))
    elif hasattr(value, "get_weights"):
        value.jax_state_sync()  # during fit() the weights are elsewhere
        _feed(found, [np.asarray(each) for each in [*value.variables, *value.optimizer.variables]])
    else:
        found.update(repr(value).encode())


def samples_of(state: Any) -> list[int]:
    """Return the epochs and samples that a state's sampler knows, and the samples that were counted."""
    sampler = getattr(state, "sampler", None)
    if sampler is None:
        return []
    known, counted = sampler.state_dict(), int(state.counts.sum())
    return [known["epoch"], known["done"], state.epoch, counted - state.epoch * len(state.counts)]


_sets: dict[int, Any] = {}


def set_of_world(hvd: Any) -> Any:
    """A process set, made anew in each world. Collective the first time."""
    world = basics.running().begun_ns
    if world not in _sets:
        _sets.clear()
        ranks = list(range(1, hvd.size())) if hvd.size() > 2 else [0]
        _sets[world] = hvd.add_process_set(ranks) if hvd.size() > 1 else hvd.global_process_set
    return _sets[world]


class Script:
    """A script with NumPy arrays.

    Attributes:
        writes: called before an action writes to the state.
        commit: commits a state.
        save: saves a state.
        is_elastic: whether callbacks may commit.
    """

    def __init__(self, hvd: Any, phase: Phase, seed: int) -> None:
        self.hvd = hvd
        self.phase = phase
        self.choice = random.Random(f"{seed} {phase.length}")
        self.writes: Callable[[], object] = lambda: None
        self.commit: Callable[[Any], object] = lambda state: state.commit()
        self.save: Callable[[Any], object] = lambda state: state.save()
        self.is_elastic = True
        self._world = -1
        self._at = 0
        self.prepare()

    def prepare(self) -> None:
        """Make what the state needs."""

    def zeros(self, length: int) -> Any:
        """An array or tensor."""
        return np.zeros(length)

    def values(self) -> dict[str, Any]:
        """The attributes of the state."""
        length = self.phase.length
        return {
            "at": 0,
            "n": 0,
            "history": [],
            "a": self.zeros(length),
            "b": self.zeros(length),
            "small": self.zeros(3),
            "local": self.zeros(length),
        }

    def make(self) -> Any:
        """The state."""
        return self.hvd.elastic.ObjectState(**self.values())

    def enter(self, state: Any, world: int) -> None:
        """A function or block begins."""
        if world != self._world:
            self._world = world
            self.begin_anew(state)

    def begin_anew(self, state: Any) -> None:
        """The ranks are others than before."""

    def final(self, state: Any) -> Any:
        """What the state is compared by at the end."""
        return digest(state)

    def play(self, state: Any, come_to: Callable[[int], object], until_block: bool = False) -> None:
        """Do the actions that are left, or those up to the end of a block."""
        at, actions = state.at, self.phase.actions
        while at < len(actions):
            action, self._at = actions[at], at
            come_to(at)
            at += 1
            if action.name == "block" and until_block:
                break
            try:
                self._do(state, action, at)
            except Exception:
                if not self.phase.swallows:
                    raise
            if self.phase.counts == "action":
                state.at = at
        state.at = at

    def _do(self, state: Any, action: Action, after: int) -> None:
        match action.name:
            case "commit":
                state.at = after
                self.commit(state)
            case "save":
                state.at = after
                self.save(state)
            case "count":
                state.n += action.number
                state.history.append(action.number)
            case "sleep":
                time.sleep(0.005 * action.number)
            case "block":
                pass
            case _:
                getattr(self, action.name.replace(" ", "_"))(state, action)

    # Parts of ranks, whose sum does not depend on their number

    def part(self, number: float) -> float:
        """This rank's, of a sum that is `number`."""
        rank, size = basics.rank(), basics.size()
        return float(rank) if rank else number - size * (size - 1) / 2

    def name(self) -> dict[str, str]:
        """Return the name of a collective, as keyword arguments."""
        return {"name": f"action.{self._at}"} if self.phase.named else {}

    def full(self, like: Any, number: float) -> Any:
        """An array of equal numbers."""
        return np.full_like(like, number)

    def sum_of(self, like: Any, number: float, **where: Any) -> Any:
        """`number` everywhere, as the sum of all ranks."""
        return self.hvd.allreduce(self.full(like, self.part(number)), op=self.hvd.Sum, **self.name(), **where)

    def average_into(self, tensor: Any) -> None:
        """Add this rank's number, then average over the ranks in place."""
        rank, size = basics.rank(), basics.size()
        self.writes()
        tensor += rank
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, **self.name())
        tensor -= size * (size - 1) / 2
        tensor /= size

    def chosen(self, state: Any, action: Action) -> Any:
        """The array that an action is about."""
        return getattr(state, {"b": "b", "small": "small"}.get(action.option, "a"))

    def add(self, state: Any, action: Action) -> None:
        self.writes()
        if action.option == "replace":
            state.a = state.a + action.number
        else:
            self.add_to(self.chosen(state, action), action.number)

    def add_to(self, tensor: Any, value: Any) -> None:
        """In place."""
        tensor += value

    def mix(self, state: Any, action: Action) -> None:
        self.writes()
        self.add_to(state.b, state.a % PERIOD)
        self.add_to(state.a, state.b % PERIOD)

    def reduce(self, state: Any, action: Action) -> None:
        tensor = self.chosen(state, action)
        total = self.sum_of(tensor, action.number)
        self.writes()
        if action.option == "replace":
            state.a = state.a + total
        else:
            self.add_to(tensor, total)

    def reduce_in_place(self, state: Any, action: Action) -> None:
        self.average_into(self.chosen(state, action))
        self.add(state, action)

    def broadcast_in_place(self, state: Any, action: Action) -> None:
        tensor = self.chosen(state, action)
        self.writes()
        self.add_to(tensor, action.number + basics.rank())
        self.hvd.broadcast_(tensor, 0, **self.name())

    def metric(self, state: Any, action: Action) -> None:
        self.sum_of(self.zeros(2), action.number)

    def process_set(self, state: Any, action: Action) -> None:
        chosen = set_of_world(self.hvd)
        total = self.full(state.small, action.number)
        if chosen.included():
            total = self.hvd.allreduce(total, op=self.hvd.Sum, process_set=chosen, **self.name()) / chosen.size()
        self.writes()
        self.add_to(state.small, total)

    def local(self, state: Any, action: Action) -> None:
        """A step of a rank's own."""
        self.writes()
        self.add_to(state.local, action.number + basics.rank())

    def average(self, state: Any, action: Action) -> None:
        """The end of the steps of the ranks' own; what they have come to does not count."""
        self.writes()
        self.hvd.allreduce_(state.local, op=self.hvd.Sum, **self.name())
        state.local *= 0
        state.a += action.number
