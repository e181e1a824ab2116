"""What scripts import from `horovod.data`: a data loader, and one that reads ahead in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """Iterates over batches. A subclass defines `_iterate` and `__len__`, and may define `_process_batch`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Changes a batch before the loop gets it."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        return map(self._process_batch, self._iterate())


class _Reader:
    """A thread that reads one epoch ahead of the loop."""

    def __init__(self, batches: Iterator[Any], length: int):
        self._read: queue.Queue[tuple[bool, Any]] = queue.Queue(length)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches,), daemon=True)
        self._thread.start()

    def _run(self, batches: Iterator[Any]) -> None:
        try:
            for batch in batches:
                if self._closed.is_set():
                    return
                self._read.put((True, batch))
            self._read.put((False, None))
        except BaseException as problem:  # SystemExit, too: the loop raises it instead of waiting for ever
            self._read.put((False, problem))

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_batch, value = self._read.get()
            if is_batch:
                yield value
            elif value is None:
                return
            else:
                raise value

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._read.get(timeout=0.01)  # the thread may wait for room


class AsyncDataLoaderMixin:
    """Reads the batches of a `BaseDataLoader` ahead, in a thread: `class Loader(AsyncDataLoaderMixin, BaseLoader)`.

    Args:
        async_loader_queue_size: how many batches are read ahead; 0 reads none ahead.
        debug_data_loader: taken because Horovod takes it; it changes nothing.
        args, kwargs: for the loader's own class.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._reader: _Reader | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread. What it has read ahead is lost."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        self._reader = _Reader(loader._iterate(), self.async_loader_queue_size)
        yield from map(loader._process_batch, self._reader)
