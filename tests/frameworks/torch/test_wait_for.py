"""`DistributedOptimizer(wait_for=...)`: steps go on when some of the ranks have a gradient, and no gradient is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.transfers import receive, send
from support.late_ranks import STEPS, late_at_random, steps_with
from support.leaves import leaf, wrapped
from support.on_ranks import on_ranks
from support.rounds import digits_model, gradients_of, values_of


def steps_of_sums(optimizer: Any) -> list[int]:
    """Have it step with sums of gradients in place of averages. Returns how many gradients each step had."""
    came: list[int] = []
    put = optimizer._reducer.put

    def put_sum(average: Any) -> None:
        came.append(average.came)
        scaled = [gradient * average.came for gradient in average.gradients[:-1]]
        put(average._replace(gradients=[*scaled, average.gradients[-1]]))

    optimizer._reducer.put = put_sum
    return came


def check_sum(optimizer: Any, parameter: torch.Tensor, given: torch.Tensor) -> None:
    """A parameter has moved by what all ranks have given, but for what no step has taken yet."""
    left = torch.from_numpy(optimizer._reducer._late._pending[0])
    assert torch.equal(-parameter.detach(), hvd.allreduce(given - left, op=hvd.Sum))


@on_ranks(2, 4, (3, "mpi_ring"))
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("stale", [1, 8])
def test_no_gradient_is_lost_or_counted_twice(missing: int, stale: int) -> None:
    """With SGD, what the parameter has moved is the sum of what was averaged; the ranks hold the same bits."""
    perhaps_sleep = late_at_random(stale)
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer: Any = hvd.DistributedOptimizer(sgd, wait_for=hvd.size() - missing, stale=stale)
    came = steps_of_sums(optimizer)
    given, calls = torch.zeros(5, dtype=torch.float64), 0
    while optimizer.steps < STEPS:
        perhaps_sleep()
        optimizer.zero_grad()
        gradient = torch.randint(-100, 100, (5,)).double()
        given, calls = given + gradient, calls + 1
        (parameter * gradient).sum().backward()
        optimizer.step()
        assert len(came) == optimizer.steps
        with_skips = calls < optimizer.steps
        assert not (with_skips and missing == 0)
    hvd.barrier()
    check_sum(optimizer, parameter, given)
    assert hvd.allgather_object((came, parameter.tolist())) == [(came, parameter.tolist())] * hvd.size()


@on_ranks(3, (2, "mpi_ring"))
def test_with_all_ranks_it_is_synchronous_training() -> None:
    models = [digits_model(), digits_model()]
    plain, late = (torch.optim.AdamW(model.parameters(), lr=0.01) for model in models)
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(plain, models[0].named_parameters()),
        hvd.DistributedOptimizer(late, models[1].named_parameters(), wait_for=hvd.size()),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(8):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            gradients_of(model, step, hvd.rank())
            optimizer.step()
            schedule.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@on_ranks(3, (3, "mpi_ring"))
def test_missed_steps_have_the_learning_rates_of_the_others() -> None:
    """A scheduler counts the calls of its rank, which are fewer where steps were missed."""
    model = digits_model()
    adam = torch.optim.AdamW([{"params": [each]} for each in model.parameters()], lr=0.01, betas=(0.8, 0.9))
    optimizer: Any = hvd.DistributedOptimizer(adam, model.named_parameters(), wait_for=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    calls = 0
    while optimizer.steps < 12:
        while hvd.rank() == 2 and calls in (2, 5) and len(optimizer._reducer._late._averages) < 2:
            time.sleep(0.001)  # until two steps went on without this rank
        optimizer.zero_grad()
        gradients_of(model, calls, hvd.rank())
        optimizer.step()
        schedule.step()
        calls += 1
    assert hvd.allgather_object(values_of(model)) == [values_of(model)] * hvd.size()
    if hvd.rank() == 2:
        assert calls < 12
    report = hvd.straggler_report()
    assert report.ranks[2].missed_steps >= 12 - hvd.broadcast_object(calls, root_rank=2) > 0
    assert "missed steps" in str(report)


@on_ranks(2)
def test_missed_steps_have_learning_rates_that_are_tensors() -> None:
    p = leaf()
    sgd = torch.optim.SGD([p], lr=torch.tensor(1.0))
    optimizer: Any = hvd.DistributedOptimizer(sgd, wait_for=1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate, rates = optimizer.param_groups[0]["lr"], []
    optimizer.register_step_pre_hook(lambda *_: rates.append(float(optimizer.param_groups[0]["lr"])))
    while optimizer.steps < 6:
        late = optimizer._reducer._late
        while hvd.rank() == 1 and late and optimizer.steps < 4 and len(late._averages) < 2 and late._done < 6:
            time.sleep(0.001)  # until two steps went on without this rank
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert len(rates) == 6 and p.tolist() == [-sum(rates)] * 3
    assert hvd.allgather_object(rates) == [rates] * 2


@on_ranks(2)
def test_hooks_are_called_once_for_a_step_after_a_state_is_loaded() -> None:
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=2)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    steps_with(optimizer, p, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    steps_with(optimizer, p, 2)
    assert calls == ["before", "after"] * 4


@on_ranks(2)
def test_parameters_of_one_number_and_of_none() -> None:
    temperature, nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([temperature, nothing], lr=1.0), wait_for=2)
    for _ in range(2):
        optimizer.zero_grad()
        (temperature * hvd.rank() + nothing.sum()).backward()
        optimizer.step()
    assert temperature.tolist() == 0.0 and nothing.grad is not None and nothing.grad.shape == (0, 3)


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_each_rank_has_a_scale_of_its_own(fused: bool) -> None:
    """A rank whose gradient is not finite gives none, and then the step waits for its next one."""
    p, calls = leaf(), 0
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0, fused=fused), wait_for=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 ** (1 + hvd.rank()))
    while optimizer.steps < 4:
        optimizer.zero_grad()
        calls += 1
        is_finite = (hvd.rank(), calls) != (1, 2)
        scaler.scale(p.sum() * (1.0 if is_finite else torch.inf)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (calls, scaler.get_scale()) == ((5, 8.0) if hvd.rank() else (4, 4.0))
    assert p.tolist() == [-4.0] * 3


@on_ranks(3, (2, "mpi_ring"))
def test_two_optimizers_and_messages_of_the_script() -> None:
    """One after the other. The first rank receives for each of them, and the script does, too."""
    perhaps_sleep = late_at_random(7)
    parameters = [leaf(), leaf()]
    optimizers: list[Any] = [wrapped([each], wait_for=hvd.size() - 1) for each in parameters]
    for parameter, optimizer, end in zip(parameters, optimizers, [15, 20], strict=True):
        while optimizer.steps < end:
            perhaps_sleep()
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
    with pytest.raises(ValueError, match=r"two optimizers with wait_for= take steps in turns .* Remedy: give all"):
        optimizers[0].step()
    if hvd.rank() == 1:
        send(ARRAYS, np.ones(3), 0).wait()
    elif hvd.rank() == 0:
        received = np.zeros(3)
        assert receive(ARRAYS, received).wait() == 1
        assert received.tolist() == [1.0] * 3
    assert [each.tolist() for each in parameters] == [[-15.0] * 3, [-20.0] * 3]
    hvd.barrier()


@on_ranks(3)
def test_a_rank_that_leaves_early_is_not_waited_for() -> None:
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=2, stale=1)
    while optimizer.steps < (5 if hvd.rank() == 2 else 20):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
    if hvd.rank() < 2:
        assert p.tolist() == [-20.0] * 3


@on_ranks(2, 4, (3, "mpi_ring"))
@pytest.mark.parametrize("seed", range(3))
def test_ranks_without_data_join(seed: int) -> None:
    """Epochs of other lengths on each rank: after `join()`, the ranks have made the same steps."""
    same, own = random.Random(seed), random.Random(seed * 100 + hvd.rank())
    perhaps_sleep = late_at_random(seed)
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    wait_for, stale = same.randint(1, hvd.size()), same.randint(1, 8)
    optimizer: Any = hvd.DistributedOptimizer(sgd, wait_for=wait_for, stale=stale)
    steps_of_sums(optimizer)
    given = torch.zeros(3, dtype=torch.float64)
    for _ in range(4):
        for _ in range(own.randint(1, 12)):
            perhaps_sleep()
            optimizer.zero_grad()
            gradient = torch.tensor([own.randint(-9, 9) for _ in range(3)]).double()
            given += gradient
            (parameter * gradient).sum().backward()
            optimizer.step()
        hvd.join()
        state = optimizer.steps, parameter.tolist()
        assert hvd.allgather_object(state) == [state] * hvd.size()
    check_sum(optimizer, parameter, given)


def check_same(*pairs: tuple[Any, nn.Parameter]) -> None:
    """The ranks have taken the same steps with the same results."""
    state = [(optimizer.steps, parameter.tolist()) for optimizer, parameter in pairs]
    assert hvd.allgather_object(state) == [state] * hvd.size()


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_that_has_no_batch_joins(idle: int) -> None:
    """The others use the second optimizer first."""
    first, second = leaf(), leaf()
    optimizer, other = wrapped([first], wait_for=1), wrapped([second], wait_for=1)
    plain = wrapped([leaf()])
    if hvd.rank() != idle:
        steps_with(other, second, 4 + hvd.rank())
    hvd.join()
    assert other.steps >= 4
    check_same((optimizer, first), (other, second))
    steps_with(optimizer, first, 2 + hvd.rank())
    hvd.join()
    check_same((optimizer, first), (other, second))
    with pytest.raises(ValueError, match="parameters have changed after its first step or join"):
        optimizer.add_param_group({"params": [leaf()]})
    steps_with(plain, leaf(), 1)


@on_ranks(2)
def test_two_optimizers_take_turns_after_joins() -> None:
    pairs = [(wrapped([p], wait_for=1), p) for p in (leaf(), leaf())]
    for turn in range(4):
        steps_with(*pairs[turn % 2], 3)
        hvd.join()
    check_same(*pairs)
    steps_with(*pairs[0], 1)
    steps_with(*pairs[1], 1)
    with pytest.raises(ValueError, match=r"two optimizers with wait_for= take steps in turns without hvd\.join"):
        steps_with(*pairs[0], 1)


@on_ranks(3, (3, "mpi_ring"))
def test_a_process_set_is_removed_and_used_again() -> None:
    some, p = hvd.add_process_set([0, 1]), leaf()
    if hvd.rank() < 2:
        optimizer: Any = wrapped([p], wait_for=2, process_set=some)
        steps_with(optimizer, p, 3)
    assert hvd.remove_process_set(some)
    if hvd.rank() < 2:
        with pytest.raises(ValueError, match="not in use"):
            steps_with(optimizer, p, 1)
    hvd.add_process_set(some)
    if hvd.rank() < 2:
        steps_with(optimizer, p, 2)
        assert (optimizer.steps, p.tolist()) == (5, [-5.0] * 3)
    assert hvd.remove_process_set(some)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_in_a_step_that_was_missed(when: str) -> None:
    """Before the parameters have changed, no step is lost. After it, the rank takes no other one."""
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)
    raises = [hvd.rank() == 1]

    def hook(*_: Any) -> None:
        if optimizer.steps == 3 and raises.pop():
            raise ArithmeticError

    register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
    steps_with(optimizer, p, 1)
    register(hook)
    if hvd.rank() == 0:
        raises.append(False)
        steps_with(optimizer, p, 5)
    else:
        while optimizer._reducer._late._done < 6:
            time.sleep(0.001)
        with pytest.raises(ArithmeticError):
            steps_with(optimizer, p, 1)
        assert optimizer.steps == 3
        raises.append(False)
    if when == "before" or hvd.rank() == 0:
        hvd.join()
        if when == "before":
            check_same((optimizer, p))
        return
    for call in (optimizer.step, hvd.join):
        with pytest.raises(RuntimeError, match=r"interrupted step 4 after it had changed parameters.* Remedy: load a"):
            call()
    optimizer._reducer._parted_in = 0
    hvd.join()


@on_ranks(2)
@pytest.mark.parametrize("after", ["nothing", "deletion", "load_state_dict"])
def test_steps_that_join_takes(after: str) -> None:
    """Rank 1 has missed some. Its own gradient stays; without the optimizer, or after another state, it takes none."""
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)
    state = optimizer.state_dict()
    for _ in range(1 if hvd.rank() == 1 else 5):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
    late = optimizer._reducer._late
    while late._done < 5:
        time.sleep(0.001)
    optimizer.zero_grad()
    (p * 7.0).sum().backward()
    gradient = p.grad
    if after == "load_state_dict":
        with torch.no_grad():
            p.zero_()
        optimizer.load_state_dict(state)
        gradient = None
    elif after == "deletion":
        before = p.tolist()
        del optimizer
    hvd.join()
    if after == "deletion":
        assert p.tolist() == before
    else:
        steps = 5 if after == "nothing" else 0
        assert (optimizer.steps, p.tolist()) == (steps, [-float(steps)] * 3)
    assert p.grad is gradient and (gradient is None or gradient.tolist() == [7.0] * 3)


@on_ranks(2)
def test_ranks_that_wait_for_others_keep_no_averages() -> None:
    """One that has joined takes steps before the others have joined; one that takes no more drops the averages."""
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)

    def tell(*_: Any) -> None:
        if hvd.rank() == 1 and optimizer.steps == 10:
            send(ARRAYS, np.ones(1), 0).wait()

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()

    optimizer.register_step_pre_hook(tell)
    if hvd.rank() == 1:
        steps(1)
    else:
        steps(30)
        assert receive(ARRAYS, np.zeros(1)).settles_within(60.0), "rank 1 has not taken the steps yet"
        steps(30)
    hvd.join()
    assert optimizer.steps == 60 and p.tolist() == [-60.0] * 3
    late = optimizer._reducer._late
    if hvd.rank() == 1:
        late.leave()
    else:
        steps(20)
        late.leave()
    late.await_others()
    assert not late._averages


@on_ranks(2)
def test_state_sparse_and_unused_parameters(tmp_path: Path) -> None:
    embedding, unused = nn.Embedding(4, 2, sparse=True), leaf(1.0)
    parameters = [embedding.weight, unused]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0, weight_decay=0.0), wait_for=2)
    before = embedding.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(before - embedding.weight, torch.tensor([[1.0] * 2] * 2 + [[0.0] * 2] * 2))
    assert unused.grad is None
    state = optimizer.state_dict()
    assert state["steps"] == optimizer.steps == 2
    again = torch.optim.SGD(parameters, lr=1.0)
    again.load_state_dict(state)
    other: Any = hvd.DistributedOptimizer(again, wait_for=1)
    other.load_state_dict(state)
    assert other.steps == 2
    with pytest.raises(ValueError, match="Remedy: give it all parameters before"):
        optimizer.add_param_group({"params": [leaf()]})
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="Remedy: make schedulers before; they add initial_lr"):
        optimizer.step()
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


@on_ranks(2)
def test_what_is_refused() -> None:
    p = leaf()
    for what, options in (
        ("wait_for=3 is more than the 2 ranks", {"wait_for": 3}),
        ("wait_for=0 must be a whole number", {"wait_for": 0}),
        ("wait_for=1.5 must be", {"wait_for": 1.5}),
        ("stale=0 must be", {"wait_for": 1, "stale": 0}),
        ("stale= needs wait_for=", {"stale": 3}),
        ("op= is not for wait_for=", {"wait_for": 1, "op": hvd.Sum}),
        ("compression= is not", {"wait_for": 1, "compression": hvd.Compression.fp16}),
        ("sync= is not", {"wait_for": 1, "sync": hvd.LocalSGD(2)}),
        ("shard= is not", {"wait_for": 1, "shard": "states"}),
    ):
        with pytest.raises(ValueError, match=what):
            wrapped([p], **options)
    with pytest.raises(ValueError, match=r"parameter .* is complex.* Remedy: leave wait_for= out"):
        wrapped([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], wait_for=1)
    alone = horovodish.add_process_set([0])
    optimizer: Any = wrapped([p], wait_for=1, process_set=alone)
    p.sum().backward()
    optimizer.step()
    assert optimizer.steps == 1 and p.tolist() == [-1.0] * 3
    horovodish.remove_process_set(alone)
