"""Gradients of all ranks: what a gradient plan must know of JAX's, and `grad` and `value_and_grad` that give them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import jax

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.gradients.options import GradientOptions, ReductionOptions, takes
from horovodish.gradients.plan import Bucket, GradientAdapter, GradientPlan, Payload, Reduced, Trained
from horovodish.gradients.powersgd import PowerSGD
from horovodish.gradients.shards import own_parts, owned_ends
from horovodish.jax.parameters import labelled, passed_through
from horovodish.jax.primitive import Traced, run
from horovodish.jax.trees import Leaves, name_of, on_gpu, run_parts
from horovodish.launch import failures

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["grad", "value_and_grad"]


class _Gradients(GradientAdapter):
    """Gradients of any sources. JAX computes a gradient for every source, so all ranks have the same ones."""

    may_differ = False
    with_parameters = staticmethod(passed_through)

    def __init__(
        self, unnamed: bool = False, owner_of: Mapping[str, int] | None = None, across: ProcessSet | None = None
    ):
        """
        Args:
            unnamed: the user has given their reductions no name.
            owner_of: the place of the rank that gets each of them as a whole, by its path; None: there is none.
            across: the ranks that get the same parts as this one; None: there are no others.
        """
        self._unnamed, self._owner_of, self._across = unnamed, owner_of, across

    def is_traced(self, gradients: Sequence[Any]) -> bool:
        return any(isinstance(gradient, jax.core.Tracer) for gradient in gradients)

    def on_gpu(self, gradients: Sequence[Any]) -> bool:
        return on_gpu(gradients)

    def payload(self, tensor: Any, source: Any) -> Payload:
        return Payload(tensor.nbytes, tensor.dtype)

    def reduce(
        self, name: str, buckets: Sequence[Bucket], options: GradientOptions, trained: Trained | None = None
    ) -> Reduced:
        operation = options.operation(name)
        if options.shard:
            operation = operation._replace(kind="reducescatter", process_set=options.sharing)
        traced = Traced(operation, self._unnamed)
        if self._owner_of is not None:
            results = self._reduced_by_owner(traced, buckets, self._owner_of)
        else:
            results = run_parts(traced, [(bucket.members(), bucket.tensors, bucket.codec) for bucket in buckets])
        if self._across is not None:
            across = Operation("allreduce", f"{name}.across", self._across, options.op)
            results = self._reduced_across(Traced(across, self._unnamed), buckets, results)
        return Reduced(results)

    def _reduced_across(
        self, template: Traced, buckets: Sequence[Bucket], parts: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """The parts of all sets, from those that this rank's set has reduced."""
        held = [
            [(suffix, part) for suffix, part in zip(bucket.members(), its, strict=True) if part.size]
            for bucket, its in zip(buckets, parts, strict=True)
        ]
        given = [([suffix for suffix, _ in each], [part for _, part in each], None) for each in held if each]
        found = itertools.chain.from_iterable(run_parts(template, given))
        return [[next(found) if part.size else part for part in its] for its in parts]

    def _reduced_by_owner(
        self, template: Traced, buckets: Sequence[Bucket], owner_of: Mapping[str, int]
    ) -> list[list[Any]]:
        process_set = template.operation.process_set
        calls, given = [], []
        for number, bucket in enumerate(buckets):
            owned_by = [owner_of[label] for label in bucket.labels]
            order = sorted(range(len(owned_by)), key=lambda place: owned_by[place])
            counts = [bucket.tensors[place].size for place in order]
            ends = owned_ends(counts, sorted(owned_by), process_set.size())
            parts = own_parts(counts, process_set.rank(), process_set.size(), ends)
            members = bucket.members()
            call = replace(
                template,
                part=f".bucket{number}",
                members=tuple(members[place] for place in order),
                rows=tuple(end - begin for begin, end in parts),
            )
            calls.append(call.changed(by_elements=True, ends=tuple(ends)))
            given += [(number, place) for place in order]
        arrays = [buckets[number].tensors[place] for number, place in given]
        found = dict(zip(given, run(calls, arrays), strict=True))
        return [[found[number, place] for place in range(len(each.tensors))] for number, each in enumerate(buckets)]


GRADIENTS = _Gradients()


class _Suffix(str):
    """Where a leaf is in its tree, as `['layer']['weight']`."""

    @property
    def path(self) -> str:
        """The same for messages, as `layer/weight`."""
        return "/".join("".join(key) for key in re.findall(r"\['(.*?)'\]|\[(.*?)\]|\.(\w+)", self))


_last_of_line: WeakValueDictionary[str, TreePlan] = WeakValueDictionary()
"""The plan that each line of the source used last."""


_made_before_use: dict[str, int] = {}
"""How many plans each line has made since one of them reduced. Plans that a line makes in a row are told apart by their
numbers. A line that makes a new plan in each step always gets number 1, so its steps count on."""


