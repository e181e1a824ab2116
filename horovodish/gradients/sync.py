"""Policies for ranks that take their own steps: when the ranks meet, and how they merge their parameters.

In a round each rank steps with its own gradients, or with the gradients of its host. A meeting ends the round: the
ranks reduce the changes of their parameters since the round began, and `merge` computes the new parameters from the
start of the round and the reduced change. A policy says when and how. It is independent of frameworks and works on any
arrays.

Sources: Stich, "Local SGD converges fast and communicates little", 2019; Lin et al., "Don't use large mini-batches, use
local SGD", 2020, for `after`; Douillard et al., "DiLoCo: Distributed low-communication training of language models",
2023, and "Streaming DiLoCo with overlapping communication", 2025, for fragments and overlap.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from typing import Any, SupportsIndex

from horovodish.collectives.process_sets import ProcessSet, check_kind
from horovodish.gradients.compression import Compressor, check_compression
from horovodish.gradients.shard_sets import members_set
from horovodish.runtime import basics

__all__ = ["DiLoCo", "Hierarchical", "LocalSGD", "OuterSGD", "Sync"]

_DEFAULTS = {"after": 0, "fragments": 1, "overlap": 0}


class Sync:
    """A policy for the argument `sync` of `DistributedOptimizer`. Derive your own policies from this class.

    The ranks raise `MismatchError` if their policies differ in a number, or, for a class of your own, in a public
    number or in its code.

    Args:
        every: the number of steps in a round. In a round a rank sends as many bytes as in one step of synchronous
            training.
        after: the number of steps with the gradients of all ranks, before the first round begins.
        within: the ranks that average their gradients in every step: "host", or this rank's process set. None: each
            rank uses its own gradients.
        fragments: the number of parts of the parameters. Each part has its own meetings, at different steps than the
            others, so that a meeting sends fewer bytes.
        overlap: the number of steps that are computed while a part is reduced. Their changes are kept.
        compression: a cast or a codec for the changes; None: the optimizer's `compression`.

    Raises:
        ValueError: a number that is not whole or not in its range.
        TypeError: `within` is neither "host" nor a process set.

    Example:
        >>> class Damped(hvd.Sync):
        ...     def merge(self, start, change, memory):
        ...         return start + 0.9 * change, memory
        >>> optimizer = hvd.DistributedOptimizer(optimizer, sync=Damped(every=8))
    """

    def __init__(
        self,
        every: int,
        *,
        after: int = 0,
        within: str | ProcessSet | None = None,
        fragments: int = 1,
        overlap: int = 0,
        compression: Compressor | None = None,
    ):
        self.every = _whole("every", every, 1)
        self.after = _whole("after", after, 0)
        self.fragments = _whole("fragments", fragments, 1)
        self.overlap = _whole("overlap", overlap, 0)
        if self.fragments > self.every:
            raise ValueError(f"fragments={fragments} must be at most every={every}, so that each has a step of its own")
        if self.overlap >= self.every:
            raise ValueError(f"overlap={overlap} must be less than every={every}: a meeting ends before the next")
        if isinstance(within, str):
            if within != "host":
                raise ValueError(f'within={within!r} is not known. Remedy: "host", or a process set')
        elif within is not None:
            check_kind(within)
        self.within = within
        self.compression = None if compression is None else check_compression(compression)

    def __repr__(self) -> str:
        """Everything that must be the same on all ranks."""
        given = {"after": self.after, "fragments": self.fragments, "overlap": self.overlap}
        others = [f", {name}={value}" for name, value in given.items() if value != _DEFAULTS[name]]
        others += [f", {each}" for each in _of_a_users_class(self)]
        return f"{type(self).__name__}(every={self.every}{''.join(others)})"

    def is_due(self, step: Any, fragment: int = 0) -> Any:
        """Return whether a fragment meets after a step. It must return the same on every rank.

        Args:
            step: the number of the step, from 1, without the steps of `after`. In compiled programs a traced integer.
            fragment: the number of the fragment, from 0.
        """
        return (step + fragment * self.every // self.fragments) % self.every == 0

    def begin(self, parameter: Any) -> tuple[Any, ...]:
        """Return the memory of `merge` for a parameter before its first meeting: arrays, the same on every rank."""
        return ()

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the parameter after a meeting, and the new memory. It must not write to its arguments.

        Args:
            start: the parameter at the beginning of the round.
            change: the change of the parameter in the round, reduced over the ranks.
            memory: the memory from `begin` or from the last call.
        """
        return start + change, memory


class LocalSGD(Sync):
    """Each rank takes its own steps, and every `every` steps the parameters become their average over the ranks.

    With `after`, the first steps are synchronous, which is post-local SGD.

    Args:
        every: steps from one average to the next.
        after: synchronous steps at the beginning.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, sync=hvd.LocalSGD(every=8))
    """

    def __init__(self, every: int, after: int = 0):
        super().__init__(every, after=after)


class Hierarchical(Sync):
    """The ranks of a host average their gradients in every step, and all ranks their parameters every `every` steps.

    Args:
        within: "host", or this rank's process set, to average in every step among other ranks than those of a host.
        every: steps from one average over all ranks to the next.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, sync=hvd.Hierarchical(within="host", every=8))
    """

    def __init__(self, within: str | ProcessSet = "host", every: int = 8):
        super().__init__(every, within=within)


