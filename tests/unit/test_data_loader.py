"""The data loader of `horovod.data` that reads ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from horovodish.as_horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def __init__(self, problem: BaseException) -> None:
        super().__init__()
        self._problem = problem

    def _iterate(self) -> Iterator[int]:
        yield 1
        raise self._problem


@pytest.mark.parametrize("problem", [ValueError("in the dataset"), SystemExit(3)], ids=repr)
def test_the_loop_raises_what_the_thread_raises(problem: BaseException) -> None:
    found: list[int | BaseException] = []

    def read() -> None:
        try:
            for batch in Loader(problem):
                found.append(batch)
        except BaseException as raised:
            found.append(raised)

    loop = threading.Thread(target=read, daemon=True)
    loop.start()
    loop.join(timeout=60)
    assert found == [1, problem]
