"""Futures whose callbacks run in the same order on every rank, so that they may call collectives.

PyTorch runs a callback in the thread that completes the future, or in the one that adds the callback if the future is
complete already. That is chance, so a collective within a callback would come at another place in the order of calls
on each rank. Here one thread of a group runs all callbacks of the script, in the order that they were added. A second
thread runs the callbacks that those add, and so on. Collectives that a callback calls are counted separately from the
script's, and collectives in a callback of that callback once more.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future as TorchFuture

__all__ = ["Completions", "Future", "depth"]


class _Here(threading.local):
    depth = 0  # of the class, where a look-up costs a tenth of one that fails in a thread


_here = _Here()


def depth() -> int:
    """How many callbacks this thread is in: 0 in the script."""
    return _here.depth


class Future(TorchFuture[Any]):
    """The future result of an operation or a callback.

    Args:
        make: waits for the value and gives it.
        completions: the thread that completes the future.
        devices: of CUDA tensors in the value, their device.
    """

    def __init__(self, make: Callable[[], Any], completions: Completions, devices: list[int | str | torch.device]):
        super().__init__(devices=devices)
        self._make, self._completions, self._devices = make, completions, devices
        self._completing = threading.Lock()
        completions.add(self)

    def complete(self) -> None:
        """Make the value, or wait until another thread has."""
        with self._completing:
            if self.done():
                return
            try:
                self.set_result(self._make())
            except Exception as problem:
                self._set_unwrap_func(_raise_problem)
                self.set_result(_Failed(problem))

    def wait(self) -> Any:
        """Wait for the value and give it. A callback may wait for a future that would be completed after it."""
        if depth():
            self.complete()
        return super().wait()

    def then(self, callback: Callable[[TorchFuture[Any]], Any]) -> Future:
        """A future of what the callback gives. It runs in the thread of this depth, after those added there before."""

        def make() -> Any:
            self.complete()
            return callback(self)

        return Future(make, self._completions, self._devices)

    def add_done_callback(self, callback: Callable[[TorchFuture[Any]], None]) -> None:
        """Run the callback as `then` does. An error of it is printed."""

        def run(future: TorchFuture[Any]) -> None:
            try:
                callback(future)
            except Exception:  # nobody can wait for this callback, so its error would be lost
                traceback.print_exc()

        self.then(run)


class _Failed:
    """The result of a future that has failed.

    DistributedDataParallel takes the tensors out of a result in C++, and does not ask whether it is an error. To do so
    PyTorch pickles the result, so an error raised while pickling reaches `backward()`. In the result of `set_exception`
    it finds no tensor, and crashes.
    """

    def __init__(self, problem: Exception):
        self.problem = problem

    def __reduce__(self) -> str:
        raise self.problem


def _raise_problem(failed: _Failed) -> None:
    raise failed.problem


class Completions:
    """Completes the futures of a group in the order of their creation, with one thread for each depth."""

    def __init__(self) -> None:
        self._levels: list[tuple[queue.SimpleQueue[Future | None], threading.Thread]] = []
        self._growing = threading.Lock()

    def add(self, future: Future) -> None:
        """Complete it after those that this depth has added before."""
        level = depth()
        with self._growing:
            while level >= len(self._levels):  # a callback of another group may be the first to call this one
                futures: queue.SimpleQueue[Future | None] = queue.SimpleQueue()
                arguments = (futures, len(self._levels) + 1)
                thread = threading.Thread(target=_run, args=arguments, name="horovodish callbacks", daemon=True)
                self._levels.append((futures, thread))
                thread.start()
            self._levels[level][0].put(future)

    def end(self, seconds: float) -> None:
        """Complete all that was added. What takes longer is completed later."""
        ends_at = time.monotonic() + seconds
        for futures, thread in self._levels:
            futures.put(None)
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends_at - time.monotonic()))
        self._levels.clear()


def _run(futures: queue.SimpleQueue[Future | None], level: int) -> None:
    _here.depth = level
    while (future := futures.get()) is not None:
        future.complete()
