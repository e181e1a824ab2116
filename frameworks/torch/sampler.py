"""Which samples a rank trains on: every sample of the data set once per epoch, and no more after a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from horovodish.collectives.process_sets import ProcessSet, global_process_set

__all__ = ["ResumableSampler"]


class ResumableSampler(Sampler[int]):
    """Deals the samples of an epoch out to the ranks, each sample to one rank, and can go on in the middle of an epoch.

    torch's own `DistributedSampler` repeats or drops samples so that every rank has equally many. This one does
    neither: if the rest of the epoch is not a multiple of the number of ranks, the first ranks get one sample more. A
    rank that runs out of batches before the others calls `hvd.join()`; see the example.

    The ranks do not communicate for it. A checkpoint may be resumed with another number of ranks.

    Args:
        dataset: anything with a length; the same on every rank.
        shuffle: whether each epoch has an order of its own, the same on every rank.
        seed: of the order; the same on every rank.
        process_set: the ranks that share the epoch.

    Raises:
        ValueError: `process_set` is not in use, or this rank is outside it.
        NotInitializedError: before `init()`.

    Example:
        >>> sampler = hvd.ResumableSampler(dataset, seed=7)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> for epoch in range(start_epoch, epochs):
        ...     sampler.set_epoch(epoch)
        ...     for inputs, labels in loader:
        ...         train(inputs, labels)
        ...         sampler.record(len(inputs))
        ...     last = hvd.join()  # the other ranks lack its last step
        ...     hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        ...     hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, process_set: ProcessSet = global_process_set
    ):
        self._length = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._process_set = process_set
        self._rank = process_set.rank()
        self._ranks = process_set.size()
        self._epoch = 0
        self._done_before = 0  # samples of this epoch that all ranks together were through with when it was resumed
        self._recorded = 0  # samples of this rank since then
        self._largest = 0  # samples of a batch since then, or since the epoch began
        self._all_are_through = False  # all ranks, with this epoch
        self._exhausted = False  # the last pass has asked for all samples
        self._open_passes: set[object] = set()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with its order and all its samples. A resumed epoch goes on where it was.

        Without this call, every pass uses the order of the same epoch. The pass after a resumed one has all samples.

        Args:
            epoch: its number, the same on every rank.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._done_before = self._recorded = self._largest = 0
        self._exhausted = self._all_are_through = False

    def record(self, samples: int) -> None:
        """Record that this rank has trained on these samples. Without it, a checkpoint starts the epoch again.

        A data loader asks the sampler for samples ahead of time, so the sampler cannot know it by itself.

        Args:
            samples: of the batch that was trained on.
        """
        self._largest = max(self._largest, samples)
        self._take(samples, self._largest)

    def _take(self, samples: int, batch_size: int) -> None:
        # The ranks' samples differ by one at most, so that this batch was the last one on all of them.
        self._all_are_through = self._all_are_through or batch_size > self.left
        self._recorded += samples

    def state_dict(self) -> dict[str, Any]:
        """The progress of the epoch, for a checkpoint. Save it on any one rank, after the same number of steps on all.

        With `wait_for=`, a late rank has recorded fewer samples. The samples that it had not come to are then skipped.
        """
        done = min(self._done_before + self._recorded * self._ranks, self._length)
        if self._all_are_through:
            done = self._length
        return {"epoch": self._epoch, "done": done, "seed": self._seed, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was taken, with as many ranks as there are now. Every rank must load the same.

        Args:
            state: the result of `state_dict()`.

        Raises:
            ValueError: it was taken with a data set of another length.
        """
        if state["length"] != self._length:
            raise ValueError(
                f"the sampler's checkpoint is of a data set of {state['length']} samples, but this one has "
                f"{self._length}: resume with the same data, or leave the sampler's state out to start an epoch"
            )
        self._epoch, self._done_before, self._seed = state["epoch"], state["done"], state["seed"]
        self._rank, self._ranks = self._process_set.rank(), self._process_set.size()
        self._recorded = self._largest = 0
        self._exhausted = self._all_are_through = False
        self._open_passes = set()  # one that an error has ended may be open until its garbage is collected

    def reset(self) -> None:
        """Deal the rest of the epoch out to the ranks of the last `init()`.

        Every rank must call it after the same number of steps.

        Raises:
            ValueError: `process_set` is not in use, or this rank is outside it.
        """
        self.load_state_dict(self.state_dict())

    @property
    def left(self) -> int:
        """How many samples of the epoch this rank has not recorded."""
        return len(range(self._done_before + self._rank, self._length, self._ranks)) - self._recorded

    def __iter__(self) -> Iterator[int]:
        is_look = bool(self._open_passes)  # at a sample, in the middle of the pass that counts
        if not is_look and (self._exhausted or self._recorded):  # a loop without set_epoch begins its next pass
            self._begin_anew()
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._length, generator=generator, device="cpu").tolist()
        else:
            order = list(range(self._length))
        open_passes, this = self._open_passes, object()
        open_passes.add(this)
        try:
            yield from order[self._done_before + self._rank :: self._ranks]
        finally:
            open_passes.discard(this)
        self._exhausted = self._exhausted or not is_look

    def __len__(self) -> int:
        left = self.left + self._recorded
        # A loader with workers asks for all samples before the last is recorded.
        at_its_end = self._recorded >= max(left, 1) if self._recorded else self._exhausted
        return len(range(self._rank, self._length, self._ranks)) if at_its_end else left
