"""What scripts import from `horovod.runner`: `run`, and functions that start threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovodish.launch.run_function import run

__all__ = ["execute_function_multithreaded", "in_thread", "on_event", "run"]


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls `target(*args)`, and returns it. `silent` drops what `target` raises."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, such as (value,), not {type(args).__name__}")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls `func(*args)` once `event` is set, and returns it. It ends when `stop` is set."""
    if stop is None and not daemon:
        raise ValueError("a thread that is no daemon needs stop, an event that ends it")

    def wait_and_call() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Iterable[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls `fn(*args)` for each entry of `args_list` in threads.

    Returns:
        The results by the index of their arguments; None, and at once, unless `block_until_all_done`.
    """
    calls = [tuple(args) for args in args_list]
    workers = ThreadPoolExecutor(max(1, min(max_concurrent_executions, len(calls))))
    futures = [workers.submit(fn, *args) for args in calls]
    workers.shutdown(wait=block_until_all_done)
    return {index: future.result() for index, future in enumerate(futures)} if block_until_all_done else None
