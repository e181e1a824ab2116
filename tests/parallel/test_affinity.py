"""The cores that the user chooses for the threads of the engine."""

from __future__ import annotations

import os

import numpy as np
import pytest

import horovodish as hvd
from horovodish.runtime.affinity import core_of
from horovodish.runtime.topology import Topology
from support.pretended_gpu import Gpu, variables
from support.ranks import run_ranks
from support.threads import engine_thread, thread_names

TWO_ON_A_HOST = Topology(1, ((0, 1), (2,)))


def cores_of_threads() -> tuple[set[int], set[int]]:
    """The cores of the engine's own thread, and the cores of this one."""
    hvd.init()
    return os.sched_getaffinity(engine_thread()), os.sched_getaffinity(0)


def test_each_local_rank_has_its_core() -> None:
    usable = os.sched_getaffinity(0)
    first, second = max(usable), min(usable)
    results = run_ranks(cores_of_threads, 2, env={"HOROVODISH_THREAD_AFFINITY": f"{first},{second}"})
    assert results == [({first}, usable), ({second}, usable)]


def cores_of_nccls_threads() -> dict[str, set[int]]:
    """The cores of NCCL's threads. The engine's thread has started all of them, because no waiting thread drives it."""
    hvd.init()
    gpu = Gpu()
    values = np.ones(3)
    handle = gpu.submit("allreduce", [values], [values], "alone", op=hvd.Sum)
    while not handle.poll():
        os.sched_yield()
    of_nccl = {thread: name for thread, name in thread_names().items() if name.startswith("nccl-")}
    return {name: os.sched_getaffinity(thread) for thread, name in of_nccl.items()}


def test_threads_of_nccl_run_on_any_core() -> None:
    usable = os.sched_getaffinity(0)
    env = variables(2, HOROVODISH_THREAD_AFFINITY=f"{max(usable)},{min(usable)}")
    every = {"nccl-root": usable, "nccl-proxy": usable, "nccl-launch": usable}
    first, second = run_ranks(cores_of_nccls_threads, 2, env=env)
    assert first == every
    assert second == {name: every[name] for name in ("nccl-proxy", "nccl-launch")}


def test_without_the_setting_nothing_touches_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """To set it to what it was would pin threads that may run on cores that come later."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("the affinity was set"))
    hvd.init()
    hvd.shutdown()


def test_no_core_is_chosen_for_ranks_without_threads_or_without_the_setting() -> None:
    assert core_of(TWO_ON_A_HOST, "") is None
    assert core_of(Topology(0, ((0,),)), "0") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "HOROVODISH_THREAD_AFFINITY='0' is not accepted: it is the numbers of 2 cores, one for each rank of a"),
        ("0,x", "it is the numbers of 2 cores"),
        ("0,99999", "gives core 99999 to rank 1, which may use "),
    ],
)
def test_cores_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(hvd.SettingError, match=message):
        core_of(TWO_ON_A_HOST, text)
