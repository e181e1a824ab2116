"""Optimizers that the ranks of a world wrap, and a model of what the documents promise of them.

Gradients are set by hand and `step()` reduces them: PyTorch keeps what a backward pass is doing by threads of the
operating system, so a rank must not give way within one. Backward passes that do not reduce are real ones.
"""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from simulation.ranks import Wrong

import horovodish as hvd
from horovodish.collectives import process_sets

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:  # before a world is there, in which imports would not work
    import torch
    import torch._dynamo  # the first optimizer would import it

    import horovodish.torch as hvd_torch

SHAPES = ((7,), (12, 31), (4, 3))
RATE, MOMENTUM, BETAS, EPSILON = 2.0**-10, 0.5, (0.75, 0.875), 1e-8
OUTER_RATE, OUTER_MOMENTUM = 0.5, 0.75
LARGEST = 3 * 420
"""The largest element of the average gradient."""
Arrays = list[np.ndarray]

INNER = ("sgd", "momentum", "adam")
SHARDS: dict[str, dict[str, Any]] = {
    "states": {"shard": "states"},
    "gradients": {"shard": "gradients"},
    "whole": {"shard": "states", "shard_by": "parameter"},
}
SYNC = ("local", "post-local", "outer", "fragments", "hosts")
CODECS = {"int8": 0.004, "int4": 0.06, "onebit": 1.5, "powersgd": 3.0}
"""How far parameters may be from those without a codec, in steps with the largest gradient."""
WAYS = ("plain", "windows", "late", *SHARDS, "sets", *SYNC, *CODECS)
ELASTIC = ("plain", "windows", *SHARDS, "local", "outer", *CODECS)
"""The others end with a process set, or have no commit to go back to."""


@dataclass(frozen=True)
class Training:
    """An optimizer.

    Attributes:
        way: how the ranks train together; one of `WAYS`.
        inner: what is wrapped; one of `INNER`.
        every: the steps of a round, or the backward passes of a window.
    """

    way: str
    inner: str = "sgd"
    every: int = 2

    def averages(self, step: int) -> Arrays:
        """The averages of the gradients of a step.

        With a codec they are the same in all steps, so that what codes leave out adds up unless it is sent later. With
        `wait_for=` nobody knows whose gradient comes.
        """
        drawn = 0 if self.way in CODECS or self.way == "late" else step
        return [
            ((np.arange(np.prod(shape)) * 2**place + drawn) % 3 * 840 - 420).astype(np.float32).reshape(shape)
            for place, shape in enumerate(SHAPES)
        ]

    def gradients(self, rank: int, size: int, step: int) -> Arrays:
        """The gradients of a rank among `size`. Their average is computed without rounding, whatever the size is."""
        share = 1 if self.way == "late" else 2 * (rank + 1) / (size + 1)
        return [each * share for each in self.averages(step)]


def training_of(chance: random.Random, ways: Sequence[str] = WAYS) -> Training:
    """A training that is drawn."""
    way = chance.choice(ways)
    # Errors of a codec and the steps of one rank between commits are bounded for SGD alone.
    inner = "sgd" if way in CODECS or way == "late" or (way in SYNC and ways is ELASTIC) else chance.choice(INNER)
    return Training(way, inner, chance.randrange(2, 5))


class Trained:
    """A model and its optimizer on a rank.

    Args:
        training: the optimizer.
        team: the ranks that reduce.
    """

    def __init__(self, training: Training, team: Any):
        self.training, self._team = training, team
        self.model = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.model.parameters(), RATE),
            "momentum": lambda: torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM),
            "adam": lambda: torch.optim.Adam(self.model.parameters(), RATE, BETAS, EPSILON),
        }
        options = _options(training, team)
        self.optimizer: Any = hvd_torch.DistributedOptimizer(
            kinds[training.inner](), self.model.named_parameters(), process_set=team, **options
        )

    def step(self, number: int) -> None:
        """Train the ranks' average gradient of this step. Collective; blocks."""
        ranks = self._team.ranks if self._team.included() else [hvd.rank()]
        own = self.training.gradients(ranks.index(hvd.rank()), len(ranks), number)
        self.optimizer.zero_grad()
        if self.training.way == "windows":
            for _ in range(self.training.every):
                sum((p * torch.from_numpy(g)).sum() for p, g in zip(self.model, own, strict=True)).backward()
        else:
            for parameter, gradient in zip(self.model, own, strict=True):
                parameter.grad = torch.from_numpy(gradient)
        self.optimizer.step()

    def found(self) -> Arrays:
        """The parameters."""
        return [parameter.detach().numpy().copy() for parameter in self.model]

    def look(self) -> Arrays:
        """The parameters of all ranks together. Collective within rounds."""
        before = self.found()
        with self.optimizer.synchronized() if self.training.way in SYNC else nullcontext():
            found = self.found()
        assert all(map(np.array_equal, before, self.found())), "synchronized() has changed the parameters"
        return found

    def end(self) -> None:
        """End a round. Collective."""
        if self.training.way in SYNC:
            self.optimizer.end_round()


def _options(training: Training, team: Any) -> dict[str, Any]:
    way, every = training.way, training.every
    if way in SHARDS:
        return SHARDS[way]
    if way in CODECS:
        codec: Any = getattr(hvd_torch.Compression, way)
        return {"compression": (codec(2, where=_everywhere) if way == "powersgd" else codec(where=_everywhere))}
    outer = hvd_torch.OuterSGD(OUTER_RATE, OUTER_MOMENTUM)
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "windows": lambda: {"backward_passes_per_step": every + 1},
        "late": lambda: {"wait_for": max(1, team.size() - 1)},
        "sets": lambda: {"shard": "gradients", "shard_set": _half(team)},
        "local": lambda: {"sync": hvd_torch.LocalSGD(every)},
        "post-local": lambda: {"sync": hvd_torch.LocalSGD(every, after=2)},
        "outer": lambda: {"sync": hvd_torch.DiLoCo(every, outer)},
        "fragments": lambda: {"sync": hvd_torch.DiLoCo(every, outer, fragments=2, overlap=1)},
        "hosts": lambda: {"sync": hvd_torch.Hierarchical("host", every)},
    }
    return made.get(way, dict)()


def _half(team: Any) -> Any:
    """The half that this rank is in, or all of them if their number is odd."""
    ranks, half = team.ranks, team.size() // 2
    if len(ranks) % 2:
        return team
    halves = [_set_of(each) for each in (ranks[:half], ranks[half:])]
    return next((each for each in halves if each.included()), halves[0])


def _set_of(ranks: list[int]) -> Any:
    found = process_sets._set_of(ranks)
    return hvd.add_process_set(ranks) if found.process_set_id is None else found


def _everywhere(name: str, shape: tuple[int, ...]) -> bool:
    return True


class _Replica:
    """The parameters of a rank, and what its optimizer remembers."""

    def __init__(self) -> None:
        self.values: Arrays = [np.zeros(shape, np.float32) for shape in SHAPES]
        self._first, self._second = ([np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(2))
        self._steps = 0

    def step(self, inner: str, gradients: Arrays) -> None:
        self._steps += 1
        rate = np.float32(RATE)
        for value, first, second, gradient in zip(self.values, self._first, self._second, gradients, strict=True):
            if inner != "adam":
                first *= MOMENTUM if inner == "momentum" else 0
                first += gradient
                value -= rate * first
                continue
            first += (1 - BETAS[0]) * (gradient - first)
            second += (1 - BETAS[1]) * (gradient * gradient - second)
            corrected = (1 - beta**self._steps for beta in BETAS)
            value -= rate * (first / next(corrected)) / (np.sqrt(second / next(corrected)) + EPSILON)


class _Round(NamedTuple):
    """Where the round of one parameter began, and what lands later.

    Attributes:
        start: its value there.
        sent: by rank, its value when the ranks met.
        lands: after which step that takes effect.
    """

    start: np.ndarray
    sent: Arrays
    lands: int


class Expected:
    """What the parameters must be after each step: a model of docs/sharding.md and docs/slow_machines.md.

    Args:
        training: the optimizer.
        hosts: the places of the ranks that reduce, by host.
    """

    def __init__(self, training: Training, hosts: Sequence[Sequence[int]]):
        self._training, self._hosts = training, hosts
        self._size = sum(map(len, hosts))
        self._replicas = [_Replica() for _ in range(self._size if training.way in SYNC else 1)]
        self._rounds: dict[int, _Round] = {}
        self._velocities: Arrays = [np.zeros(shape, np.float32) for shape in SHAPES]
        self._after = [self._values()]

    def after(self, steps: int, place: int = 0) -> Arrays:
        """The parameters of a rank after this many steps."""
        while len(self._after) <= steps:
            self._step(len(self._after) - 1)
            self._after.append(self._values())
        return self._after[steps][place % len(self._replicas)]

    def ended(self, steps: int) -> Arrays:
        """The parameters of all ranks after this many steps, which must be the last ones, and the end of the round."""
        self.after(steps)
        last = copy.deepcopy(self)
        for place, its in self._rounds.items():
            last._land(place, its.lands)
        for place in dict(last._rounds):
            last._send(place, steps)
            last._land(place, steps)
        return last._values()[0]

    def _values(self) -> list[Arrays]:
        return [[value.copy() for value in each.values] for each in self._replicas]

    def _step(self, number: int) -> None:
        training = self._training
        after = 2 if training.way == "post-local" else 0
        average = [each * (training.every if training.way == "windows" else 1) for each in training.averages(number)]
        if training.way not in SYNC or number < after:
            for replica in self._replicas:
                replica.step(training.inner, average)
            return
        for place in range(len(SHAPES)):
            value = self._replicas[0].values[place]
            self._rounds.setdefault(place, _Round(value.copy(), [], -1))
        own = [training.gradients(each, self._size, number) for each in range(self._size)]
        for host in self._hosts if training.way == "hosts" else [[each] for each in range(self._size)]:
            mean = [np.mean(each, axis=0) for each in zip(*(own[each] for each in host), strict=True)]
            for each in host:
                self._replicas[each].step(training.inner, mean)
        for place in range(len(SHAPES)):
            self._meet(place, number + 1 - after)

    def _meet(self, place: int, step: int) -> None:
        every, streams = self._training.every, self._training.way == "fragments"
        ahead = (place == 1) * (every // 2) if streams else 0  # the largest one meets by itself
        if (step + ahead) % every == 0:
            self._send(place, step + streams)
        self._land(place, step)

    def _send(self, place: int, lands: int) -> None:
        sent = [replica.values[place].copy() for replica in self._replicas]
        self._rounds[place] = self._rounds[place]._replace(sent=sent, lands=lands)

    def _land(self, place: int, step: int) -> None:
        training, its = self._training, self._rounds[place]
        if not its.sent or its.lands != step:
            return
        change = np.mean([each - its.start for each in its.sent], axis=0)
        if training.way in ("outer", "fragments"):
            velocity = self._velocities[place] = OUTER_MOMENTUM * self._velocities[place] + change
            change = OUTER_RATE * (change + OUTER_MOMENTUM * velocity)
        merged = its.start + change
        for replica, sent in zip(self._replicas, its.sent, strict=True):
            replica.values[place] += merged - sent
        self._rounds[place] = _Round(merged, [], -1)
        if training.way != "fragments":
            del self._rounds[place]


def check_parameters(found: Arrays, expected: Arrays, training: Training, losses: int = 1) -> None:
    """Raise `Wrong` unless parameters are as near to what they must be as the training allows.

    Args:
        found, expected: the parameters.
        training: the optimizer.
        losses: how often errors of a codec may have been lost.
    """
    most = 1e-4 + CODECS.get(training.way, 0.0) * LARGEST * RATE * losses
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not np.allclose(one, other, rtol=1e-4, atol=most):
            place = np.unravel_index(np.argmax(np.abs(one - other)), one.shape)
            raise Wrong(f"{training}: parameter {number} has {one[place]} at {place}, not {other[place]}")
