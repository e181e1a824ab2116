"""PyTorch's CUDA tensors: on pretended GPUs everywhere, and the same on a GPU where there is one."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import horovodish as hvd
from support.gpu import needs_gpu
from support.pretended_gpu import variables
from support.processes import all_pids, meet, wait_until_ended
from support.ranks import run_ranks, run_ranks_to_their_ends
from support.torch_on_gpu import (
    Place,
    every_collective,
    gradients,
    side_streams,
    training,
    what_is_refused,
    where_codecs_are_made,
)

SHARED = {"HOROVODISH_TEST_SHARED_GPU": "1"}
KNOWN_WITHIN_SECONDS = 10.0


def all_checks(real: bool) -> None:
    import torch

    import horovodish.torch as hvd_torch
    from horovodish.torch.gradients import GRADIENTS

    hvd.init()
    with Place(real) as place:
        every_collective(place)
        gradients(place)
        side_streams(place)
        training(place)
        training(place, compression=hvd_torch.Compression.auto(where=lambda name, shape: True))
        where_codecs_are_made(place)
        what_is_refused(place)
        on_host = torch.ones(1)
        assert GRADIENTS.on_gpu([on_host, place.put(np.ones(1))])  # so that Keras has a GPU's buckets
        assert not GRADIENTS.on_gpu([on_host])


@pytest.mark.parametrize("np", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_pretended_gpus(np: int) -> None:
    run_ranks(all_checks, np, args=(False,), env=variables(np, HOROVODISH_PLANE="nccl"))


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2])
def test_a_gpu(np: int) -> None:
    needs_gpu()
    run_ranks(all_checks, np, args=(True,), env={**SHARED, "HOROVODISH_PLANE": "nccl"})


def share_a_gpu() -> str:
    import torch

    import horovodish.torch as hvd_torch

    hvd.init()
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd_torch.allreduce(torch.ones(3, device="cuda:0"))
    return str(raised.value)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_are_told_so() -> None:
    needs_gpu()
    for text in run_ranks(share_a_gpu, 2, fresh=True):  # that have not been told to share it
        assert "rank 0 and rank 1 both use GPU 0 (" in text


def lose_a_rank() -> tuple[str, float]:
    import torch

    import horovodish.torch as hvd_torch

    hvd.init()
    pids = all_pids()
    tensor = torch.ones(10_000_000, device="cuda:0")
    hvd_torch.allreduce(tensor, name="works")
    torch.cuda.synchronize()
    meet()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[1])
    begin = time.monotonic()
    with pytest.raises(hvd.RankLostError) as raised:
        hvd_torch.allreduce(tensor, name="afterwards")
    torch.cuda.synchronize()
    return str(raised.value), time.monotonic() - begin


def lose_a_rank_in_a_kernel() -> tuple[str, float]:
    """The other's kernel is launched and never ends; this one's must be ended."""
    import torch

    import horovodish.torch as hvd_torch

    hvd.init()
    pids = all_pids()
    tensor = torch.ones(1_000_000, device="cuda:0")
    hvd_torch.allreduce(tensor, name="works")
    torch.cuda.synchronize()
    if hvd.rank() == 1:
        torch.cuda._sleep(10**11)  # the input of its part comes in a minute
    hvd_torch.allreduce(tensor, name="interrupted")
    meet()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[1])
    begin = time.monotonic()
    torch.cuda.synchronize()
    with pytest.raises(hvd.RankLostError) as raised:
        hvd_torch.allreduce(tensor, name="afterwards")
    return str(raised.value), time.monotonic() - begin


@pytest.mark.gpu
@pytest.mark.parametrize("function", [lose_a_rank, lose_a_rank_in_a_kernel])
def test_a_lost_rank(function: object) -> None:
    needs_gpu()
    outcomes = run_ranks_to_their_ends(function, 2, env=SHARED)  # type: ignore[arg-type]
    assert [outcome.ended for outcome in outcomes] == ["returned", "died"], outcomes
    text, seconds = outcomes[0].result
    assert "rank 1 has died" in text
    assert seconds < KNOWN_WITHIN_SECONDS


def mixed_step() -> None:
    import torch

    import horovodish.torch as hvd_torch

    hvd.init()
    for step in range(5):
        on_gpu = hvd_torch.allreduce_async(torch.full((1000,), float(step), device="cuda:0"), op=hvd.Sum, name="gpu")
        on_host = hvd_torch.allreduce_async(torch.full((1000,), float(step)), op=hvd.Sum, name="host")
        expected = np.full(1000, step * hvd.size())
        np.testing.assert_array_equal(hvd_torch.synchronize(on_gpu).cpu().numpy(), expected)
        np.testing.assert_array_equal(hvd_torch.synchronize(on_host).numpy(), expected)


@pytest.mark.gpu
def test_gpu_and_host_memory_in_one_step() -> None:
    needs_gpu()
    run_ranks(mixed_step, 2, env=SHARED)
