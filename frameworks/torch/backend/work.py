"""An operation of a process group under way, as PyTorch sees it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle, cancel
from horovodish.errors import HorovodInternalError, StallError
from horovodish.torch.backend.futures import Completions, Future

__all__ = ["Transfer", "Work"]

_GRACE_SECONDS = 3.0
"""The engine watches the timeout of a group, and its error names the ranks that are waited for."""


class Work(TorchWork):
    """The result of an asynchronous call.

    Args:
        handle: of the operation; its result is the tensors.
        call: what messages name by its text.
        timeout: how long `wait` waits when it is not told.
        completions: completes futures.
        devices: the GPU of the tensors; empty for host memory.
    """

    def __init__(
        self,
        handle: Handle[Any],
        call: object,
        timeout: timedelta,
        completions: Completions,
        devices: list[int | str | torch.device],
    ):
        super().__init__()
        self._handle, self._call = handle, call
        self._timeout, self._completions, self._devices = timeout, completions, devices
        self._future: Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result; of CUDA tensors, until the current stream waits for it.

        Raises:
            StallError: the operation took longer than `timeout`, or the group's time.
            HorovodInternalError: as every operation.
        """
        if not self._handle.settles_within(WAIT_SLICE_SECONDS):
            limit = timeout or self._timeout
            grace = 0.0 if timeout else _GRACE_SECONDS
            ends_at = time.monotonic() + limit.total_seconds() + grace - WAIT_SLICE_SECONDS
            while not self._handle.settles_within(WAIT_SLICE_SECONDS):
                if time.monotonic() >= ends_at:
                    cancel(self._handle)  # a receive must not take what a later one waits for
                    raise StallError(f"{self._call} has taken longer than its timeout of {limit}")
        self._finished()
        return True

    def _finished(self) -> list[Tensor]:
        """The tensors of an operation that has ended."""
        try:
            return self._value()
        except HorovodInternalError as problem:
            # The engine doesn't know the number of a call.
            text = re.sub(r"^(a call of|receive from|send to) .*? failed", "failed", str(problem))
            if isinstance(problem, StallError):
                remedy = "\nRemedy: make the same calls on all ranks of the group, or give it a longer timeout"
                text = f"with a timeout of {self._timeout} {text}{remedy}"
            separator = " " if text.startswith(("failed", "with")) else ": "
            raise type(problem)(f"{self._call}{separator}{text}") from None

    def _value(self) -> list[Tensor]:
        tensors: list[Tensor] = self._handle.wait()
        return tensors

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended. If so, the tensors hold its result."""
        if not self._handle.settles_within(0.0):
            return False
        with suppress(Exception):  # `wait` and `exception` raise and give it
            self._finished()
        return True

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error that has ended it."""
        if not self.is_completed():
            return None
        try:
            self._finished()
        except Exception as problem:
            return problem
        return None

    def result(self) -> list[Tensor]:
        """The tensors, once the operation has ended."""
        self.wait()
        return self._finished()

    def get_future(self) -> Future:
        """A future that ends with the operation. Its value is the tensors."""
        if self._future is None:
            self._future = Future(self._settled, self._completions, self._devices)
        return self._future

    def _settled(self) -> list[Tensor]:
        while not self._handle.settles_within(WAIT_SLICE_SECONDS):
            pass
        return self._finished()


class Transfer(Work):
    """The result of a send or a receive.

    Args:
        handle: of the operation; its result is the other rank of the world.
        call, timeout, completions: as for `Work`.
        tensors: that travel.
        ranks: of the world, by rank within the group.
    """

    def __init__(
        self,
        handle: Handle[int],
        call: object,
        timeout: timedelta,
        completions: Completions,
        tensors: list[Tensor],
        ranks: Sequence[int],
    ):
        super().__init__(handle, call, timeout, completions, [each.device for each in tensors if each.is_cuda])
        self._tensors, self._ranks = tensors, ranks

    def _value(self) -> list[Tensor]:
        self._handle.wait()
        return self._tensors

    def source_rank(self) -> int:
        """The rank of the group that has sent."""
        self.wait()
        return self._ranks.index(self._handle.wait())

    _source_rank = source_rank
