"""DistributedOptimizer with a codec: error feedback is needed, and small tensors travel as they are."""

from __future__ import annotations

import random
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

import horovodish.torch as hvd
from support.coded import ELEMENTS, Floats, encode_or_refuse, loses_nothing
from support.elastic import Scene, run_elastic
from support.on_ranks import on_ranks

STEPS = 150


def loss_after_training(compression: Any) -> float:
    """Fits a matrix whose columns have very different sizes, from other samples on each rank."""
    target = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -3, 32)
    weight, bias = torch.nn.Parameter(torch.zeros(32, 32)), torch.nn.Parameter(torch.zeros(32))
    named = [("weight", weight), ("bias", bias)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.1), named, compression=compression)
    samples = torch.randn(256, 32, generator=torch.Generator().manual_seed(2 + hvd.rank()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (samples @ (weight - target) + bias).pow(2).sum(1).mean().backward()
        optimizer.step()
    assert torch.equal(weight, hvd.broadcast(weight.detach(), root_rank=0))
    return float((weight.detach() - target).pow(2).sum() / target.pow(2).sum())


@on_ranks((2, "mpi_ring"))
def test_one_bit_trains_with_error_feedback_and_not_without() -> None:
    onebit = hvd.Compression.onebit
    exact, small = loss_after_training(hvd.Compression.none), loss_after_training(onebit)
    assert exact == small  # by default tensors as small as these travel as they are
    with_feedback = loss_after_training(onebit(where=lambda name, shape: name == "weight"))
    without = loss_after_training(onebit(where=lambda name, shape: name == "weight", error_feedback=False))
    assert exact < 1e-6
    assert with_feedback < 0.01 < 0.04 < without, (with_feedback, without)


def loss_on_digits(compression: Any) -> float:
    """The loss of a small network over all digits after 300 steps, in which each rank sees digits of its own.

    Without momentum: with one bit a gradient arrives some ten steps late, and momentum of 0.9 makes steps ten times as
    long, in which training with late gradients is not stable.
    """
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
    own = torch.arange(hvd.rank(), len(labels), hvd.size())
    order = torch.Generator().manual_seed(hvd.rank())
    loss_of = torch.nn.functional.cross_entropy
    for _ in range(300):
        batch = own[torch.randint(len(own), (32,), generator=order)]
        optimizer.zero_grad()
        loss_of(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return loss_of(model(images), labels).item()


@pytest.mark.soak
@on_ranks((4, "mpi_ring"))
def test_digits_are_learned_as_well_with_error_feedback() -> None:
    exact = loss_on_digits(hvd.Compression.none)
    above = {}
    for name, feedback in [
        ("int8", True),
        ("int4", True),
        ("powersgd", True),
        ("onebit", True),
        ("onebit", False),
    ]:
        codec = getattr(hvd.Compression, name)(where=lambda _, shape: len(shape) == 2, error_feedback=feedback)
        above[name, feedback] = loss_on_digits(codec) / exact - 1
    assert above["int8", True] < 0.01, above
    assert above["int4", True] < 0.02, above
    assert above["powersgd", True] < 0.02, above
    assert above["onebit", True] < 0.03 < above["onebit", False], above


@on_ranks((3, "mpi_ring"))
@pytest.mark.parametrize("case", ["windows", "missing gradients", "other buckets", "a process set"])
def test_nothing_is_lost_with(case: str) -> None:
    pair = hvd.add_process_set([0, 2]) if case == "a process set" else hvd.global_process_set
    passes = 2 if case == "windows" else 1
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        [("weight", weight)],
        compression=hvd.Compression.int8(where=lambda name, _: name == "weight"),
        backward_passes_per_step=passes,
        process_set=pair,
    )

    def step(gradient: Floats) -> object:
        if case == "other buckets":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        weight.data.zero_()
        optimizer.zero_grad()
        others = [its.sum() for group in optimizer.param_groups[1:] for its in group["params"]]
        for _ in range(passes):
            if case != "missing gradients" or gradient.any() or hvd.rank() == 0:
                (weight * torch.from_numpy(gradient) / passes).sum().add(sum(others)).backward()
        optimizer.step()
        return -weight.detach().numpy()

    if pair.included():
        loses_nothing(step, pair)


@on_ranks((2, "mpi_ring"))
@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_errors_wait_while_no_rank_has_a_gradient(kind: str) -> None:
    weight, other = torch.nn.Parameter(torch.zeros(300, 300)), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, other], lr=1.0),
        [("weight", weight), ("other", other)],
        compression=getattr(hvd.Compression, kind)(where=lambda name, _: name == "weight"),
    )
    lost = torch.zeros(300, 300, dtype=torch.float64)
    sizes = []
    for number in range(10):
        gradients = [torch.zeros(300, 300) for _ in range(hvd.size())]
        if number < 4:
            gradients = [torch.randn(300, 1, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
            gradients = [gradient @ gradient.T for gradient in gradients]
        weight.data.zero_()
        optimizer.zero_grad()
        ((weight * gradients[hvd.rank()]).sum() if number % 2 == 0 else other.sum()).backward()
        optimizer.step()
        assert (weight.grad is None) == (number % 2 == 1)
        if number % 2 == 0:
            lost += sum(gradients).double() / hvd.size() + weight.detach()
        sizes.append(float(lost.abs().max()))
    assert sizes[-1] < 1e-4, sizes


@on_ranks((2, "mpi_ring"))
@pytest.mark.parametrize("case", ["none", "int4", "small tensors", "where="])
def test_the_error_names_the_codec_that_only_one_rank_has(case: str) -> None:
    codecs = hvd.Compression
    first, second = codecs.int8, codecs.none
    message = "compression= is Compression.int8 on rank 0, and Compression.none on rank 1"
    if case == "int4":
        second = codecs.int4
        message = message.replace("none", "int4")
    if case == "where=":
        first, second = codecs.int8(where=lambda *_: True), codecs.int8(where=lambda *_: False)
        message = "compression: rank 0 has Compression.int8(error_feedback=True, start=0), rank 1 has none. Remedy"
    shapes = [(3,)] if case == "small tensors" else [(3,), (300, 300)]
    named = [(f"weight {number}", torch.nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]
    sgd = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, named, compression=second if hvd.rank() else first)

    def step() -> None:
        torch.stack([parameter.sum() for _, parameter in named]).sum().backward()
        optimizer.step()

    with pytest.raises(hvd.MismatchError, match=re.escape(message)):
        step()


@on_ranks((2, "mpi_ring"))
def test_an_exception_of_where_is_named() -> None:
    def where(name: str, shape: tuple[int, ...]) -> bool:
        return bool(shape["rows"] > 3)  # type: ignore[call-overload]

    weight = torch.nn.Parameter(torch.zeros(300, 300))
    codec = hvd.Compression.int8(where=where)
    with pytest.raises(ValueError, match=r"where= raised TypeError for parameter 'weight' of shape \(300, 300\)"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=codec)


@on_ranks((2, "mpi_ring"))
def test_every_function_that_takes_a_compression() -> None:
    tensor = torch.ones(300, 300)

    def step(**options: Any) -> None:
        weight = torch.nn.Parameter(torch.zeros(300, 300))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, [("weight", weight)], **options)
        weight.sum().backward()
        optimizer.step()

    encode_or_refuse(
        hvd,
        {
            "allreduce": lambda its: hvd.allreduce(tensor, compression=its),
            "grouped_allreduce": lambda its: hvd.grouped_allreduce([tensor], compression=its),
            "DistributedOptimizer": lambda its: step(compression=its),
            "DiLoCo": lambda its: step(sync=hvd.DiLoCo(1, compression=its)),
            "Sync": lambda its: step(sync=hvd.Sync(1, compression=its)),
        },
        {
            "reducescatter": lambda its: hvd.reducescatter(tensor, compression=its),
            "grouped_reducescatter": lambda its: hvd.grouped_reducescatter([tensor], compression=its),
        },
    )


@on_ranks(2, (2, "mpi_ring"))
def test_one_bit_warns_of_optimizers_that_need_the_size_of_each_element() -> None:
    class Own(torch.optim.AdamW):
        pass

    codecs, local = hvd.Compression, hvd.LocalSGD(8)
    for kind, options, warns in (
        (Own, {"compression": codecs.onebit}, True),
        (torch.optim.RMSprop, {"compression": codecs.onebit(start=9)}, True),
        (torch.optim.SGD, {"compression": codecs.onebit}, False),
        (Own, {"compression": codecs.int4}, False),
        (Own, {"compression": codecs.onebit, "sync": local}, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1), **options)
        said = [(each.filename, str(each.message)) for each in caught]
        is_encoded = hvd.compression_report().hosts > 1
        assert [file for file, _ in said] == [__file__] * (warns and is_encoded), said
        assert all(f"Compression.onebit and {kind.__name__}: the optimizer divides" in text for _, text in said)


@on_ranks((3, "mpi_ring"))
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, 1))
    codec = hvd.Compression.int8(where=lambda *_: True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=codec)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        before = weight.detach().clone()
        factor = float("nan") if number == 2 and hvd.rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale((weight[:9] * factor).sum() + weight[9:].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == (number == 2)
        assert scaler.get_scale() == (4.0 if number < 2 else 2.0)
    assert weight.isfinite().all()
    assert torch.equal(weight, hvd.broadcast(weight.detach(), root_rank=0))


def fitted(state: Any, step: Any) -> list[float]:
    """The weights after the steps that are left. Every rank has the same samples."""
    samples = torch.randn(STEPS, 32, 16, generator=torch.Generator().manual_seed(1))
    while state.step < STEPS:
        weight = state.model.weight
        step((samples[state.step] @ weight.t() - samples[state.step]).pow(2).mean())
        state.step += 1
        state.commit()
    return [float(each) for each in state.model.weight.detach().flatten()]


def made() -> Any:
    model = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def codec_of(kind: str) -> Any:
    """The codec of this kind, for all tensors."""
    share = (0.5,) if kind == "topk" else ()
    return getattr(hvd.Compression, kind)(*share, where=lambda name, shape: True)


def train_through_a_loss(scene: Scene, seed: int, kind: str) -> tuple[int, list[float]]:
    hvd.init()
    model, plain = made()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=codec_of(kind))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    if scene.me == 1 and scene.first_time("any moment"):
        threading.Timer(random.Random(seed).uniform(0.0, 1.0), scene.die, ["any moment"]).start()

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)

    train = hvd.elastic.run(lambda state: fitted(state, step))
    return hvd.size(), train(state)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", ["int8", "topk", "auto", "powersgd"])
def test_a_rank_dies_at_any_moment(seed: int, kind: str, tmp_path: Path) -> None:
    """The others go on with the same bits, and end where training without codes ends."""
    env = {"HOROVODISH_PLANE": "mpi_ring"}
    ended = run_elastic(train_through_a_loss, tmp_path, 3, seed, kind, flags=["--min-np", "2"], env=env)
    assert ended.status == 0, ended.said
    assert ended.fired == {"any moment 1"}
    (size, first), *others = ended.results[-2:]
    assert size in (2, 3), ended.said
    assert all(weights == first for _, weights in others), ended.said
    torch.testing.assert_close(torch.tensor(first), torch.eye(16).flatten(), rtol=0, atol=0.02)


def moves_without_gradients(scene: Scene, kind: str) -> list[bool]:
    """Whether each step has moved the weights. Every second one has a gradient of zero, so it brings errors only."""
    hvd.init()
    model = torch.nn.Linear(ELEMENTS, 1, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=codec_of(kind))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, moves=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            if state.step == 3 and scene.me == 1 and scene.first_time("loss"):
                scene.die("loss")
            before = model.weight.detach().clone()
            gradient = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(hvd.rank()))
            optimizer.zero_grad()
            (model.weight * gradient * (state.step % 2 == 0)).sum().backward()
            optimizer.step()
            state.moves = [*state.moves, not torch.equal(model.weight, before)]
            state.step += 1
            state.commit()

    train(state)
    return list(state.moves)


@pytest.mark.parametrize("kind", ["int8", "topk", "auto"])
def test_errors_are_zero_after_a_loss(kind: str, tmp_path: Path) -> None:
    env = {"HOROVODISH_PLANE": "mpi_ring"}
    ended = run_elastic(moves_without_gradients, tmp_path, 3, kind, flags=["--min-np", "2"], env=env)
    assert ended.status == 0, ended.said
    assert ended.fired == {"loss 1"}
    assert ended.said.count("Compression.auto chose") == (2 if kind == "auto" else 0), ended.said
    for first, errors, again, after_the_loss in ended.results[-2:]:
        assert first and again and (errors or kind == "auto") and not after_the_loss
