"""A model of an allreduce in which codes travel, where every rank is a host: the same bits as the engine's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import horovodish as hvd
from horovodish import _native
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.operation import Codec, Operation
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Sum

Floats = npt.NDArray[np.float32]
Calls = Mapping[str, Callable[[Any], object]]
BLOCKS = {"int8": 256, "int4": 64, "onebit": 4096, "ternary": 1024, "topk": 4096, "randomk": 4096}
SHARE = 0.5
PIECE, TILE = 64 << 10, 4096
ELEMENTS = 30_001
STEPS, FLUSHES = 4, 4
"""After this many steps with zeros, less than 1e-7 of the errors of int8 are left."""


def loses_nothing(step: Callable[[Floats], object], process_set: ProcessSet = global_process_set) -> None:
    """Check that averages by int8 are the same on all ranks, that later ones bring what earlier ones left out, and that
    the report names the tensor.

    Args:
        step: an optimizer's step with this gradient, of `ELEMENTS` rows; gives the average of all ranks. Collective.
        process_set: the ranks that take part.
    """
    lost = np.zeros((ELEMENTS, 1))
    before = {(one.owner, one.name): one.steps for one in hvd.compression_report(process_set).tensors}
    for number in range(STEPS + FLUSHES):
        of_ranks = [np.random.default_rng([number, rank]) for rank in process_set.ranks]
        gradients = [random.standard_normal((ELEMENTS, 1)).astype(np.float32) * (number < STEPS) for random in of_ranks]
        result = np.array(step(gradients[process_set.rank()]), np.float32)
        first = hvd.broadcast(result, root_rank=process_set.ranks[0], process_set=process_set)
        np.testing.assert_array_equal(result, first)
        lost += np.mean(gradients, 0, np.float64) - result
        if number == 0:
            assert np.abs(lost).max() > 1e-3, "nothing was encoded"
    assert np.abs(lost).max() < 1e-5
    after = hvd.compression_report(process_set).tensors
    (own,) = [one for one in after if one.steps - before.get((one.owner, one.name), 0) == STEPS + FLUSHES]
    assert own.codec == "int8"
    assert own.ratio == pytest.approx(4 / (1 + 4 / 256), rel=0.01)


def encode_or_refuse(module: ModuleType, encode: Calls, refuse: Calls) -> None:
    """Check which public functions with `compression=` send codes, and that the others say so. Collective.

    Args:
        module: the package.
        encode, refuse: by the name of a function, what calls it with a compression.
    """
    takes = {name for name in module.__all__ if "compression" in _parameters(getattr(module, name))}
    assert takes == {*encode, *refuse}
    for name, call in encode.items():
        before = sum(one.code_bytes for one in hvd.compression_report().tensors)
        call(hvd.Compression.int8)
        assert sum(one.code_bytes for one in hvd.compression_report().tensors) > before, name
    for call in refuse.values():
        with pytest.raises(ValueError, match=r"compression=Compression\.int8 is"):
            call(hvd.Compression.int8)
    for call in (*encode.values(), *refuse.values()):
        with pytest.raises(ValueError, match=r"compression='int8' is no"):
            call("int8")


def _parameters(function: object) -> Collection[str]:
    try:
        return inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or one without a signature
        return ()


def reduced(kind: str, name: str, members: dict[str, Floats], *, start: int = 0, prescale: float = 1.0) -> list[Floats]:
    """The sums over all ranks of tensors that travel together, with error feedback. Collective; blocks."""
    codec = Codec(_native.CODECS[kind], SHARE if kind.endswith("k") else 0.0, True, start)
    operation = Operation("allreduce", name, op=Sum, prescale_factor=prescale, member_names=[*members], codec=codec)
    return ARRAYS.group(operation, [*members.values()]).wait()


class Model:
    """What each rank keeps of each tensor, and the bits that the ranks get."""

    def __init__(self, kind: str, ranks: int):
        self.kind, self.ranks = kind, ranks
        self.errors: list[dict[str, Floats]] = [{} for _ in range(ranks)]

    def reduced(self, members: Sequence[dict[str, Floats]]) -> list[Floats]:
        """As the function of this name, of what each rank gives."""
        names = [*members[0]]
        values = [np.concatenate([its[name] for name in names]) for its in members]
        for rank, its in enumerate(members):
            for name in names:
                self.errors[rank].setdefault(name, np.zeros_like(its[name]))
        errors = [np.concatenate([its[name] for name in names]) for its in self.errors]
        result = np.empty_like(values[0])
        for owner, part in self._parts(len(result)):
            total = np.zeros_like(result[part])
            for rank in range(self.ranks):
                given = values[rank][part] + errors[rank][part]
                total += given if rank == owner else self._encoded(given, errors[rank][part])
            result[part] = self._encoded(total, errors[owner][part])
        bounds = [*pairwise(accumulate((len(members[0][name]) for name in names), initial=0))]
        for rank in range(self.ranks):
            self.errors[rank].update({name: errors[rank][slice(*at)] for name, at in zip(names, bounds, strict=True)})
        return [result[slice(*at)] for at in bounds]

    def _encoded(self, values: Floats, errors: Floats) -> Floats:
        """The decoded values; the errors stay where the values are not finite."""
        share = SHARE if self.kind.endswith("k") else 0.0
        made = _native.testing.code_with(
            level=0, kind=_native.CODECS[self.kind], share=share, seed=0, values=values.tobytes(), others=None
        )
        assert made is not None
        left, decoded = (np.frombuffer(each, np.float32) for each in made[1:])
        errors[:] = np.where(np.isnan(left), errors, left)
        return decoded

    def _parts(self, count: int) -> Iterator[tuple[int, slice]]:
        """The owner of each part."""
        piece = max(PIECE // self.ranks // TILE, 1) * TILE * self.ranks
        block = BLOCKS[self.kind]
        for begin in range(0, count, piece):
            end = min(begin + piece, count)
            length = math.ceil(math.ceil((end - begin) / self.ranks) / block) * block
            for owner in range(self.ranks):
                first = min(begin + owner * length, end)
                yield owner, slice(first, min(first + length, end))
