"""The collectives in compiled programs.

Each operation becomes two calls of the native engine, `start` and `done`: see `csrc/xla/xla_handlers.h`.
CUDA devices have calls of their own, for what NCCL can do. Every `done` depends on every `start` of its
primitive and on the `done` before it. Both have side effects for XLA, so it neither merges, drops nor hoists them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir, partial_eval

from horovodish import _native
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.xla_call import group_of, start_attributes
from horovodish.jax import cuda
from horovodish.jax.eager import warn_of_staging
from horovodish.jax.primitive import Traced, by_operation, primitive, whole

START, DONE, REST = "horovodish_start", "horovodish_done", "horovodish_rest"
_NUMBER = ShapedArray((1,), np.dtype(np.int32))
_THROUGH_THE_HOST = ("cuda", "rocm")
_AS_XLA_TAKES: dict[type, Any] = {int: np.int64, float: np.float64, str: str}
_NAMES_IN_XLA = {"cpu": "cpu", "cuda": "CUDA"}


@functools.cache
def register_handlers(platform: str) -> None:
    """Tell XLA of the native calls."""
    # The backend must exist before: it would not start at all if it found handlers that it cannot take.
    jax.devices(platform)
    for name, handler in _native.xla_handlers(platform).items():
        jax.ffi.register_ffi_target(name, handler, platform=_NAMES_IN_XLA[platform])


def _on_cpu(ctx: mlir.LoweringRuleContext, *operands: Any, traced: tuple[Traced, ...]) -> Sequence[Any]:
    check_devices(ctx)
    register_handlers("cpu")
    traced = _numbered(ctx, traced)
    numbers, _ = _starts(ctx, traced, operands)
    every = ShapedArray((len(numbers),), _NUMBER.dtype)
    joined = mlir.lower_fun(lambda *parts: jnp.concatenate(parts), multiple_results=False)
    (handles,) = joined(ctx.replace(avals_in=[_NUMBER] * len(numbers), avals_out=[every]), *numbers)
    results: list[Any] = []
    # A chain, with a call between its links (not a slice, which XLA compiles for milliseconds). XLA runs operations in
    # the order that they become ready, so each result is used before the next one is collected. All results at once
    # would need memory that the system must provide anew in every step.
    done = jax.ffi.ffi_lowering(DONE, has_side_effect=True, operand_output_aliases={0: 0})
    for _, avals in by_operation(traced, ctx.avals_out):
        if results:
            fewer = ShapedArray((every.size - 1,), every.dtype)
            (handles,) = jax.ffi.ffi_lowering(REST)(ctx.replace(avals_in=[every], avals_out=[fewer]), handles)
            every = fewer
        handles, *values = done(ctx.replace(avals_in=[every], avals_out=[every, *avals]), handles)
        results += values
    return results


def _on_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, traced: tuple[Traced, ...]) -> Sequence[Any]:
    if why := cuda.problem(traced, ctx.avals_in):
        return _elsewhere(ctx, *operands, traced=traced, why=why)
    check_devices(ctx)
    register_handlers("cuda")
    traced = _numbered(ctx, traced)
    numbers, group = _starts(ctx, traced, operands)
    results: list[Any] = []
    done = jax.ffi.ffi_lowering(DONE, has_side_effect=True)
    for index, (_, avals) in enumerate(by_operation(traced, ctx.avals_out)):
        types = ctx.replace(avals_in=[_NUMBER] * len(numbers), avals_out=[_NUMBER, *avals])
        number, *values = done(types, *numbers, group=group, index=np.int64(index))
        numbers = [number]
        results += values
    return results


def _starts(
    ctx: mlir.LoweringRuleContext, traced: tuple[Traced, ...], operands: Sequence[Any]
) -> tuple[list[Any], str]:
    """The calls that begin the operations, and what tells these from all others of the program."""
    operations = whole(traced)
    group = group_of(operations[0])
    start = jax.ffi.ffi_lowering(START, has_side_effect=True)
    numbers: list[Any] = []
    given = by_operation(traced, list(zip(operands, ctx.avals_in, strict=True)))
    follows = [*zip(operands, ctx.avals_in, strict=True)][sum(len(each.members) for each in traced) :]
    for index, (operation, (each, members)) in enumerate(zip(operations, given, strict=True)):
        values, avals = zip(*members, *follows, strict=True)
        attributes = start_attributes(operation, each.horovods_gradients, len(follows))
        attributes |= {"group": group, "index": index}
        numbers += start(
            ctx.replace(avals_in=list(avals), avals_out=[_NUMBER]),
            *values,
            **{key: _AS_XLA_TAKES[type(value)](value) for key, value in attributes.items()},
        )
    return numbers, group


def check_devices(ctx: mlir.LoweringRuleContext) -> None:
    """Raise NotImplementedError unless the program is for one device."""
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.ShardingContext) or (context.num_devices or 1) > 1:
        raise NotImplementedError(
            "a collective of horovodish was used in a program for several devices of one process (pmap, shard_map, or "
            "jit of sharded arrays). Each process of horovodish computes on one device: use jax.lax.psum between the "
            "devices of a process, and start one process for each device to use horovodish"
        )


def _numbered(ctx: mlir.LoweringRuleContext, traced: tuple[Traced, ...]) -> tuple[Traced, ...]:
    """Tells calls of one name apart, as a loop or `jax.checkpoint` makes them: by a number, in the program's order.

    Process sets are counted for themselves: some ranks of a set may lack the calls of another one.
    """
    # What lives as long as a module is lowered; JAX's own keys in it are tuples.
    uses: Counter[Any] = ctx.module_context.cached_primitive_lowerings.setdefault(primitive, Counter())
    keys = [(checked_id(each.operation.process_set), each.name) for each in traced]
    uses.update(set(keys))
    return tuple(
        each.changed(name=f"{each.name}#{uses[key]}") if uses[key] > 1 else each
        for each, key in zip(traced, keys, strict=True)
    )


def _elsewhere(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    traced: tuple[Traced, ...],
    why: str = "besides CPUs, horovodish reaches only CUDA devices",
) -> Sequence[Any]:
    platforms = [platform for platform in ctx.module_context.platforms if platform not in _THROUGH_THE_HOST]
    if platforms:
        raise NotImplementedError(
            f"{traced[0].name}: no collectives inside jit on {', '.join(platforms)} devices; compute on the CPU "
            "(JAX_PLATFORMS=cpu) or call it outside of jit"
        )
    check_devices(ctx)
    for platform in ctx.module_context.platforms:
        warn_of_staging(platform, why)
    traced = _numbered(ctx, traced)
    return through_the_host(ctx, operands, tuple(replace(each, unnamed=False) for each in traced))


def through_the_host(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], traced: tuple[Traced, ...]
) -> Sequence[Any]:
    """The collectives as a call of Python, which blocks the program: where the engine cannot reach the memory."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # the other one waits for this call
            results = primitive.bind(*map(jnp.asarray, arrays), traced=traced)
        return tuple(map(np.asarray, results))

    given: list[Any] = list(ctx.avals_in)
    wanted: list[Any] = list(ctx.avals_out)
    results, _, _ = mlir.emit_python_callback(ctx, call, None, list(operands), given, wanted, has_side_effect=True)
    return results


def _kept(*given: Any) -> tuple[list[bool], Any]:
    # A rank that drops a call because it does not need the result would leave the others waiting.
    equation = given[-1]  # JAX 0.12 says also which inputs are used elsewhere
    return [True] * len(equation.invars), equation


mlir.register_lowering(primitive, _on_cpu, platform="cpu", cacheable=False)
mlir.register_lowering(primitive, _on_cuda, platform="cuda", cacheable=False)
mlir.register_lowering(primitive, _elsewhere, cacheable=False)
partial_eval.dce_rules[primitive] = _kept
