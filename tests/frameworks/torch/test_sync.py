"""`DistributedOptimizer(sync=...)`: ranks that take steps of their own, and meet."""

from __future__ import annotations

import copy
import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from horovodish.gradients.sync import fragments_of
from support.documents import python_blocks
from support.leaves import backward, leaf, own, wrapped
from support.on_ranks import on_ranks
from support.rounds import Played, digits_model, gradients_of, values_of

STEPS = 11
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SIZES = [parameter.nbytes for parameter in digits_model().parameters()]


def shifts(every: int, fragments: int) -> list[int]:
    return [number * every // fragments for number in fragments_of(SIZES, fragments)]


POLICIES: dict[str, tuple[Callable[[], hvd.Sync], dict[str, Any]]] = {
    "every 1": (lambda: hvd.LocalSGD(1), {"every": 1}),
    "every 3": (lambda: hvd.LocalSGD(3), {"every": 3}),
    "after 4": (lambda: hvd.LocalSGD(every=3, after=4), {"every": 3, "after": 4}),
    "DiLoCo": (lambda: hvd.DiLoCo(4), {"every": 4, "outer": OUTER}),
    "DiLoCo with momentum": (
        lambda: hvd.DiLoCo(2, hvd.OuterSGD(lr=0.5, momentum=0.5, nesterov=False)),
        {"every": 2, "outer": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)},
    ),
    "fragments after 2": (
        lambda: hvd.DiLoCo(4, after=2, fragments=3),
        {"every": 4, "after": 2, "outer": OUTER, "shifts": shifts(4, 3)},
    ),
    "overlap": (
        lambda: hvd.DiLoCo(4, fragments=2, overlap=3),
        {"every": 4, "outer": OUTER, "shifts": shifts(4, 2), "overlap": 3},
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def trained(optimizer: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients_of(model, step, hvd.rank())
        optimizer.step()


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", POLICIES)
def test_against_the_definition(name: str, kind: str) -> None:
    """Each rank plays all ranks, and finds its own parameters after every step."""
    make_policy, played_policy = POLICIES[name]
    make, model = OPTIMIZERS[kind], digits_model()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), sync=make_policy())
    models = [digits_model() for _ in range(hvd.size())]
    played = Played(models, [make(one.parameters()) for one in models], **played_policy)
    for step in range(STEPS):
        trained(optimizer, model, range(step, step + 1))
        played.step(lambda one, rank, step=step: gradients_of(one, step, rank))  # type: ignore[misc]
        for parameter, expected in zip(model.parameters(), models[hvd.rank()].parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


@on_ranks(4)
@pytest.mark.parametrize("adasum", [False, True])
def test_sets_that_step_alike(adasum: bool) -> None:
    teams = [[0, 1], [2, 3]]
    sets = [horovodish.add_process_set(team) for team in teams]
    own_set = sets[hvd.rank() // 2]
    make, model = OPTIMIZERS["SGD"], digits_model()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        sync=hvd.Hierarchical(own_set, every=3),
        op=hvd.Adasum if adasum else hvd.Average,
    )
    models = [digits_model() for _ in range(hvd.size())]
    played = Played(models, [make(one.parameters()) for one in models], every=3, teams=teams)
    for step in range(6):
        trained(optimizer, model, range(step, step + 1))
        played.step(lambda one, rank, step=step: gradients_of(one, step, rank))  # type: ignore[misc]
        apart = {str(values_of(model))} | set(map(str, hvd.allgather_object(values_of(model))))
        assert len(apart) == (1 if step % 3 == 2 else 2)
        for parameter, expected in zip(model.parameters(), models[hvd.rank()].parameters(), strict=True):
            if not adasum:
                torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
    for each in sets:
        horovodish.remove_process_set(each)


@on_ranks((3, "mpi_ring"), 2)
def test_hosts_that_step_alike() -> None:
    """Where each rank is a host, it steps alone; where all are one host, they step alike."""
    p = leaf()
    optimizer = wrapped([p], sync=hvd.Hierarchical("host", every=2))
    backward([p], own())
    optimizer.step()
    alone = len(set(hvd.allgather_object(p[0].item()))) > 1
    assert alone == (hvd.size() == 3)
    optimizer.zero_grad()
    backward([p], own(1))
    optimizer.step()
    expected = -sum(2.0 ** (rank + 2 * step) for rank in range(hvd.size()) for step in (0, 1)) / hvd.size()
    torch.testing.assert_close(p.detach(), torch.full((3,), expected))


@on_ranks(3, (2, "mpi_ring"))
def test_meetings_are_counted_by_steps() -> None:
    """pytorch#74157: an averager was called for each parameter group, and its parameters were an iterator."""
    p, q, r = leaf(), leaf(), leaf()
    groups = [{"params": [each], "lr": 1.0} for each in (p, q, r)]
    named = iter([("p", p), ("q", q), ("r", r)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups), named, sync=hvd.LocalSGD(every=3, after=2))
    equal = []
    for step in range(12):
        optimizer.zero_grad()
        backward([p, q, r], own())
        optimizer.step()
        values = hvd.allgather_object([each[0].item() for each in (p, q, r)])
        assert all(len({*of_rank}) == 1 for of_rank in values)
        if len({*map(tuple, values)}) == 1:
            equal.append(step + 1)
    assert equal == [1, 2, 5, 8, 11]


@on_ranks(3, (2, "mpi_ring"))
def test_rounds_of_one_step_are_synchronous_training() -> None:
    models = [digits_model(), digits_model(), digits_model()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model.named_parameters(), sync=sync)
        for model, sync in zip(models, (None, hvd.LocalSGD(1), hvd.LocalSGD(8, after=20)), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(optimizer, model, range(20))
    for synchronous, one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, synchronous, rtol=1e-5, atol=1e-6)
        assert torch.equal(other, synchronous)


SYNCS: dict[str, Callable[[], hvd.Sync]] = {
    "LocalSGD": lambda: hvd.LocalSGD(3),
    "after": lambda: hvd.LocalSGD(3, after=2),
    "DiLoCo": lambda: hvd.DiLoCo(4, fragments=2, overlap=2),
    "int8": lambda: hvd.DiLoCo(2, compression=hvd.Compression.int8),
}


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("name", SYNCS)
def test_looking_changes_nothing(name: str) -> None:
    models = [digits_model(), digits_model()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), sync=SYNCS[name]())
        for model in models
    ]
    for step in range(9):
        for model, optimizer in zip(models, optimizers, strict=True):
            trained(optimizer, model, range(step, step + 1))
        with optimizers[0].synchronized():
            shown = values_of(models[0])
            assert hvd.allgather_object(shown) == [shown] * hvd.size()
            with pytest.raises(RuntimeError, match=r"step\(\) within synchronized\(\)"):
                optimizers[0].step()
            with pytest.raises(RuntimeError, match=r"load_state_dict\(\) within synchronized\(\)"):
                optimizers[0].load_state_dict(optimizers[0].state_dict())
        assert values_of(models[0]) == values_of(models[1])
    with pytest.raises(ZeroDivisionError), optimizers[0].synchronized():
        raise ZeroDivisionError
    assert values_of(models[0]) == values_of(models[1])


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("name", SYNCS)
def test_a_checkpoint_within_a_round_goes_on_bit_by_bit(name: str) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = digits_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=SYNCS[name]())

    model, optimizer = made()
    saved = []
    for step in range(STEPS):
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        trained(optimizer, model, range(step, step + 1))
    for step in range(0, STEPS, 1 if name != "int8" else 2):  # what codes left out is not in a checkpoint
        other, its = made()
        other.load_state_dict(saved[step][0])
        its.load_state_dict(saved[step][1])
        trained(its, other, range(step, STEPS))
        if name != "int8":
            assert values_of(other) == values_of(model), step
        hvd.barrier()
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    its.load_state_dict(plain.state_dict())
    assert its.state_dict()["sync"]["steps"] == 0


