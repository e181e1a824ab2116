"""What may happen around a backward: several optimizers, checkpointing, errors."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import horovodish.torch as hvd
import horovodish.torch.gradients.backward
from horovodish.errors import MismatchError
from horovodish.torch.gradients.backward import join, leave
from horovodish.torch.names import PlanNames
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks

around_backward = on_ranks(3, (2, "fusion_threshold_mb=0"))


@around_backward
def test_two_optimizers_in_one_backward() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 3) for _ in range(2)]
    optimizers = [wrapped(model.named_parameters()) for model in models]
    for model in models:
        hvd.broadcast_parameters(model.state_dict())
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](models[0](torch.full((1, 3), own()))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for m in models for p in m.parameters()])
    assert torch.equal(hvd.allgather(weights[None]), weights.expand(hvd.size(), -1))


@pytest.mark.soak
@around_backward
def test_two_optimizers_met_in_another_order() -> None:
    """The ranks' backward passes finish the gradients of two optimizers in opposite orders, and lack some of them."""
    p, q = [leaf(), leaf()], [leaf(), leaf()]
    optimizers = [wrapped(p), wrapped(q)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.ones(3)
        for first in (p[0], q[0]) if hvd.rank() else (q[0], p[0]):
            x = x * (1 + 0 * first) + first * own(step)
        x.sum().backward()
        check(p[0], mean(step))
        check(q[0], mean(step))
        assert p[1].grad is None
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            p[0].zero_()
            q[0].zero_()


@around_backward
def test_two_threads_at_once() -> None:
    """On rank 0 one thread's backward ends while another thread is in the middle of its own."""
    torch.manual_seed(0)
    p, q = [leaf(), leaf()], [leaf()]
    optimizers = [wrapped(p), wrapped(q)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if hvd.rank() == 0:
            half_way, go_on = threading.Event(), threading.Event()
            thread = threading.Thread(target=backward_with_a_pause, args=(p, own(step), half_way, go_on))
            thread.start()
            assert half_way.wait(60)
            backward(q, own(step))
            go_on.set()
            thread.join()
        else:
            backward(q, own(step))
            backward(p, own(step))
        for parameter in (*p, *q):
            check(parameter, mean(step))
        for optimizer in optimizers:
            optimizer.step()


def backward_with_a_pause(
    parameters: list[nn.Parameter], factor: float, half_way: threading.Event, go_on: threading.Event
) -> None:
    """Pauses after the gradient of the second parameter, before that of the first."""

    def pause(_: torch.Tensor) -> None:
        half_way.set()
        assert go_on.wait(60)

    first = parameters[0] * factor
    first.register_hook(pause)
    (first + parameters[1] * factor).sum().backward()


@around_backward
def test_checkpointing() -> None:
    for use_reentrant in (False, True):
        torch.manual_seed(3)
        first, shared, alone = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        layers = [first, shared, alone]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1))
        for step in range(3):
            x = torch.full((2, 3), own(step) / 8)
            plain = [p for layer in layers for p in layer.parameters()]
            expected = torch.autograd.grad(shared(alone(shared(first(x)))).sum(), plain)
            optimizer.zero_grad()
            hidden = first(x)
            for layer in (shared, alone, shared):
                hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
            hidden.sum().backward()
            for parameter, gradient in zip(plain, expected, strict=True):
                torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))


@around_backward
def test_nested_backwards_are_one_pass() -> None:
    torch.manual_seed(0)
    outer, inner = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*outer.parameters(), *inner.parameters()]
    optimizer = wrapped(parameters, backward_passes_per_step=2)
    for window in range(3):
        optimizer.zero_grad()
        x = torch.full((1, 3), own(window) / 8)
        gradients = torch.autograd.grad(inner(outer(x)).sum(), parameters)
        for passes in (1, 2):
            checkpoint(inner, outer(x), use_reentrant=True).sum().backward()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient if passes == 1 else 2 * hvd.allreduce(gradient))


@around_backward
def test_everything_in_checkpoints() -> None:
    """No parameter has its hook called by the outer backward."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*first.parameters(), *second.parameters()]

    def both(x: torch.Tensor) -> torch.Tensor:
        return second(checkpoint(first, x, use_reentrant=True))

    def one_after_the_other(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True)

    for model in (one_after_the_other, lambda x: checkpoint(both, x, use_reentrant=True)):
        for passes in (1, 2):
            optimizer = wrapped(parameters, backward_passes_per_step=passes)
            for window in range(3):
                optimizer.zero_grad()
                x = torch.full((2, 3), own(window) / 8, requires_grad=True)
                gradients = torch.autograd.grad(second(first(x)).sum(), parameters)
                for done in range(1, passes + 1):
                    model(x).sum().backward()
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        expected = gradient if done < passes else passes * hvd.allreduce(gradient)
                        torch.testing.assert_close(parameter.grad, expected)


@around_backward
def test_a_step_for_each_gradient() -> None:
    """The user's hook has stepped and dropped the gradient before ours is called."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        optimizers: dict[torch.Tensor, Any] = {}

        def step_at_once(parameter: torch.Tensor, optimizers: dict[torch.Tensor, Any] = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        parameters = [leaf(), leaf()]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step_at_once)
            optimizers[parameter] = wrapped([parameter], op=hvd.Sum, compression=compression)
        for step in range(3):
            backward(parameters, own(step))
        for parameter in parameters:
            assert parameter.grad is None
            torch.testing.assert_close(parameter.detach(), torch.full((3,), -sum(map(total, range(3)))))


