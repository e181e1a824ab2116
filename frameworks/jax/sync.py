"""`sync=` for optax: the start of the round and how far it is are a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import optax
from jax import numpy as jnp

from horovodish.gradients.options import GradientOptions
from horovodish.gradients.sync import Sync, fragments_of, ranks_within
from horovodish.jax.gradients import TreePlan


class SyncState(NamedTuple):
    """The state of an optimizer whose ranks take steps of their own and meet.

    Attributes:
        inner: the state of the optimizer that takes the gradients; each rank's own.
        steps: how many updates there were.
        ages: of each fragment, the steps of its round so far; -1 if no round has begun.
        starts: the parameters when their rounds began, the same on every rank.
        memory: what the policy remembers of each parameter, likewise.
    """

    inner: Any
    steps: jax.Array
    ages: jax.Array
    starts: list[jax.Array]
    memory: list[tuple[jax.Array, ...]]


class SyncTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation with two functions more."""

    _meet: Callable[[Any, SyncState], tuple[Any, SyncState]]

    def around(self, other: optax.GradientTransformationExtraArgs) -> SyncTransformation:
        """Another transformation that contains this one, with the same functions."""
        made = SyncTransformation(*other)
        made._meet = self._meet
        return made

    def synchronized(self, params: Any, state: Any) -> Any:
        """The parameters that a meeting would give now, to evaluate or to save. Collective.

        Training goes on with the parameters and the state that it has.

        Args:
            params: of this rank.
            state: of this optimizer, or a tree that contains it.
        """
        return self.end_round(params, state)[0]

    def end_round(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Meet now, as at the end of training. Collective. Where a round has just ended, only the rounding changes.

        Args:
            params, state: as for `synchronized`.

        Returns:
            The parameters and the state to go on with.
        """
        structure: Any
        leaves, structure = jax.tree.flatten(state, is_leaf=_is_sync_state)
        places = [number for number, leaf in enumerate(leaves) if _is_sync_state(leaf)]
        if len(places) != 1:
            raise ValueError(
                f"the state contains {len(places)} states of optimizers with sync=, not one. Remedy: pass the state "
                "that init() and update() of this optimizer have given"
            )
        (place,) = places
        params, leaves[place] = self._meet(params, leaves[place])
        return params, jax.tree.unflatten(structure, leaves)


def meeting(tx: optax.GradientTransformationExtraArgs, plan: TreePlan) -> SyncTransformation:
    """An optimizer whose ranks meet as a policy says."""
    options, policy = plan.options, cast(Sync, plan.options.sync)
    if policy.overlap:
        raise ValueError(
            f"sync: overlap={policy.overlap} is for PyTorch: a JAX program waits for each result that it uses. Remedy: "
            "leave it out"
        )
    within = ranks_within(policy, options.process_set)
    of_gradients = _changed(plan, replace(options, process_set=within or options.process_set), "")
    of_changes = options.of_changes(policy)
    fragments = [
        _changed(plan, of_changes, f".fragment{number}", f" ({policy!r})") for number in range(policy.fragments)
    ]

    def init(params: Any) -> SyncState:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        return SyncState(
            tx.init(params),
            jnp.zeros((), jnp.int32),
            jnp.full((policy.fragments,), -1, jnp.int32),
            [jnp.zeros_like(leaf) for leaf in leaves],
            [policy.begin(leaf) for leaf in leaves],
        )

    def update(updates: Any, state: SyncState, params: Any = None, **extra: Any) -> tuple[Any, SyncState]:
        if params is None:
            raise ValueError("sync= reduces what steps change. Remedy: call update(gradients, state, params)")
        if within is not None:
            updates = of_gradients(updates, None)
        elif policy.after:
            given = updates
            updates = jax.lax.cond(state.steps < policy.after, lambda: of_gradients(given, params), lambda: given)
        changes, inner = tx.update(updates, state.inner, params, **extra)
        steps = state.steps + 1
        if not options.process_set.included():
            return changes, state._replace(inner=inner, steps=steps)
        number = steps - policy.after
        flat: list[Any]
        structure: Any
        flat, structure = jax.tree.flatten(params)
        new = [_stepped(*each) for each in zip(flat, structure.flatten_up_to(changes), strict=True)]
        numbers = fragments_of([leaf.nbytes for leaf in new], policy.fragments)
        begins = [(state.ages[its] < 0) & (number > 0) for its in numbers]
        starts = [jnp.where(*each) for each in zip(begins, flat, state.starts, strict=True)]
        memory = [
            tuple(jnp.where(now, *pair) for pair in zip(policy.begin(jnp.asarray(old)), kept, strict=True))
            for now, old, kept in zip(begins, flat, state.memory, strict=True)
        ]
        ages = []
        for fragment in range(policy.fragments):
            due = (number > 0) & jnp.asarray(policy.is_due(number, fragment))
            new, starts, memory = _met(due, fragment, new, starts, memory, structure)
            ages.append(jnp.where(due, 0, jnp.where(number > 0, jnp.maximum(state.ages[fragment], 0) + 1, -1)))
        return (
            jax.tree.map(lambda one, other: one - other, structure.unflatten(new), params),
            SyncState(inner, steps, jnp.stack(ages), starts, memory),
        )

    def _met(due: Any, fragment: int, new: Any, starts: Any, memory: Any, structure: Any) -> tuple[Any, Any, Any]:
        """The parameters, the starts and the policy's memory, after a step that may end a fragment's round."""
        numbers = fragments_of([leaf.nbytes for leaf in new], policy.fragments)

        def meet() -> tuple[Any, Any, Any]:
            mine = [its == fragment for its in numbers]
            given = [one - start if own else None for one, start, own in zip(new, starts, mine, strict=True)]
            known = structure.unflatten([start if own else None for start, own in zip(starts, mine, strict=True)])
            reduced = structure.flatten_up_to(fragments[fragment](structure.unflatten(given), known))
            merged = [
                policy.merge(start, change, kept) if own else (one, kept)
                for one, start, change, kept, own in zip(new, starts, reduced, memory, mine, strict=True)
            ]
            values = [value.astype(one.dtype) for (value, _), one in zip(merged, new, strict=True)]
            begun = [value if own else start for value, start, own in zip(values, starts, mine, strict=True)]
            return values, begun, [tuple(kept) for _, kept in merged]

        found: tuple[Any, Any, Any] = jax.lax.cond(due, meet, lambda: (new, starts, memory))
        return found

    def meet_now(params: Any, state: SyncState) -> tuple[Any, SyncState]:
        if not options.process_set.included():
            return params, state
        flat: list[Any]
        structure: Any
        flat, structure = jax.tree.flatten(params)
        numbers = fragments_of([jnp.asarray(leaf).nbytes for leaf in flat], policy.fragments)
        # After a meeting `starts` has the same bits on every rank, and the parameters have the rounding of an update.
        new = [jnp.where(state.ages[its] == 0, *pair) for its, *pair in zip(numbers, state.starts, flat, strict=True)]
        starts, memory, ages = state.starts, state.memory, []
        for fragment in range(policy.fragments):
            new, starts, memory = _met(state.ages[fragment] > 0, fragment, new, starts, memory, structure)
            ages.append(jnp.minimum(state.ages[fragment], 0))
        return structure.unflatten(new), state._replace(ages=jnp.stack(ages), starts=starts, memory=memory)

    distributed = SyncTransformation(init, update)
    distributed._meet = meet_now
    return distributed


def _changed(plan: TreePlan, options: GradientOptions, suffix: str, label: str = "") -> TreePlan:
    """A plan with other options, under another name and with a label."""
    changed = copy(plan)
    changed.options, changed.name, changed.label = options, plan.name + suffix, label
    return changed


def _stepped(parameter: Any, change: Any) -> jax.Array:
    stepped: jax.Array = jnp.asarray(parameter + change, jnp.asarray(parameter).dtype)
    return stepped


def _is_sync_state(value: object) -> bool:
    return isinstance(value, SyncState)
