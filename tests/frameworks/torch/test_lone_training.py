"""Ranks that train different models are warned, whether they begin with different parameters or reduce no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd
from support.on_ranks import on_ranks
from support.ranks import run_ranks

STEPS = 12


def trained(
    wraps: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer],
    prepare: Callable[[nn.Module], object] = lambda model: None,
    between: Callable[[nn.Module], object] = lambda model: None,
    steps: int = STEPS,
) -> list[str]:
    """Trains a model that each rank draws for itself. Returns what was warned of meanwhile and in shutdown()."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    optimizer = wraps(torch.optim.SGD(model.parameters(), 0.1), model)
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            between(model)
            optimizer.step()
        hvd.shutdown()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)  # type: ignore[arg-type]


def broadcast(model: nn.Module) -> None:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def begin_apart() -> list[list[str]]:
    return [
        trained(wrapped),
        trained(lambda optimizer, model: wrapped(optimizer, model, op=hvd.Sum)),
        trained(lambda optimizer, model: wrapped(optimizer, model, op=hvd.Adasum)),
        trained(wrapped, lambda model: model[0].bias.fill_(hvd.rank()) if broadcast(model) is None else None),
    ]


def test_ranks_that_begin_with_different_parameters_are_warned_once() -> None:
    first, *others = run_ranks(begin_apart, 3)
    assert others == [[[]] * 4] * 2
    *all_differ, bias_differs = first
    for said in all_differ:
        (text,) = said
        assert "different parameters: parameter '0.weight' differs: rank 0 has torch.float32" in text
        assert "; rank 1 has" in text
        assert "; rank 2 has" in text
        assert "3 more differ. Remedy: call hvd.broadcast_parameters(" in text
    (text,) = bias_differs
    assert "parameter '0.bias' differs" in text, "a frozen one decides what the model gives, too"


