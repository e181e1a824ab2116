"""The reduction of gradients where each rank keeps only its part."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from horovodish import _native
from horovodish._native import KINDS
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.errors import EngineStoppedError, MismatchError, RankLostError, StallError
from horovodish.gradients.autotune import Tuning
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.shard_sets import SameParts
from horovodish.runtime import basics
from horovodish.torch.gradients.phases import Phase
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.gradients.slot import Slot, members_of
from horovodish.torch.names import Names
from horovodish.torch.shards.pieces import Shards

__all__ = ["ShardedReducer"]

_ENDS_OF_WORLDS = {each.__name__ for each in (EngineStoppedError, RankLostError, StallError)}
"""A rank that raises one of these leaves the world, which ends what other ranks wait for."""


class ShardedReducer(Reducer):
    """Reduce-scatters gradients, and leaves in `p.grad` this rank's part.

    With shard="gradients" the part of a bucket is taken as soon as it is there, so that the memory of its gradients is
    free for those that the backward pass computes next.

    With `shard_set` a bucket is reduce-scattered within this rank's set. Then its parts are reduced in place across the
    sets, by a second plan, and only then taken.
    """

    _keeps_whole = False
    _joined_elsewhere = False  # a rank of another set, in the last reduction

    def __init__(self, parameters: Names, options: GradientOptions, shards: Shards):
        self._shards = shards
        self._members: list[list[int]] = []  # by bucket: the numbers of its slots
        self._taking = threading.Lock()  # several threads may call hooks
        self._across: ProcessSet | None = None
        self._same_parts = SameParts(options.shard_set, options.process_set)
        self._second: _native.BucketPlan | None = None  # across the sets
        super().__init__(parameters, options)

    def share_anew(self) -> None:
        """Cut parts for the ranks that there are now, if others have begun. The state of the parts is to be loaded.

        Every rank must do so at the same point.
        """
        if self._engine is not basics.engine():
            self._shards.forget()
            self.renew()

    def _is_alone(self) -> bool:
        return False  # a rank that is left alone goes on with the parts of all

    def _has_place(self, parameter: Tensor) -> bool:
        # The state of a frozen parameter's part is on this rank, so the parameter keeps its place.
        return parameter.requires_grad or parameter in self._shards.parameters()

    def _buckets(self, groups: list[int | None], threshold_mb: float) -> list[list[int]]:
        self._across = self._same_parts()
        buckets = self._shards.buckets(self._slots, groups, threshold_mb)
        # The engine lays the members of a bucket end to end in the order of the slots.
        places = iter(range(len(self._slots)))
        self._slots = [self._slots[index] for bucket in buckets for index in bucket]
        return [[next(places) for _ in bucket] for bucket in buckets]

    def _plan_of(
        self, buckets: list[list[int]], devices: list[int], engine: _native.Engine, tuning: Tuning
    ) -> _native.BucketPlan:
        self._members = buckets
        options = self._options
        self._shards.plan(self._name, self._slots, buckets, engine)
        members, last = members_of(self._slots, buckets), options.postscale_factor
        self._second = None
        if self._across is not None:
            ranges = [self._shards.range_of(slot.parameter) for slot in self._slots]
            parts: list[tuple[str, int, tuple[int, ...], int]] = [
                (name, code, (end - begin,), bucket)
                for (name, code, _, bucket), (begin, end) in zip(members, ranges, strict=True)
            ]
            name = f"parts of {self._name}"
            self._second = engine.plan(name, self._op, 1.0, last, parts, devices, checked_id(self._across))
            last = 1.0
        return engine.plan(
            self._name,
            self._op,
            options.prescale_factor,
            last,
            members,
            devices,
            checked_id(self._shards.process_set),
            chunk_bytes=int(tuning.chunk_kb * 1024),
            segment_bytes=int(tuning.ring_segment_kb * 1024),
            kind=KINDS["reducescatter"],
            ends=self._shards.ends,
        )

    def _hook(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        hand_over = super()._hook(index, slot)
        if self._options.shard != "gradients" and self._second is None:
            return hand_over

        def hand_over_and_take(parameter: Tensor) -> None:
            hand_over(parameter)
            if self._phase is Phase.SUBMITTING and self._taking.acquire(blocking=False):
                try:
                    self._take_arrived()
                finally:
                    self._taking.release()

        return hand_over_and_take

    @torch.no_grad()
    def _take_arrived(self) -> None:
        for bucket, members in enumerate(self._members):
            if bucket in self._travelling.taken:
                continue
            stream = self._stream_of(members[0])
            if self._second is not None and bucket not in self._travelling.sent and self._first.arrived(bucket, stream):
                self._send_across(bucket, set())
            if (self._second or self._first).arrived(bucket, stream):
                self._take(bucket, set())

    @property
    def _first(self) -> _native.BucketPlan:
        assert self._plan is not None
        return self._plan

    def _send_across(self, bucket: int, nowhere: set[int]) -> None:
        """Hand over this rank's parts of a bucket that its set has reduced. They lie in what has travelled."""
        assert self._second is not None
        travelling = self._travelling
        travelling.sent.add(bucket)
        for index in self._members[bucket]:
            changed = travelling.payloads.get(index) or travelling.absent.get(index)
            tensor = changed[0] if changed else travelling.gradients[index]
            begin, _ = self._shards.range_of(self._slots[index].parameter)
            address = tensor.data_ptr() + begin * tensor.element_size()
            hand_over = self._second.absent if index in nowhere else self._second.submit
            hand_over(index, address, address, self._stream_of(index))

    def _await_results(self, plan: _native.BucketPlan) -> tuple[tuple[str, str] | None, set[int]]:
        error, nowhere = super()._await_results(plan)
        second = self._second
        if second is None:
            return error, nowhere
        left = [bucket for bucket in range(len(self._members)) if bucket not in self._travelling.sent]
        if error is not None:
            assert self._across is not None
            # Other sets wait for these parts. Parts that were sent may stay under way, so all sets make another plan.
            for bucket in left if error[0] not in _ENDS_OF_WORLDS else ():
                name = f"parts of {self._name}, bucket {bucket}"
                basics.engine().refuse(KINDS["allreduce"], name, checked_id(self._across), error[1])
            self._travelling.keep(second)
            self._outdated = True
            return error, nowhere
        for bucket in left:
            self._send_across(bucket, nowhere)
        error, nowhere = super()._await_results(second)
        if error is not None:
            self._travelling.keep(second)
            self._outdated = True
        self._joined_elsewhere = second.any_joined()
        second.reset()
        return error, nowhere

    def _take(self, bucket: int, nowhere: set[int]) -> None:
        travelling = self._travelling
        travelling.taken.add(bucket)
        for index in self._members[bucket]:
            slot = self._slots[index]
            self._put_back_one(index, nowhere)
            # Nobody else holds the whole gradient, so its memory is free when this rank's part is taken.
            for held in (travelling.gradients, travelling.payloads, travelling.absent):
                held.pop(index, None)
            if slot.parameter.grad is not None and index not in nowhere:
                self._shards.take(slot)
                travelling.gradients[index] = slot.parameter.grad  # it has been submitted

    def _keep_what_travels(self) -> None:
        super()._keep_what_travels()
        if self._second is not None:
            self._travelling.keep(self._second)

    def _needs_another_plan(self) -> bool:
        self._shards.leave()  # a step may have raised
        return super()._needs_another_plan()

    def _check_sparse(self, names: list[str]) -> None:
        raise ValueError(
            f"the gradient of {names[0]} is sparse, which shard= does not take. Remedy: sparse_as_dense=True, or "
            "leave shard= out"
        )

    def _problem(self, plan: _native.BucketPlan) -> Exception | None:
        if not (plan.any_joined() or self._joined_elsewhere):
            return None
        return MismatchError(
            f"{self._name}: a rank has called join(), and its part of the parameters would not be stepped. Remedy: "
            "with shard=, give every rank equally many batches"
        )

    @torch.no_grad()
    def _put_back(self, nowhere: set[int]) -> None:
        for bucket in range(len(self._members)):
            if bucket not in self._travelling.taken:
                self._take(bucket, nowhere)
        super()._put_back(nowhere)