class OuterSGD:
    """The outer optimizer of DiLoCo: SGD with momentum, with the average change as its gradient.

    Args:
        lr: the factor of a step; 1 without momentum is an average of the parameters.
        momentum: the share of the last direction that is added to the new one.
        nesterov: whether a step looks ahead along the momentum.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True):
        for name, value in (("lr", lr), ("momentum", momentum)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"OuterSGD: {name}={value} must be 0 or more")
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def __repr__(self) -> str:
        return f"OuterSGD(lr={self.lr}, momentum={self.momentum}, nesterov={self.nesterov})"

    def begin(self, parameter: Any) -> tuple[Any, ...]:
        """Nothing has been changed before the first meeting."""
        return (parameter * 0,) if self.momentum else ()

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """As `Sync.merge`."""
        if not memory:
            return start + self.lr * change, ()
        velocity = self.momentum * memory[0] + change
        direction = change + self.momentum * velocity if self.nesterov else velocity
        return start + self.lr * direction, (velocity,)


class DiLoCo(Sync):
    """Each rank takes its own steps. Every `every` steps, an outer optimizer steps with the average change.

    Args:
        every: the steps of a rank for one step of the outer optimizer; 100 to 500 is usual.
        outer: the outer optimizer: an `OuterSGD`, or an object with its methods `begin` and `merge`.
        after, fragments, overlap, compression: as for `Sync`. The paper begins with synchronous steps, too.

    Example:
        >>> sync = hvd.DiLoCo(every=100, fragments=4, overlap=1, compression=hvd.Compression.int8)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, sync=sync)
    """

    def __init__(
        self,
        every: int,
        outer: Any = None,
        *,
        after: int = 0,
        fragments: int = 1,
        overlap: int = 0,
        compression: Compressor | None = None,
    ):
        super().__init__(every, after=after, fragments=fragments, overlap=overlap, compression=compression)
        outer = OuterSGD() if outer is None else outer
        if isinstance(outer, type) or not (hasattr(outer, "begin") and hasattr(outer, "merge")):
            raise TypeError(f"DiLoCo: outer={outer!r} has no begin() and merge(). Remedy: pass an hvd.OuterSGD(...)")
        of_its = f"{type(outer).__name__}({', '.join(_of_a_users_class(outer))})"
        self._outer = repr(outer) if type(outer) is OuterSGD else of_its
        self.begin, self.merge = outer.begin, outer.merge  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, outer={self._outer})"


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """The fragment of each parameter: in the order of the model, whichever has the fewest bytes. Pure.

    Args:
        sizes: bytes of each parameter.
        count: how many fragments there are; some may get nothing.

    Example:
        >>> fragments_of([4, 4, 8, 4], 2)
        [0, 1, 0, 1]
    """
    loads = [0] * count
    found = []
    for size in sizes:
        found.append(loads.index(min(loads)))
        loads[found[-1]] += size
    return found


def ranks_within(policy: Sync, process_set: ProcessSet) -> ProcessSet | None:
    """The ranks that use each other's gradients in every step; None: the policy names none.

    With "host" it blocks, and every rank of `process_set` must call it.

    Args:
        policy: says which.
        process_set: all that meet.

    Raises:
        ValueError: a set without this rank, or with one that does not meet.
    """
    if policy.within is None or not process_set.included():
        return None
    if isinstance(policy.within, ProcessSet):
        ranks = policy.within.ranks
        if basics.rank() not in ranks or not {*ranks} <= {*process_set.ranks}:
            raise ValueError(
                f"sync: within= has ranks {ranks}. Remedy: on rank {basics.rank()}, pass a set that contains this rank "
                f"and only ranks among {process_set.ranks}"
            )
        return policy.within
    topology = basics.running().engine_topology
    members = [rank for rank in topology.hosts[topology.host] if rank in process_set.ranks]
    return members_set(members, process_set, "the ranks of a host")


def check_rounds(fragments: int, overlap: int = 0, within: object = None) -> None:
    """Raise ValueError if the state of an elastic job cannot hold an optimizer with such a policy."""
    if fragments > 1 or overlap:
        raise ValueError(
            "sync: with fragments= or overlap= the ranks never have equal parameters, so an elastic job has nothing to "
            "go back to. Remedy: leave them out in elastic jobs"
        )
    if within is not None:
        raise ValueError(
            "sync: within= needs process sets, which end when a rank is lost. Remedy: use LocalSGD or DiLoCo in "
            "elastic jobs"
        )


def _of_a_users_class(value: object) -> list[str]:
    """For an object of a user's class, the parts that must be the same on all ranks: public numbers, and its code."""
    classes = [each for each in type(value).__mro__[:-1] if each.__module__ != __name__]
    if not classes:
        return []
    known = {*_DEFAULTS, "every"}
    held = {name: its for name, its in vars(value).items() if isinstance(its, (int, float)) and name[0] != "_"}
    codes = [_checksum(its) for each in classes for its in vars(each).values() if hasattr(its, "__code__")]
    return [*(f"{name}={its}" for name, its in held.items() if name not in known), f"code {sum(codes) % 2**32:08x}"]


def _checksum(function: Any) -> int:
    code = getattr(function, "__code__", function)  # of a function within a function there is only the code
    constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts]
    parts = [_checksum(each) if hasattr(each, "co_code") else each for each in constants]
    return zlib.crc32(repr((code.co_code, code.co_names, parts)).encode())


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise ValueError(f"sync: {name}={value!r} must be a whole number, {least} or more")
    return operator.index(value)