@around_backward
def test_non_contiguous_gradients() -> None:
    torch.manual_seed(0)
    p, q = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6, 4).t())
    optimizer = wrapped([p, q])
    p.grad = torch.zeros(6, 4).t()
    for step in range(3):
        backward([p, q], own(step))
        check(p, mean(step))
        check(q, mean(step))
        assert p.grad.stride() == q.grad.stride() == (1, 4)
        optimizer.zero_grad(set_to_none=False)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.now:
            raise FloatingPointError("no such number")
        return gradients[0], None


@around_backward
def test_backward_that_raises() -> None:
    p, q = leaf(), leaf(1.0)
    optimizer = wrapped([p, q])
    for step in range(6):
        optimizer.zero_grad()
        loss = ((Raises.apply(p * 1.0, step in (0, 3)) + q) * own(step)).sum()
        if step in (0, 3):
            with pytest.raises(FloatingPointError):
                loss.backward()
            continue
        loss.backward()
        check(p, mean(step))
        check(q, mean(step))
        optimizer.step()


@on_ranks(2)
def test_a_backward_after_a_wait_that_was_interrupted() -> None:
    """Rank 0 is interrupted while it waits for rank 1. The gradient travels, so nothing may be added to it unseen."""
    p = leaf()
    optimizer = wrapped([p])
    backward([p], own())
    optimizer.zero_grad()
    if hvd.rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            backward([p], own())
        with pytest.raises(RuntimeError, match=r"the wait for it: call optimizer.zero_grad\(\) or "):
            backward([p], own())
        hvd.barrier()
    else:
        hvd.barrier()
        backward([p], own())
    optimizer.zero_grad()
    backward([p], own())
    check(p, mean())


@pytest.mark.soak
@around_backward
def test_what_travels_outlives_the_optimizer() -> None:
    """A backward has raised, so nobody has waited for what it had handed over. The others hand it over later."""
    p, q = leaf(), nn.Parameter(torch.ones(3, dtype=torch.float64))  # a bucket for each
    optimizer = wrapped([p, q])
    backward([p, q], own())
    optimizer.zero_grad()
    if hvd.rank() > 0:
        hvd.broadcast(torch.zeros(1), 0, name="go")
    with pytest.raises(FloatingPointError):
        (Raises.apply(p * 1.0, True) + q).sum().backward()
    handed_over, reducer = weakref.ref(q.grad), weakref.ref(optimizer._reducer)
    q.grad = None
    del optimizer
    gc.collect()
    assert reducer() is None
    if hvd.rank() == 0 and hvd.size() > 1:
        assert handed_over() is not None
        hvd.broadcast(torch.zeros(1), 0, name="go")
    hvd.barrier()
    hvd.barrier()  # a submission lets go of what has ended before it
    assert handed_over() is None


@on_ranks(3, env={"HOROVODISH_PROCESS_SETS": "dynamic"})
def test_names_say_which_ranks() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    names = PlanNames(sets[hvd.rank()])
    expected = f"gradients of optimizer 1 of ranks [{hvd.rank()}]"
    assert [names.next(), names.next()] == [expected, f"{expected}, plan 2"]
    assert "ranks" not in PlanNames(hvd.global_process_set).next()
    for each in sets:
        hvd.remove_process_set(each)


@around_backward
def test_mismatches() -> None:
    torch.manual_seed(0)
    last = hvd.rank() == hvd.size() - 1
    model = nn.Linear(3, 5 if last else 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        with pytest.raises(MismatchError) as raised:
            model(torch.ones(1, 3)).sum().backward()
        assert re.search(r"weight|bias", str(raised.value)), raised.value
        optimizer.zero_grad()
    p = leaf()
    optimizer = wrapped([p])
    backward([p], own())
    check(p, mean())


@around_backward
def test_a_new_engine() -> None:
    p, q = leaf(), leaf()
    q.requires_grad_(False)
    optimizer = wrapped([p, q])
    backward([p], own())
    optimizer.step()
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    for step in range(3):
        optimizer.zero_grad()
        backward([p], own(step))
        check(p, mean(step))
        optimizer.step()


class Ends:
    """A participant that notes its ends."""

    def __init__(self) -> None:
        self.ends = 0

    def end_backward(self) -> None:
        self.ends += 1

    def hand_over(self, patience_seconds: float) -> bool:
        return True

    def wait(self) -> None: ...

    def tune(self) -> None: ...


class OnePass:
    """Stands in for autograd: all threads are in one backward pass, as the threads of CUDA devices are."""

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []

    def queue_callback(self, end: Callable[[], None]) -> None:
        self.ends.append(end)


def in_threads_that_alternate(chance: random.Random, *acts: Callable[[], None]) -> None:
    """Threads that may give way to each other before every line of `horovodish.torch.gradients.backward`."""
    begin = threading.Barrier(len(acts))

    def give_way(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != horovodish.torch.gradients.backward.__file__:
            return None
        if event == "line":
            for _ in range(chance.randrange(3)):
                time.sleep(1e-5)
        return give_way

    def run(act: Callable[[], None]) -> None:
        begin.wait()
        sys.settrace(give_way)
        act()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_participant_of_a_pass_in_several_threads_is_finished() -> None:
    chance = random.Random(0)
    for task in range(10**9, 10**9 + 100):
        first, second, leaves, engine = Ends(), Ends(), Ends(), OnePass()
        with (
            mock.patch.object(torch._C, "_current_graph_task_id", return_value=task),
            mock.patch.object(torch.autograd.Variable, "_execution_engine", engine),
        ):
            join(leaves)
            in_threads_that_alternate(chance, partial(leave, leaves), partial(join, first), partial(join, second))
            for end in engine.ends:
                end()
        assert (first.ends, second.ends, leaves.ends) == (1, 1, 0)
