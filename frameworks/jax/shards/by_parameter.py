"""Proof that an optimizer steps each parameter by itself: a rank can step some without the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax

from horovodish.jax.shards.by_element import CALLS
from horovodish.jax.shards.clipping import LOCAL_SQUARES
from horovodish.jax.shards.layout import Layout

__all__ = ["check", "check_parts", "parameters_of"]


def _refused(problem: str) -> ValueError:
    return ValueError(
        f'shard_by="parameter" cannot be used with this optimizer: {problem}. A rank sees only the parameters that it '
        "steps. Remedy: use hvd.clip_by_global_norm in place of optax.clip_by_global_norm; pass hyperparam_dtype= to "
        "optax.inject_hyperparams; otherwise leave shard= out"
    )


def parameters_of(
    init: Callable[[Any], Any], params: Any
) -> tuple[tuple[int | None, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """The parameter that each leaf of a state belongs to, and the shape and dtype of each leaf. All ranks decide alike.

    A leaf belongs to a parameter if there is none without the parameter. So `init` is traced with parts of the
    parameters: those whose number has a one in some binary digit, and those that have a zero there.

    Raises:
        ValueError: the state does not consist of leaves that belong to one parameter, or to none.
    """
    leaves, whole = jax.tree.leaves(params), _state_of(init, params)
    by_digit = []
    for digit in range(max(1, (len(leaves) - 1).bit_length())):
        halves = []
        for bit in (0, 1):
            some = [index for index in range(len(leaves)) if index >> digit & 1 == bit]
            half = _state_of_some(init, params, some, whole)
            halves.append(half)
        by_digit.append(halves)
    found: list[int | None] = []
    for path in whole:
        bits = [[bit for bit in (0, 1) if path in halves[bit]] for halves in by_digit]
        if {len(each) for each in bits} not in ({1}, {2}):
            raise _refused(f"its state{path} belongs to several parameters")
        is_of_all = len(bits[0]) == 2
        found.append(None if is_of_all else sum(bit << digit for digit, (bit,) in enumerate(bits)))
    return tuple(found), tuple(whole.values())


def check_parts(init: Callable[[Any], Any], params: Any, layout: Layout) -> None:
    """Raise unless `init` makes of the parameters of each rank what it makes of all. All ranks decide alike."""
    whole = _state_of(init, params)
    for place in range(layout.process_set.size()):
        own = [index for index, owner in enumerate(layout.owners or ()) if owner == place]
        _state_of_some(init, params, own, whole)


def _state_of_some(
    init: Callable[[Any], Any], params: Any, some: Collection[int], whole: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The state of some of the parameters.

    Raises:
        ValueError: it is no part of the state of all.
    """
    leaves, definition = jax.tree_util.tree_flatten(params)
    kept = set(some)
    part = [leaf if index in kept else optax.MaskedNode() for index, leaf in enumerate(leaves)]
    try:
        found = _state_of(init, jax.tree_util.tree_unflatten(definition, part))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        raise _refused(f"its init() does not take a part of the parameters: {problem}") from problem
    if other := next((path for path, leaf in found.items() if whole.get(path) != leaf), None):
        raise _refused(f"its state{other} depends on which parameters there are")
    return found


def _state_of(init: Callable[[Any], Any], params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init, params))
    return {jax.tree_util.keystr(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in pairs}


def check(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    inputs: Sequence[int | None],
    results: Sequence[int | None],
    layout: Layout,
) -> list[Any]:
    """Raise unless each result of a function follows from one parameter, and from what belongs to none.

    All ranks decide alike.

    Args:
        function: what an optimizer computes.
        arguments: trees for whole parameters; only shapes and dtypes count.
        inputs: the parameter that each leaf of the arguments belongs to, by index; None where it belongs to none.
        results: the same of the result.
        layout: names the parameters.

    Returns:
        The shape and dtype of each leaf of the result.

    Raises:
        ValueError: a result follows from other parameters, or there are others than expected; says what to do.
    """
    program, tree = jax.make_jaxpr(function, return_shape=True)(*arguments)
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    if len(found) != len(results):
        raise _refused("its state changes its structure")
    of = _sources(program.jaxpr, [frozenset() if index is None else frozenset([index]) for index in inputs])
    for (path, _), own, sources in zip(found, results, of, strict=True):
        if others := sorted(sources - {own}):
            of_all = f"{jax.tree_util.keystr(path)} of all parameters"
            what = of_all if own is None else f"the result for {layout.paths[own]}"
            raise _refused(f"{what} follows from {layout.paths[others[0]]}, too")
    return [leaf for _, leaf in found]


def _sources(program: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The parameters that each result of a program follows from."""
    jaxpr = getattr(program, "jaxpr", program)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    nothing = frozenset[int]()
    for equation in jaxpr.eqns:
        given = [nothing if hasattr(atom, "val") else known.get(atom, nothing) for atom in equation.invars]
        name, details = equation.primitive.name, equation.params
        if name.startswith("random_"):
            raise _refused("it draws noise, which depends on how many parameters there are")
        if details.get("name") == LOCAL_SQUARES:
            of = [nothing]
        elif name in CALLS:
            of = _sources(details["jaxpr" if "jaxpr" in details else "call_jaxpr"], given)
        elif name == "cond":
            branches = [_sources(branch, given[1:]) for branch in details["branches"]]
            of = [given[0].union(*each) for each in zip(*branches, strict=True)]
        else:
            of = [nothing.union(*given)] * len(equation.outvars)
        known.update(zip(equation.outvars, of, strict=True))
    return [nothing if hasattr(atom, "val") else known.get(atom, nothing) for atom in jaxpr.outvars]
