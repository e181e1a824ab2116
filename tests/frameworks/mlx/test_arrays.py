"""What is MLX's own: arrays that are not computed yet, that change their memory, or that have no values at all."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="MLX's build for CPUs has no wheel for this Python or machine")

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map

import horovodish.mlx as hvd
from horovodish.collectives.operation import Operation
from horovodish.elastic import memory, state
from horovodish.errors import HorovodInternalError, MismatchError, StallError, UnsupportedTensorError
from horovodish.mlx.collectives import ARRAYS
from support.on_ranks import on_ranks


@on_ranks(2)
def test_arrays_that_are_not_computed_yet() -> None:
    lazy = mx.arange(6.0).reshape(2, 3).T * (hvd.rank() + 1)
    assert hvd.allreduce(lazy, op=hvd.Sum).tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
    assert hvd.allgather(mx.broadcast_to(mx.array(hvd.rank()), (1, 2))).tolist() == [[0, 0], [1, 1]]


@on_ranks(2)
def test_an_array_that_is_assigned_to_meanwhile() -> None:
    """The engine reads the old values: MLX keeps their memory as long as something refers to it."""
    array = mx.full((100_000,), float(hvd.rank()))
    if hvd.rank() == 0:
        handle = ARRAYS.one(Operation("allreduce", "x", op=hvd.Sum), array)
        array += 5
        mx.eval(array, [mx.full((100_000,), 7.0) for _ in range(20)])
        hvd.barrier()
    else:
        hvd.barrier()
        handle = ARRAYS.one(Operation("allreduce", "x", op=hvd.Sum), array)
    result = handle.wait()
    assert (result == 1).all().item()


@on_ranks(2)
def test_compiled_functions_have_no_collectives() -> None:
    """Every rank raises, and the optimizer names the remedy, too."""
    with pytest.raises(UnsupportedTensorError, match=r"an array has no value yet .* outside of mx\.compile"):
        mx.compile(hvd.allreduce)(mx.ones(2))
    with pytest.raises(UnsupportedTensorError, match=r"outside of mx\.compile and mx\.vmap"):
        mx.vmap(hvd.allreduce)(mx.ones((2, 2)))
    model = nn.Linear(2, 2)
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    step = nn.value_and_grad(model, lambda x: model(x).sum())

    def whole_step(x: mx.array) -> None:
        optimizer.update(model, step(x)[1])

    with pytest.raises(UnsupportedTensorError, match=r"update\(\) of a wrapped optimizer outside of mx\.compile"):
        mx.compile(whole_step, inputs=model.state, outputs=model.state)(mx.ones((1, 2)))
    model = nn.Linear(2, 2)  # MLX leaves arrays without values in the other one
    before = hvd.broadcast_parameters(model).weight
    step = nn.value_and_grad(model, lambda x: model(x).sum())
    compiled = mx.compile(step, inputs=model.state, outputs=model.state)
    optimizer.update(model, compiled(mx.full((1, 2), hvd.rank()))[1])
    assert mx.allclose(before - model.weight, mx.full((2, 2), 0.05)).item()


@on_ranks(2)
def test_higher_derivatives() -> None:
    with pytest.raises(NotImplementedError, match=r"not with mx\.jvp"):
        mx.jvp(hvd.allreduce, [mx.ones(2)], [mx.ones(2)])

    def of_gradient(x: mx.array) -> mx.array:
        return mx.grad(lambda each: (hvd.allreduce(each) ** 3).sum())(x).sum()

    # With y as the mean of both ranks' x, each has the gradient 3y^2. Their sum is 6y^2, whose gradient is 6y.
    assert mx.grad(of_gradient)(mx.ones(2)).tolist() == [6.0, 6.0]


@on_ranks(3)
def test_a_rank_that_has_joined_since_the_forward_pass() -> None:
    if hvd.rank() == 2:
        hvd.join()
        return

    def loss(x: mx.array) -> mx.array:
        return hvd.reducescatter(x, name="rows").sum()

    with pytest.raises((HorovodInternalError, MismatchError), match="rows"):
        mx.grad(loss)(mx.ones((6, 2)))
    hvd.join()


@on_ranks(2)
def test_unusual_arrays() -> None:
    with pytest.raises(UnsupportedTensorError, match="dtype complex64 is not supported; supported are bool"):
        hvd.allreduce(mx.array(1j))
    with pytest.raises(UnsupportedTensorError, match=r"got ndarray; pass mx\.array"):
        hvd.allreduce(np.ones(2))
    with pytest.raises(UnsupportedTensorError, match=re.escape("cannot be reduced; pass array.astype(mlx.core.int64)")):
        hvd.allreduce(mx.zeros(2, mx.uint32))


@on_ranks(2)
@pytest.mark.parametrize(
    ("frozen_by_rank_0", "error", "text"),
    [([], StallError, "not for the same tensors"), ([1], MismatchError, "must build the same model")],
)
def test_a_rank_freezes_other_layers(frozen_by_rank_0: list[int], error: type[Exception], text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    hvd.broadcast_parameters(model, root_rank=0)
    loss = nn.value_and_grad(model, lambda x: model(x).sum())
    for _ in range(4):  # in the fourth step the ranks compare their models
        optimizer.update(model, loss(mx.ones((1, 2)))[1])
    for layer in frozen_by_rank_0 if hvd.rank() == 0 else [0]:
        model.layers[layer].freeze()
    with pytest.raises(error, match=text):
        optimizer.update(model, loss(mx.ones((1, 2)))[1])


@on_ranks(2)
def test_equal_parameters_in_another_order() -> None:
    """The ranks have equal trees, but rank 1 has filled its dicts in another order."""

    def tree(a: float, c: float, d: float) -> dict[str, Any]:
        inner = {"c": mx.full((2,), c, mx.float32), "d": mx.full((2,), d, mx.float32)}
        if hvd.rank() == 0:
            return {"a": mx.full((3,), a, mx.float32), "b": inner}
        return {"b": dict(reversed(inner.items())), "a": mx.full((3,), a, mx.float32)}

    optimizer, parameters, scale = hvd.DistributedOptimizer(optimizers.SGD(0.5)), tree(0, 1, 2), 2 * hvd.rank()
    for _ in range(4):  # in the second and the fourth step the ranks compare their parameters
        parameters = optimizer.apply_gradients(tree(1 * scale, 2 * scale, 3 * scale), parameters)
    expected = {"a": [-2.0] * 3, "b": {"c": [-3.0] * 2, "d": [-4.0] * 2}}
    assert tree_map(lambda value: value.tolist(), parameters) == expected


@on_ranks(2)
@pytest.mark.parametrize("kind", ["adam", "multi", "schedule"])
def test_optimizers_keep_their_state(kind: str) -> None:
    """A wrapped optimizer is the same object, its state is broadcast, and ranks end with the same bits."""

    def made() -> Any:
        if kind == "multi":
            parts = [optimizers.Adam(0.1), optimizers.SGD(0.1, momentum=0.9)]
            return optimizers.MultiOptimizer(parts, [lambda name, _: "weight" in name])
        return optimizers.Adam(optimizers.exponential_decay(0.1, 0.9) if kind == "schedule" else 0.1)

    mx.random.seed(hvd.rank())
    model, optimizer = nn.Sequential(nn.Linear(3, 4), nn.relu, nn.Linear(4, 2)), made()
    assert hvd.DistributedOptimizer(optimizer) is optimizer and isinstance(optimizer, type(made()))
    with pytest.raises(ValueError, match="is wrapped already"):
        hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(model, root_rank=1)
    optimizer.init(model.trainable_parameters())
    loss = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())
    for number in range(6):
        if number == 3:
            if hvd.rank() == 0:
                optimizer.state = made().state
                optimizer.init(model.trainable_parameters())
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        optimizer.update(model, loss(mx.random.normal((4, 3)))[1])
    for tree in (model.parameters(), optimizer.state):
        leaves = [(name, leaf.tolist()) for name, leaf in tree_flatten(tree)]
        assert leaves and hvd.broadcast_object(leaves) == leaves
    with pytest.raises(TypeError, match=r"wraps an mlx\.optimizers\.Optimizer, not dict"):
        hvd.DistributedOptimizer({})


def test_a_commit_that_is_held_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an array object gets other memory, and where MLX could use its memory for a result."""
    monkeypatch.setattr(memory.Schedule, "is_due", lambda *_: False)
    monkeypatch.setattr(state._Budget, "allows", lambda _: True)
    model, own = nn.Linear(2, 2), {name: mx.ones(3).astype(getattr(mx, name)) for name in ("bool_", "bfloat16", "int8")}
    kept = hvd.elastic.MlxState(model=model, own=own, n=0)
    kept.commit()
    before = model.weight.tolist()
    for name in kept.own:
        kept.own[name][:] = 0
    model.weight += 1
    mx.eval(kept.own, model.parameters())
    kept.n = 1
    kept.restore()
    assert kept.n == 0 and kept.model is model and model.weight.tolist() == before
    assert [str(each.dtype) for each in kept.own.values()] == ["mlx.core.bool", "mlx.core.bfloat16", "mlx.core.int8"]
    assert all(each.tolist() == [1, 1, 1] for each in kept.own.values())
    kept.own["int8"][:] = 5
    kept.restore()
    assert kept.own["int8"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("copies", [True, False])
def test_the_moments_of_an_optimizer_go_back(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Schedule, "is_due", lambda *_: copies)
    monkeypatch.setattr(state._Budget, "allows", lambda _: not copies)
    model, optimizer = nn.Linear(2, 2), optimizers.Adam(optimizers.exponential_decay(0.1, 0.5))
    loss = nn.value_and_grad(model, lambda: model(mx.ones((1, 2))).sum())
    optimizer.update(model, loss()[1])
    kept = hvd.elastic.MlxState(both=[model, optimizer])
    kept.commit()
    ends = []
    for _ in range(2):
        for _ in range(2):
            optimizer.update(model, loss()[1])
        ends.append([leaf.tolist() for _, leaf in [*tree_flatten(model), *tree_flatten(optimizer.state)]])
        kept.restore()
    assert ends[0] == ends[1] and optimizer.step.item() == 1