@on_ranks(3, (2, "mpi_ring"))
def test_a_round_may_end_early() -> None:
    p = leaf()
    optimizer = wrapped([p], sync=hvd.LocalSGD(every=100))
    for ends in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            backward([p], own())
            optimizer.step()
        optimizer.end_round()
        optimizer.end_round()
        mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
        torch.testing.assert_close(p.detach(), torch.full((3,), -2 * (ends + 1) * mean))


class Damped(hvd.Sync):
    """A policy of a user's own."""

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return start + 0.5 * change, memory

    def is_due(self, step: Any, fragment: int = 0) -> Any:
        return step in (1, 4)


@on_ranks(3, (2, "mpi_ring"))
def test_a_policy_of_ones_own() -> None:
    p = leaf()
    optimizer = wrapped([p], sync=Damped(every=2))
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        backward([p], 1.0)
        optimizer.step()
        found.append(p[0].item())
    assert found == [-0.5, -1.5, -2.5, -2.0]


@on_ranks(3, (2, "mpi_ring"))
def test_parameters_that_come_and_go() -> None:
    p, q, r = leaf(), leaf(), leaf()
    q.requires_grad_(False)
    optimizer = wrapped([p, q], sync=hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), fragments=2, overlap=1))
    for step in range(9):
        if step == 2:
            q.requires_grad_(True)
        if step == 5:
            optimizer.add_param_group({"params": [r], "lr": 2.0})
        optimizer.zero_grad()
        backward([p] + [q] * (step >= 2) + [r] * (step >= 5), own())
        optimizer.step()
    optimizer.end_round()
    mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    assert [each[0].item() / mean for each in (p, q, r)] == pytest.approx([-9.0, -7.0, -8.0])