def two_optimizers_in_one_backward() -> list[str]:
    """Rank 1 meets their parameters in the other order."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), layer.named_parameters())
        for layer in (first, second)
    ]
    layers = [first, second] if hvd.rank() == 0 else [second, first]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
            for optimizer in optimizers:
                optimizer.step()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def test_two_optimizers_in_one_backward_are_compared() -> None:
    first, second = run_ranks(two_optimizers_in_one_backward, 2)
    assert len(first) == 2
    assert all("parameter 'weight' differs" in text for text in first)
    assert second == []


def begin_alike() -> list[list[str]]:
    def some(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return wrapped(optimizer, model, process_set=hvd.add_process_set([0, 1]))

    def broadcast_to_two(model: nn.Module) -> None:
        if hvd.rank() < 2:
            torch.manual_seed(5)
            for layer in model:
                layer.reset_parameters()  # type: ignore[operator]

    return [
        trained(wrapped, broadcast),
        trained(lambda optimizer, model: wrapped(optimizer, model, op=hvd.Adasum), broadcast),
        trained(some, broadcast_to_two),
    ]


def test_ranks_that_begin_alike_and_ranks_outside_of_the_set_are_not_warned() -> None:
    assert run_ranks(begin_alike, 3) == [[[], [], []]] * 3


def part_later() -> list[list[str]]:
    """Ranks that begin alike, and do not train alike."""
    steps: list[nn.Module] = []

    def at_own_rate(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + hvd.rank())
        return wrapped(optimizer, model)

    def only_on_rank_0(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = wrapped(optimizer, model)
        if hvd.rank():
            optimizer.step = lambda: None  # type: ignore[method-assign,assignment,return-value]
        return optimizer

    def moved_after_the_first_step(model: nn.Module) -> None:
        with torch.no_grad():
            model[1].weight += hvd.rank() * len(steps)
        steps.append(model)

    return [
        trained(at_own_rate, broadcast),
        trained(
            lambda optimizer, model: wrapped(optimizer, model, op=hvd.Adasum), broadcast, moved_after_the_first_step
        ),
        trained(only_on_rank_0, broadcast),
    ]


def test_ranks_that_part_later_are_warned_once() -> None:
    first, second = run_ranks(part_later, 2)
    assert second == [[], [], []]
    for texts in first:
        (text,) = texts
        assert text.startswith("the ranks train different parameters at step 4: parameter '"), text
        assert "the same steps with the same learning rates" in text


def part_after_a_thousand_steps() -> list[str]:
    steps: list[nn.Module] = []

    def moved(model: nn.Module) -> None:
        steps.append(model)
        if len(steps) == 1100:
            with torch.no_grad():
                model[1].weight += hvd.rank()

    def slowly(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        optimizer.param_groups[0]["lr"] = 1e-6  # else all parameters are infinite by then
        return wrapped(optimizer, model)

    return trained(slowly, broadcast, moved, steps=2050)


def test_ranks_that_part_late_are_warned_within_a_thousand_steps() -> None:
    (text,), second = run_ranks(part_after_a_thousand_steps, 2)
    assert text.startswith("the ranks train different parameters at step 2048: parameter '1.weight'"), text
    assert second == []


def forget_one_of_two_optimizers() -> list[list[str]]:
    """Beside a wrapped optimizer, one that is not wrapped steps: on all ranks, or on one."""

    def beside(makes: Callable[[nn.Module], torch.optim.Optimizer | None]) -> list[str]:
        made: list[torch.optim.Optimizer | None] = []
        other = nn.Linear(3, 1)

        def step(model: nn.Module) -> None:
            if made[0] is not None:
                other.zero_grad()
                other(torch.full((1, 3), 1.0 - 2 * hvd.rank())).sum().backward()
                made[0].step()

        return trained(wrapped, lambda model: (broadcast(model), broadcast(other), made.append(makes(other))), step)

    def of_one_rank(other: nn.Module) -> torch.optim.Optimizer | None:
        return None if hvd.rank() else torch.optim.Adam(other.parameters())

    return [beside(lambda other: torch.optim.Adam(other.parameters())), beside(of_one_rank)]


def test_an_optimizer_that_is_not_wrapped_is_found_beside_one_that_is() -> None:
    first, second = run_ranks(forget_one_of_two_optimizers, 2)
    assert second == [[], []]
    (text,), nothing = first
    assert "at step 4: parameter '0 of optimizer 1 that is not wrapped, Adam' differs" in text
    assert nothing == []


@on_ranks(2)
def test_after_a_join_the_ranks_compare_at_the_same_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.01), model)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (5, 3), (2, 9):
            train(steps[hvd.rank()])
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(4)  # the 15th to the 18th


def reduce_over_gloo(store: str) -> list[str]:
    def wraps(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
        made.append(DistributedDataParallel(model))
        return optimizer

    made: list[nn.Module] = []
    said = trained(wraps, between=lambda _: made[0](torch.ones(2, 3)).sum().backward(), steps=150)
    dist.barrier()  # gloo's threads are idle then: its end waits for them, and holds the lock that they may need
    made.clear()
    dist.destroy_process_group()
    return said


def test_training_over_another_backend_of_torch_is_no_training_alone(tmp_path: Path) -> None:
    assert run_ranks(reduce_over_gloo, 2, args=(str(tmp_path / "store"),), fresh=True) == [[], []]


def reduce_nothing() -> list[list[str]]:
    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                hvd.allreduce_(parameter.grad)

    def unwrapped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer

    def log(model: nn.Module) -> None:
        hvd.allreduce(model[0].bias.sum(), name="loss")
        hvd.barrier()

    return [
        trained(unwrapped, broadcast),
        trained(unwrapped, broadcast, average),
        trained(unwrapped, steps=150),
        trained(unwrapped, broadcast, log),
        trained(unwrapped, broadcast, log, steps=150),
    ]


def reduce_in_other_ways() -> list[list[str]]:
    sets, steps = [], []

    def in_a_set(model: nn.Module) -> None:
        for parameter in model.parameters():
            if hvd.rank() < 2 and parameter.grad is not None:
                hvd.allreduce_(parameter.grad, process_set=sets[0])

    def in_the_last_step(model: nn.Module) -> None:
        steps.append(model)
        if len(steps) == STEPS:
            hvd.grouped_allreduce_([parameter.data for parameter in model.parameters()])

    def unwrapped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer

    return [
        trained(unwrapped, lambda model: sets.append(hvd.add_process_set([0, 1])), in_a_set),
        trained(unwrapped, broadcast, in_the_last_step),
    ]


def test_gradients_in_process_sets_and_averages_of_models_count() -> None:
    assert run_ranks(reduce_in_other_ways, 3) == [[[], []]] * 3


def test_ranks_that_reduce_no_gradient_are_warned_at_the_end() -> None:
    first, second = run_ranks(reduce_nothing, 2)
    (said,) = first[0]
    assert said.startswith(f"rank 0 of 2 took {STEPS} steps of SGD and reduced no gradients")
    assert "Remedy: optimizer = hvd.DistributedOptimizer(" in said
    assert first[1] == [], "they are averaged by hand"
    early = ["rank 0 of 2 took 100 steps"]
    assert [text.partition(" of SGD")[0] for text in first[2]] == early, "before the end"
    assert first[3] == first[0], "a loss and a barrier in each step share nothing"
    assert [text.partition(" of SGD")[0] for text in first[4]] == early
    assert second == [[]] * 5


@on_ranks(2)
def test_a_rank_that_has_joined_is_not_compared() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.1), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if hvd.rank() == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            hvd.join()
        else:
            with pytest.warns(
                RuntimeWarning, match="rank 1 has joined before its first step, .* made 1: it had no batch"
            ):
                hvd.join()
            nn.init.ones_(model.weight)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward() if hvd.rank() else None
    if hvd.rank() == 0:
        with pytest.warns(RuntimeWarning, match="different parameters: parameter 'weight' differs"):
            optimizer.step()
    else:
        optimizer.step()
