"""Parameters that meet at the same steps: where their rounds are, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from horovodish import _native
from horovodish.collectives.consistency import Checksums
from horovodish.collectives.devices import HOST
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle
from horovodish.errors import from_native
from horovodish.gradients.layouts import Comparison
from horovodish.torch.gradients.slot import Slot


@dataclass
class Place:
    """Where one parameter is in its round.

    Attributes:
        start: its value when the round began; None: no round has begun.
        memory: what the policy remembers of it.
        sent: its value when its change was taken, where steps go on meanwhile.
        change: the reduced change, which waits for the step that it is due after.
        lands_after: the number of the step after which its change takes effect; None: nothing is under way.
    """

    start: Tensor | None = None
    memory: tuple[Tensor, ...] | None = None
    sent: Tensor | None = None
    change: Tensor | None = None
    lands_after: int | None = None


@dataclass
class Fragment:
    """Parameters that meet after the same steps.

    Attributes:
        number: identifies it to the policy.
        name: of its plan.
        plan: reduces its changes; None: this is the only rank.
        streams: of each slot, what gives the stream of its device; None: it is in host memory.
        travelling: what was given to the plan, and the contexts of its compression. The engine has this memory.
        submitted: how many of these were.
    """

    number: int
    name: str
    slots: list[Slot]
    places: list[Place]
    plan: _native.BucketPlan | None
    stream: Callable[[], int] | None
    travelling: list[tuple[Tensor, Any]] = field(default_factory=list)
    submitted: int = 0
    comparison: Handle[Comparison] | None = None
    checksums: Checksums = field(default_factory=dict)
    is_compared: bool = False
    step: int = 0

    @property
    def lands_after(self) -> int | None:
        """As `lands_after` of its places, which have all the same one."""
        return self.places[0].lands_after

    def under_way(self, lands_after: int | None) -> None:
        """Say after which step its changes take effect."""
        for place in self.places:
            place.lands_after = lands_after

    def members(self) -> Iterator[tuple[Slot, Place]]:
        """Its parameters, and where they are in their round."""
        return zip(self.slots, self.places, strict=True)

    def has_begun(self) -> bool:
        """Whether a round has begun and nothing was sent in it yet."""
        return self.lands_after is None and any(place.start is not None for place in self.places)

    def take(self, changes: list[Tensor]) -> None:
        """Prepare the changes for sending. If one of them cannot be sent, none is."""
        self.travelling = [slot.payload(change) for slot, change in zip(self.slots, changes, strict=True)]
        self.submitted = 0

    def submit(self) -> None:
        """Give to the plan what it has not got. Collective; does not block."""
        if self.plan is None:
            return
        for index, (payload, _) in enumerate(self.travelling[self.submitted :], self.submitted):
            stream = self.stream() if self.stream is not None and self.slots[index].device != HOST else 0
            self.plan.submit(index, payload.data_ptr(), payload.data_ptr(), stream)
            self.submitted += 1

    def arrived(self) -> list[Tensor]:
        """Wait for what the plan reduces, and return it. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction has failed, and its memory is the plan's.
        """
        self.submit()
        travelling = self.travelling
        if self.plan is not None:
            self._wait(self.plan)
        self.travelling = []
        return [slot.gradient(*each) for slot, each in zip(self.slots, travelling, strict=True)]

    def _wait(self, plan: _native.BucketPlan) -> None:
        while not plan.wait(WAIT_SLICE_SECONDS):
            pass
        if self.stream is not None:
            plan.order_after(self.stream())
        error = plan.error()
        if error is not None:
            self.keep()
        plan.reset()
        if error is not None:
            raise from_native(*error)

    def keep(self) -> None:
        """Leave to the plan what travels: nobody waits for it any more."""
        if self.travelling and self.plan is not None:
            self.plan.keep(self.travelling)
        self.travelling = []