@on_ranks(3, (2, "mpi_ring"))
def test_clipping_and_scaling_are_each_ranks_own() -> None:
    p = leaf()
    optimizer = wrapped([p], sync=hvd.LocalSGD(every=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        infinite = hvd.rank() == 0
        scaler.scale((p * (float("inf") if infinite else 3.0)).sum()).backward()
        scaler.unscale_(optimizer)
        if not infinite:
            assert float(nn.utils.clip_grad_norm_([p], 1.0)) == pytest.approx(27**0.5)
        scaler.step(optimizer)
        scaler.update()
    share = (hvd.size() - 1) / hvd.size()
    torch.testing.assert_close(p.detach(), torch.full((3,), -2 * share / 3**0.5))


@on_ranks(3, (2, "mpi_ring"))
def test_closures_and_hooks() -> None:
    p = leaf()
    optimizer = wrapped([p], sync=hvd.LocalSGD(every=2, after=1))
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad[0].item() if p.grad is not None else 0.0))

    def closure() -> float:
        optimizer.zero_grad()
        backward([p], own())
        return 1.5

    for _ in range(3):
        assert optimizer.step(closure) == 1.5
    mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(p.detach(), torch.full((3,), -3 * mean))
    assert len(seen) == 3


@on_ranks(3, (2, "mpi_ring"))
def test_the_state_is_sent() -> None:
    """Within a round, too: the other ranks take the root's steps as their own."""
    p = leaf()
    optimizer = wrapped([p], sync=hvd.DiLoCo(3))
    for _ in range(4):
        optimizer.zero_grad()
        backward([p], own())
        optimizer.step()
    hvd.broadcast_parameters([("p", p)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(str(optimizer.state_dict()["sync"]))
    assert len({*states}) == 1
    hvd.check_consistency(nn.ParameterList([p]), optimizer)


@on_ranks(3, (2, "mpi_ring"))
def test_the_guide(tmp_path: Path) -> None:
    blocks = python_blocks("docs/slow_machines.md")
    for text in ("LocalSGD(every=8)", "sync = hvd.DiLoCo(", "class Growing"):
        model = digits_model()
        names: dict[str, Any] = {"hvd": hvd, "torch": torch, "model": model, "evaluate": values_of}
        names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
        exec(next(block for block in blocks if text in block), names)
        if text.startswith("sync"):
            names["optimizer"] = hvd.DistributedOptimizer(names["optimizer"], sync=names["sync"])
        trained(names["optimizer"], model, range(3))
        os.chdir(tmp_path)
        exec(next(block for block in blocks if "checkpoint.pt" in block), names)
        assert hvd.allgather_object(names["accuracy"]) == [names["accuracy"]] * hvd.size()
    assert len({*map(str, hvd.allgather_object(values_of(model)))}) == 1, "3 steps are rounds of 1 and 2"
    if hvd.rank() == 0:
        assert torch.load("checkpoint.pt")["optimizer"]["sync"]["steps"] == 3


@on_ranks(3, (2, "mpi_ring"))
def test_ranks_with_less_data() -> None:
    """A rank that has joined changes nothing, and the average is over the others."""
    p = leaf()
    optimizer = wrapped([p], sync=hvd.LocalSGD(every=2))
    steps = 2 if hvd.rank() == 0 else 6
    for _ in range(steps):
        optimizer.zero_grad()
        backward([p], own())
        optimizer.step()
    hvd.join()
    everybody = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    others = sum(2.0**rank for rank in range(1, hvd.size())) / (hvd.size() - 1)
    expected = -2 * everybody - (4 * others if hvd.rank() else 0)
    torch.testing.assert_close(p.detach(), torch.full((3,), expected))
    hvd.broadcast_parameters([("p", p)], root_rank=1)


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("name", SYNCS)
def test_what_is_saved_in_a_look_is_a_meeting(name: str) -> None:
    """Model and optimizer are those after a meeting, and `end_round()` within the block has nothing to do."""
    model, loaded = digits_model(), digits_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), sync=SYNCS[name]())
    trained(optimizer, model, range(7))
    before = values_of(model)
    with optimizer.synchronized():
        optimizer.end_round()
        loaded.load_state_dict(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
    assert values_of(model) == before
    other = hvd.DistributedOptimizer(torch.optim.SGD(loaded.parameters(), lr=0.02), sync=SYNCS[name]())
    other.load_state_dict(state)
    shown = values_of(loaded)
    other.end_round()
    assert values_of(loaded) == shown
    if name == "LocalSGD":
        optimizer.end_round()
        assert str(optimizer.state_dict()["sync"]) == str(state["sync"])


@on_ranks(3, (2, "mpi_ring"))
def test_an_interrupted_look() -> None:
    """Ctrl-C on rank 0 while it waits for the others in `synchronized()`."""
    p = nn.Parameter(torch.zeros(1000))
    optimizer = wrapped([p], sync=hvd.LocalSGD(9))
    backward([p], own())
    optimizer.step()
    if hvd.rank() == 0:

        def look_until_control_c() -> None:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with optimizer.synchronized():
                pass

        with pytest.raises(KeyboardInterrupt):
            look_until_control_c()
        hvd.barrier()
    else:
        hvd.barrier()
        with optimizer.synchronized():
            pass
    for _ in range(2):
        with optimizer.synchronized():
            assert p.unique().tolist() == pytest.approx([-sum(2.0**rank for rank in range(hvd.size())) / hvd.size()])


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_parameter_that_is_frozen_or_removed_within_a_round(overlap: int, removed: bool) -> None:
    """What the ranks have changed until then is part of one more meeting, and then it stays."""
    p, q = leaf(), leaf()
    optimizer = wrapped([p, q], sync=hvd.DiLoCo(3, hvd.OuterSGD(1.0, 0.5, nesterov=False), overlap=overlap))
    for step in range(10):
        optimizer.zero_grad()
        backward([p, q][: 2 - (step > 0)], own())
        optimizer.step()
        if removed:
            optimizer.param_groups[0]["params"] = [p]
        else:
            q.requires_grad_(False)
    mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(q, torch.full((3,), -mean))
    assert len({*hvd.allgather_object(q[0].item())}) == 1


@on_ranks(2)
def test_a_round_ends_in_which_a_parameter_was_frozen() -> None:
    """The frozen one lands with the meeting that is under way, and the other one meets once more."""
    p, q = leaf(), leaf()
    optimizer: Any = wrapped([p, q], sync=hvd.DiLoCo(3, hvd.OuterSGD(1.0, 0.0), overlap=2))
    for step in range(4):
        optimizer.zero_grad()
        backward([p, q][: 2 - (step > 1)], own())
        optimizer.step()
        q.requires_grad_(step < 1)
    optimizer.end_round()
    mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    assert [p.tolist(), q.tolist()] == [[-4 * mean] * 3, [-2 * mean] * 3]


@on_ranks(2)
def test_the_gradient_of_a_parameter_that_was_unfrozen_waits_for_its_step() -> None:
    p, q = leaf(), leaf().requires_grad_(False)
    optimizer: Any = wrapped([p, q], sync=hvd.LocalSGD(1))
    q.requires_grad_(True)
    for _ in range(2):
        backward([q], own())
        assert optimizer._reducer.is_open()
        optimizer.step()
        assert not optimizer._reducer.is_open()


@on_ranks(3, (2, "mpi_ring"))
def test_a_round_goes_on_after_another_init() -> None:
    p = leaf()
    optimizer = wrapped([p], sync=hvd.LocalSGD(9))
    backward([p], own())
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
    with optimizer.synchronized():
        torch.testing.assert_close(p.detach(), torch.full((3,), -mean))
    optimizer.end_round()
    torch.testing.assert_close(p.detach(), torch.full((3,), -mean))


class DampedBy(hvd.Sync):
    """A policy of a user's own."""

    def __init__(self, every: int, damping: float) -> None:
        super().__init__(every)
        self.damping = damping

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return start + self.damping * change, memory


@on_ranks(2)
@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ((hvd.LocalSGD(2), hvd.LocalSGD(3)), r"is LocalSGD\(every=2\) on rank 0, and LocalSGD\(every=3\) on rank 1"),
        ((hvd.LocalSGD(2), hvd.DiLoCo(2)), r", and DiLoCo\(every=2, outer=OuterSGD\(lr=0\.7.* on rank 1"),
        ((hvd.DiLoCo(2), hvd.DiLoCo(2, hvd.OuterSGD(0.5))), r"outer=OuterSGD\(lr=0\.5"),
        ((DampedBy(2, 0.9), DampedBy(2, 0.8)), r"DampedBy\(every=2, damping=0\.8, code [0-9a-f]{8}\)"),
    ],
)
def test_ranks_with_different_policies(policies: tuple[hvd.Sync, hvd.Sync], named: str) -> None:
    p = leaf()
    optimizer = wrapped([p], sync=policies[hvd.rank()])

    def train() -> None:
        for _ in range(3):
            backward([p], own())
            optimizer.step()

    with pytest.raises(horovodish.MismatchError, match=named):
        train()


@on_ranks(2)
def test_what_is_refused() -> None:
    p = leaf()
    for what, error, options in (
        ("every=0", ValueError, lambda: {"sync": hvd.LocalSGD(0)}),
        ("every=2.5", ValueError, lambda: {"sync": hvd.LocalSGD(2.5)}),
        ("after=-1", ValueError, lambda: {"sync": hvd.LocalSGD(2, after=-1)}),
        ("fragments=3 must be at most every=2", ValueError, lambda: {"sync": hvd.DiLoCo(2, fragments=3)}),
        ("overlap=2 must be less than every=2", ValueError, lambda: {"sync": hvd.DiLoCo(2, overlap=2)}),
        ("lr=-1", ValueError, lambda: {"sync": hvd.DiLoCo(2, hvd.OuterSGD(lr=-1))}),
        (r"Remedy: pass an hvd\.OuterSGD", TypeError, lambda: {"sync": hvd.DiLoCo(2, torch.optim.SGD)}),
        ("is not a compression", ValueError, lambda: {"sync": hvd.DiLoCo(2, compression=8)}),
        ("within='rack'", ValueError, lambda: {"sync": hvd.Hierarchical("rack")}),
        (r"hvd\.LocalSGD\(every=8\)", TypeError, lambda: {"sync": 8}),
        ("op=Sum is not for sync=", ValueError, lambda: {"sync": hvd.LocalSGD(2), "op": hvd.Sum}),
        ("leave shard= or sync= out", ValueError, lambda: {"sync": hvd.LocalSGD(2), "shard": "states"}),
        (
            "without sync=",
            ValueError,
            lambda: {"sync": hvd.LocalSGD(2), "compression": hvd.Compression.powersgd(2)},
        ),
    ):
        with pytest.raises(error, match=what):
            wrapped([p], **options())
    wrapped([p], sync=hvd.LocalSGD(2))
