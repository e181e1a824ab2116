"""Whether the ranks train the same parameters. They compare when gradients are first reduced, and now and then later.

A compiled program passes one gradient through a native call that also gets the parameters, see
`csrc/xla/xla_handlers.h`. No update can come before this call: all of them wait for the reduction, which waits for that
gradient. So parameters may be donated, and none is copied.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from horovodish.collectives.consistency import Checksums, checksum_of
from horovodish.collectives.process_sets import ProcessSet, added, checked_id
from horovodish.collectives.submission import counted
from horovodish.gradients.parameters import compare, readers
from horovodish.jax.lowering import check_devices, register_handlers
from horovodish.launch.failures import Place, place_in_script

_COMPARE = "horovodish_compare"
_REMEDY = "parameters = hvd.broadcast_parameters(parameters, root_rank=0) before the first step"

Labelled = Sequence[tuple[str, Any]]
"""Arrays, and what to call them."""

primitive = Primitive(_COMPARE)


def passed_through(
    gradients: Sequence[Any],
    parameters: Labelled,
    name: str,
    process_set: ProcessSet,
    remedy: str = _REMEDY,
    caller: int = 1,
) -> list[Any]:
    """The gradients. The first time, the ranks compare their parameters. Collective; does not block.

    Args:
        gradients: arrays that will be reduced, or None.
        parameters: empty where this rank has none. No rank warns then.
        name: of the reduction, the same on every rank.
        process_set: the ranks that reduce.
        remedy: what to do if the ranks have different parameters.
        caller: the number of the optimizer that reduces, among the optimizers of this name. Outside of jit, each
            optimizer counts its own steps. In jit, the order of the program tells optimizers apart.
    """
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not given:
        return list(gradients)
    smallest = min(given, key=lambda index: gradients[index].nbytes)
    gradient = gradients[smallest]
    compared = [(label, value) for label, leaf in parameters if _has_bytes(value := _as_array(leaf))]
    values = [value for _, value in compared]
    if not any(isinstance(value, jax.core.Tracer) for value in (gradient, *values)):
        name = f"{name}#{caller}" if caller > 1 else name
        number = counted(f"parameters of {name}", checked_id(process_set))
        _compare(name, process_set, number, compared, remedy, None)
        return list(gradients)
    labels = tuple(label for label, _ in compared)
    arrays = map(jnp.asarray, values)
    place = place_in_script()  # later, the script may be elsewhere
    passed = primitive.bind(
        gradient, *arrays, name=name, process_set=process_set, labels=labels, remedy=remedy, place=place
    )
    return [*gradients[:smallest], passed, *gradients[smallest + 1 :]]


def labelled(tree: Any) -> Labelled:
    """The leaves of a tree, and what to call them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(f"parameter {jax.tree_util.keystr(path)}".rstrip(), leaf) for path, leaf in pairs]


def _as_array(leaf: Any) -> Any:
    """An array with the value and the dtype that jit gives a number; other leaves as they are."""
    if not isinstance(leaf, bool | int | float | complex | np.generic):
        return leaf
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if array.dtype.kind in "biufcV" else leaf


def _has_bytes(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers with whole bytes. Random keys are no numbers. XLA packs 4-bit numbers."""
    if not isinstance(leaf, jax.Array | np.ndarray) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return bool(jnp.finfo(leaf.dtype).bits >= 8)
    return leaf.dtype.kind in "biuc"


def _compare(
    name: str, process_set: ProcessSet, number: int, arrays: Labelled, remedy: str, place: Place | None
) -> None:
    def checksums() -> Checksums:
        return {label: checksum_of(np.asarray(array)) for label, array in arrays}

    compare(name, process_set, number, 1, checksums, remedy, place)


@primitive.def_abstract_eval
def _abstract(gradient: ShapedArray, *_: ShapedArray, **__: Any) -> ShapedArray:
    return ShapedArray(gradient.shape, gradient.dtype)


@primitive.def_impl
def _run(
    gradient: Any,
    *arrays: Any,
    name: str,
    process_set: ProcessSet,
    labels: Sequence[str],
    remedy: str,
    place: Place | None,
) -> Any:
    number = counted(f"parameters of {name}", checked_id(process_set))
    _compare(name, process_set, number, list(zip(labels, arrays, strict=True)), remedy, place)
    return gradient


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    return primitive.bind(*primals, **parameters), tangents[0]


def _batch(arrays: Sequence[Any], axes: Sequence[Any], **_: Any) -> tuple[Any, Any]:
    return arrays[0], axes[0]  # vmap: each member of the batch may have parameters of its own


def _on_cpu(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    name: str,
    process_set: ProcessSet,
    labels: Sequence[str],
    remedy: str,
    place: Place | None,
) -> Sequence[Any]:
    check_devices(ctx)
    register_handlers("cpu")
    # Optimizers that one line has made have one name. The program's order tells them apart, as with their reductions.
    uses: Counter[Any] = ctx.module_context.cached_primitive_lowerings.setdefault(primitive, Counter())
    identity = checked_id(process_set)
    uses[identity, name] += 1
    number = uses[identity, name]
    name = f"{name}#{number}" if number > 1 else name
    avals: list[Any] = list(ctx.avals_in[1:])
    arrays = [(label, str(aval.dtype), aval.shape) for label, aval in zip(labels, avals, strict=True)]
    compare = jax.ffi.ffi_lowering(_COMPARE, has_side_effect=True, operand_output_aliases={0: 0})
    return compare(
        ctx,
        *operands,
        key=f"{identity} {name}",
        parameters="jax " + json.dumps([name, identity, process_set.ranks, arrays, remedy, place]),
    )


def _elsewhere(_: mlir.LoweringRuleContext, gradient: Any, *__: Any, **___: Any) -> Sequence[Any]:
    return [gradient]


def _read(described: str, addresses: list[int], number: int) -> None:
    """The reader of `gradients.parameters.readers`."""
    name, identity, ranks, arrays, remedy, place = json.loads(described)
    views = [
        (label, _view(address, jnp.dtype(dtype), shape))
        for (label, dtype, shape), address in zip(arrays, addresses, strict=True)
    ]
    with suppress(KeyError):  # there is no such process set any more
        if added(identity).ranks == ranks:  # else the program was compiled for another world, and its reductions fail
            _compare(name, added(identity), number, views, remedy, place and Place(*place))


def _view(address: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    if not (length := dtype.itemsize * math.prod(shape)):
        return np.empty(shape, dtype)
    array: np.ndarray = np.frombuffer(memoryview((ctypes.c_char * length).from_address(address)), dtype)
    return array.reshape(shape)


ad.primitive_jvps[primitive] = _jvp
batching.primitive_batchers[primitive] = _batch
mlir.register_lowering(primitive, _on_cpu, platform="cpu", cacheable=False)
mlir.register_lowering(primitive, _elsewhere, cacheable=False)
readers["jax"] = _read