class TreePlan:
    """Reduces trees of gradients.

    Args:
        what: reduces them, for the name if the user gives none.
        name: what the user calls them.
        options: how they are reduced.
    """

    def __init__(self, what: str, name: str | None, options: GradientOptions):
        self.options = options
        # In the labels of all gradients, so that ranks whose options differ get a MismatchError.
        self.label = f" ({options.codec.label()})" if isinstance(options.codec, PowerSGD) else ""
        self.name, self.unnamed = name_of(what, name)
        self._made_as = self.name
        self._number = _made_before_use[self.name] = _made_before_use.get(self.name, 0) + 1

    def __call__(
        self, tree: Any, parameters: Any, owners: Sequence[int] | None = None, across: ProcessSet | None = None
    ) -> Any:
        """The gradients of all ranks, in a tree of the same structure. Collective.

        Args:
            tree: the gradients of this rank.
            parameters: a tree that ought to be equal on the ranks when they begin; None where this rank has none.
            owners: the place of the rank that gets each leaf as a whole, where the others get no elements; None: each
                rank gets what the options say.
            across: the ranks of other sets that get the same parts as this one, and this one; None: there are none.
        """
        if self.options.alone:
            return tree
        if self.options.codec is not None and self.unnamed and not isinstance(self.options.codec, PowerSGD):
            if _last_of_line.setdefault(self.name, self) is not self:
                failures.warn(
                    f"{self.name}: two calls on one line use a codec. Error feedback is kept by name, so the error of "
                    "one may reach the other's gradients. Remedy: give each its own name, such as name='critic'"
                )
            _last_of_line[self.name] = self
        leaves = Leaves.of(tree, self.name, self.options.op, takes_complex=True)
        process_set = self.options.process_set
        _made_before_use.pop(self._made_as, None)
        gradients = passed_through(leaves.arrays, labelled(parameters), self.name, process_set, caller=self._number)
        order = leaves.in_order_of_layers()
        arrays, suffixes = [gradients[index] for index in order], [_Suffix(leaves.suffixes[index]) for index in order]
        owner_of = None if owners is None else dict(zip(leaves.suffixes, owners, strict=True))
        adapter = _Gradients(self.unnamed, owner_of, across)
        plan = GradientPlan(self.options, adapter, lambda _, suffix: suffix + self.label)
        results = dict(zip(order, plan.reduce(self.name, arrays, suffixes), strict=True))
        return leaves.rebuilt([results[index] for index in range(len(order))])


@takes(ReductionOptions)
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    name: str | None = None,
    **options: Unpack[ReductionOptions],
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`, with gradients that are reduced over the ranks. The returned function is collective.

    The value, and what comes with it, are this rank's own. The first reduction compares the arguments that are
    differentiated, and rank 0 warns if they differ. Arguments that are single arrays are not compared: they may be
    inputs of the rank.

    Args:
        fun: as for `jax.value_and_grad`; decorated before `init()` or after it.
        argnums: as there.
        has_aux, holomorphic, allow_int: as there.
        name: as for `DistributedOptimizer`.
        options: see `ReductionOptions`.

    Returns:
        A function that returns the value and the gradients.

    Raises:
        ValueError, TypeError: as `DistributedOptimizer`.

    Example:
        >>> loss, gradients = hvd.value_and_grad(loss_of)(parameters, batch)
        >>> parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
    """
    reduce = TreePlan("gradients", name, GradientOptions.checked(**options))
    local = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, reduce(gradients, _parameters(args, argnums))

    return reduced


def _parameters(args: Sequence[Any], argnums: int | Sequence[int]) -> Any:
    """The differentiated arguments that are trees. A single array may be an input of this rank, so it is left out."""
    if isinstance(argnums, Sequence):
        return [_parameters(args, argnum) for argnum in argnums]
    return None if jax.tree_util.all_leaves([args[argnums]]) else args[argnums]


@takes(ReductionOptions)
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    name: str | None = None,
    **options: Unpack[ReductionOptions],
) -> Callable[..., Any]:
    """As `jax.grad`, with gradients that are reduced over the ranks. The returned function is collective.

    Args:
        fun: as for `jax.grad`.
        argnums: as there.
        has_aux, holomorphic, allow_int: as there.
        name: as for `DistributedOptimizer`.
        options: see `ReductionOptions`.

    Returns:
        A function that returns the gradients; with `has_aux`, also this rank's auxiliary value.

    Raises:
        ValueError, TypeError: as `DistributedOptimizer`.

    Example:
        >>> gradients = jax.jit(hvd.grad(loss_of))(parameters, batch)
    """
    both = value_and_grad(
        fun,
        argnums,
        has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        name=name,
        **options,
    )

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced
