"""PowerSGD for optax: what it keeps is a part of the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import optax
from jax import numpy as jnp

from horovodish.gradients.powersgd import Algebra, LowRank, PowerSGD, approximated
from horovodish.jax.gradients import TreePlan
from horovodish.jax.primitive import Traced
from horovodish.jax.trees import run_parts


class LowRankState(NamedTuple):
    """The state of an optimizer whose large gradients are approximated.

    Attributes:
        inner: the state of the optimizer that takes the gradients.
        steps: how many updates there were.
        kept: by the path of a parameter. Its error is each rank's own.
    """

    inner: Any
    steps: jax.Array
    kept: dict[str, LowRank]


def approximating(tx: optax.GradientTransformationExtraArgs, plan: TreePlan) -> optax.GradientTransformationExtraArgs:
    """An optimizer that gives `tx` the gradients of all ranks, the large ones approximated."""
    power = cast(PowerSGD, plan.options.codec)

    def init(params: Any) -> LowRankState:
        kept = {
            name: LowRank.begun(jnp, power, name, jnp.shape(leaf))
            for name, leaf in _by_path(params).items()
            if power.matrix(name, jnp.shape(leaf)) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        }
        return LowRankState(tx.init(params), jnp.zeros((), jnp.int32), kept)

    def reduce(which: str, factors: dict[str, Any]) -> dict[str, Any]:
        operation = plan.options.operation(f"{which} factors of {plan.name}")
        (reduced,) = run_parts(Traced(operation, plan.unnamed), [([*factors], [*factors.values()], None)])
        return dict(zip(factors, reduced, strict=True))

    def update(updates: Any, state: LowRankState, params: Any = None, **extra: Any) -> tuple[Any, LowRankState]:
        def exact() -> tuple[Any, dict[str, LowRank]]:
            return plan(updates, params), state.kept

        def by_factors() -> tuple[Any, dict[str, LowRank]]:
            large = {name: leaf for name, leaf in _by_path(updates).items() if name in state.kept}
            results, kept = approximated(Algebra(jnp), large, state.kept, reduce)
            rest = plan(_replaced(updates, dict.fromkeys(large)), params)
            return _replaced(updates, results | _by_path(rest)), state.kept | kept

        if plan.options.alone or not state.kept:
            reduced, kept = exact()
        elif power.start:
            reduced, kept = jax.lax.cond(state.steps < power.start, exact, by_factors)
        else:
            reduced, kept = by_factors()
        changes, inner = tx.update(reduced, state.inner, params, **extra)
        return changes, LowRankState(inner, state.steps + 1, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _replaced(tree: Any, leaves: dict[str, Any]) -> Any:
    """The tree with other leaves at these paths."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaves.get(_name(path), leaf), tree)
