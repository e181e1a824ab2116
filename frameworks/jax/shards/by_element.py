"""Proof that an optimizer steps each element of a parameter by itself, alike in whole parameters and in pieces of them.

A function of trees is traced twice: with the shapes of whole parameters, and with the shapes of pieces. Nothing is
computed. Each program becomes terms: a term is the computation for one element. Elements of a parameter may be combined
by operations that work element by element, also with numbers that belong to no parameter, and by nothing else. If the
programs have the same terms, stepping the pieces gives the same elements as stepping whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.jax.shards.clipping import LOCAL_SQUARES
from horovodish.jax.shards.layout import Layout

__all__ = ["CALLS", "check"]

_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cond convert_element_type copy copy_p
    cos cosh digamma div eq erf erfc erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p
    logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt
    square sub tan tanh xor
"""
_BY_ELEMENT = frozenset(_NAMES.split())
"""JAX's operations that compute each element by itself."""
_SHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
CALLS = ("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2")


class _Value(NamedTuple):
    """An array in a program.

    Attributes:
        term: the number of the term of one element.
        parameter: the index of the parameter that its elements belong to, one to one; None if they belong to none.
        uniform: whether all elements are equal in any program. False where they belong to a parameter.
    """

    term: int
    parameter: int | None
    uniform: bool


class _NotByElementError(Exception):
    pass


class _Terms:
    """Gives equal terms of several programs equal numbers."""

    def __init__(self, paths: Sequence[str]):
        self._paths = paths
        self._numbers: dict[Hashable, int] = {}

    def number(self, *term: Hashable) -> int:
        return self._numbers.setdefault(term, len(self._numbers))

    def results(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """What a program gives for inputs. A program without constants may be open."""
        jaxpr = getattr(program, "jaxpr", program)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(zip(jaxpr.constvars, map(self._constant, getattr(program, "consts", ())), strict=True))

        def values(atoms: Sequence[Any]) -> list[_Value]:
            return [self._constant(atom.val) if hasattr(atom, "val") else known[atom] for atom in atoms]

        for equation in jaxpr.eqns:
            known.update(zip(equation.outvars, self._computed(equation, values(equation.invars)), strict=True))
        return values(jaxpr.outvars)

    def _constant(self, value: Any) -> _Value:
        aval = jax.typeof(value)
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        is_known = aval.shape == () and not is_key and not isinstance(value, jax.core.Tracer)
        known: Hashable = (repr(np.asarray(value).item()), str(aval.dtype)) if is_known else id(value)
        return _Value(self.number("constant", known), None, aval.shape == ())

    def _computed(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
        name, parameters = equation.primitive.name, equation.params
        if parameters.get("name") == LOCAL_SQUARES and all(each.parameter is not None for each in inputs):
            return [_Value(self.number(LOCAL_SQUARES, *(each.term for each in inputs)), None, True)]
        if name in CALLS:
            return self.results(parameters["jaxpr" if "jaxpr" in parameters else "call_jaxpr"], inputs)
        if name == "cond":
            branches = [self.results(branch, inputs[1:]) for branch in parameters["branches"]]
            return [self._combined(name, "", [inputs[0], *each], False) for each in zip(*branches, strict=True)]
        if name in _SHAPES and all(each.uniform for each in inputs):
            return inputs
        # What a sum of ones is, for example, depends on how many there are.
        shapes = [] if name in _BY_ELEMENT else [atom.aval.shape for atom in equation.invars]
        return [
            self._combined(name, f"{place} {parameters} {shapes}", inputs, variable.aval.shape == ())
            for place, variable in enumerate(equation.outvars)
        ]

    def _combined(self, name: str, what: str, inputs: list[_Value], is_number: bool) -> _Value:
        numbers = {each.parameter for each in inputs} - {None}
        term = self.number(name, what, *(each.term for each in inputs))
        if not numbers:
            return _Value(term, None, is_number or (name in _BY_ELEMENT and all(each.uniform for each in inputs)))
        first, *others = sorted(self._paths[number] for number in numbers if number is not None)
        if others:
            raise _NotByElementError(f"{name} combines {first} with {others[0]}")
        if name not in _BY_ELEMENT:
            raise _NotByElementError(f"{name} does not compute each element of {first} by itself")
        if any(each.parameter is None and not each.uniform for each in inputs):
            raise _NotByElementError(f"{name} combines each element of {first} with another number, such as noise")
        return _Value(term, numbers.pop(), False)


def check(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    inputs: Sequence[int | None],
    results: Sequence[int | None],
    layout: Layout,
) -> list[Any]:
    """Raise unless a function computes for each element of a piece what it computes for that element of the whole.

    All ranks decide alike.

    Args:
        function: what an optimizer computes.
        arguments: trees; only shapes and dtypes count.
        inputs: the parameter that each leaf of the arguments belongs to, by index; None where it belongs to none.
        results: the same of the result.
        layout: the shapes of the parameters and their pieces.

    Returns:
        The shape and dtype of each leaf of the result for whole parameters.

    Raises:
        ValueError: it does not, or cannot be shown to; says what to do.
    """
    leaves, definition = jax.tree_util.tree_flatten(arguments)
    avals = [jax.typeof(leaf) for leaf in leaves]
    terms = _Terms(layout.paths)
    values = [
        _Value(terms.number("input", index), of, of is None and aval.shape == ())
        for index, (aval, of) in enumerate(zip(avals, inputs, strict=True))
    ]

    def traced(shapes: Sequence[tuple[int, ...]]) -> tuple[Any, list[Any], Any]:
        """The program for parameters of some shapes, and the paths, shapes and tree of its results."""
        pairs = zip(avals, inputs, strict=True)
        given = [jax.ShapeDtypeStruct(aval.shape if of is None else shapes[of], aval.dtype) for aval, of in pairs]
        arguments = jax.tree_util.tree_unflatten(definition, given)
        program, tree = jax.make_jaxpr(function, return_shape=True)(*arguments)
        return program, *jax.tree_util.tree_flatten_with_path(tree)

    whole, found, structure = traced(layout.shapes)
    try:
        expected = terms.results(whole, values)
        for shapes in layout.shapes_of_pieces():
            try:
                cut, cut_found, cut_structure = traced(shapes)
            except (IndexError, TypeError, ValueError) as problem:
                raise _NotByElementError(f"it does not work on pieces of arrays: {problem}") from problem
            if cut_structure != structure or len(found) != len(results):
                raise _NotByElementError("its state depends on the shape of a parameter, or changes")
            pairs = zip(expected, terms.results(cut, values), strict=True)
            for (path, aval), (_, piece), of, pair in zip(found, cut_found, results, pairs, strict=True):
                name = jax.tree_util.keystr(path)
                if pair[0].term != pair[1].term:
                    raise _NotByElementError(f"the result {name} depends on the shape of a parameter")
                if aval.shape != (piece.shape if of is None else layout.shapes[of]) or any(
                    each.parameter != of and (each.parameter is not None or not each.uniform) for each in pair
                ):
                    raise _NotByElementError(f"{name} has no number for each element of one parameter")
    except _NotByElementError as problem:
        raise ValueError(
            f"shard= cannot be used with this optimizer: {problem}. Ranks can share a parameter only if each of its "
            "elements is stepped by itself. Remedy: use hvd.clip_by_global_norm in place of optax.clip_by_global_norm; "
            'with LAMB, LARS, Adafactor, Muon, Shampoo and the like, pass shard_by="parameter", which gives each '
            "parameter to one rank as a whole"
        ) from problem
    return [leaf for _, leaf in found]
