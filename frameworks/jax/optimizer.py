"""`DistributedOptimizer`: an optax optimizer that uses the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax

from horovodish.collectives.reduce_ops import Adasum
from horovodish.gradients.lone_steps import Count, LoneSteps, calls_of
from horovodish.gradients.options import GradientOptions, JaxOptions, not_wrapped, takes
from horovodish.gradients.powersgd import PowerSGD
from horovodish.jax.accumulation import accumulating
from horovodish.jax.gradients import TreePlan
from horovodish.jax.low_rank import approximating
from horovodish.jax.shards.transformation import sharded
from horovodish.jax.sync import SyncTransformation, meeting

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer"]


@takes(JaxOptions)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    tx: optax.GradientTransformation, *, name: str | None = None, **options: Unpack[JaxOptions]
) -> optax.GradientTransformationExtraArgs:
    """Make `tx` use the gradients of all ranks. This call is not collective, but `update` is.

    The result is an optax transformation: `optax.chain`, `optax.MultiSteps` and `optax.inject_hyperparams` take it,
    inside and outside of jit. `update` reduces the gradients in buckets and passes them to `tx`. Inside jit, a bucket
    is reduced while the rest of the backward pass is computed. In a chain, transformations before it, such as clipping,
    see this rank's gradients; transformations after it see the updates of `tx`. To clip reduced gradients, wrap the
    chain: `DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), tx))`.

    - The state is the state of `tx`, so it can come from a checkpoint of a run without horovodish. Options for which
      this is not so say below what the state is.
    - In a job of one rank, and on a rank outside `process_set`, nothing is reduced.
    - With `backward_passes_per_step=n` a rank adds up the gradients of n calls. The n-th call reduces the sum, which is
      not divided by n. The other calls return updates of zero. The state then also has the sum, in float32 if
      parameters are float16 or bfloat16. `optax.MultiSteps` around it steps with the mean, but reduces in every call.
    - The first reduction compares the parameters that you pass to `update`. Rank 0 warns if they differ.
    - `tx` gets the other arguments of `update` unchanged, and all ranks must decide alike. A transformation that uses a
      loss, such as `optax.contrib.reduce_on_plateau`, needs the reduced loss. Put a transformation that looks at
      gradients, such as `optax.apply_if_finite`, inside.
    - With `compression=Compression.powersgd(rank)` the state also has this rank's errors, and the factors.
    - With `op=Adasum` every rank takes its own step with its own gradients, and the updates of `tx` are combined. Each
      rank then has its own state of `tx`. Use the learning rate for one rank.
    - With `shard=` each rank has a part of the elements of every parameter. It gets the reduced gradients of its part
      and steps it. Then the updates are gathered. A rank keeps no other reduced gradients, so "states" and "gradients"
      are the same here. `init` needs `horovodish.jax.init()` first; with `shard_set=` it blocks, and every rank must
      call it. The state is this rank's part: see `full_state`. `tx` must step each element by itself, or with
      `shard_by="parameter"` each parameter. Its traced programs are checked for this. Use `clip_by_global_norm` of this
      module.
    - With `sync=` the ranks meet from time to time, and each rank takes its own steps in between, with its own
      gradients and its own state of `tx`. After a meeting the ranks' parameters are equal except for the rounding of
      the last sum, `params + updates`. `optimizer.synchronized(params, state)` returns parameters to evaluate or to
      save, with the same bits on every rank. `params, state = optimizer.end_round(params, state)` has a meeting now.
      Both are collective. The state also has the parameters of the beginning of the round, so a rank that saves its
      parameters and its state within a round can continue from there.

    Args:
        tx: any optax optimizer or transformation.
        name: the name of the reductions. Without it, the file and line of this call. Programs that run at the same time
            need optimizers of different names.
        options: see `JaxOptions`.

    Returns:
        An optax transformation with `init` and `update`.

    Raises:
        ValueError: an unknown `op` or `compression`, a predivide factor that is not positive or without `Average`, or
            passes per step that are not a whole number; with `shard=`, `op=Adasum`.
        TypeError: `tx` is not an optax transformation, or `process_set` is not a process set.

        `update` raises the errors of `horovodish.jax.collectives`, such as NotInitializedError before `init()`. With
        `shard=`, `init` and `update` raise ValueError if `tx` does not step each element, or each parameter, by itself,
        if the state is another rank's, or if the state or the gradients belong to other parameters.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optax.adamw(1e-3 * hvd.size()))
        >>> state = optimizer.init(parameters)
        >>> updates, state = optimizer.update(gradients, state, parameters)  # gradients of this rank's batch
        >>> parameters = optax.apply_updates(parameters, updates)
    """
    if not isinstance(tx, optax.GradientTransformation):
        remedy = "pass its gradient_transformation()" if isinstance(tx, optax.MultiSteps) else ""
        raise not_wrapped("DistributedOptimizer", "an optax.GradientTransformation", tx, remedy)
    checked = GradientOptions.checked(low_rank=True, **options)
    approximates = isinstance(checked.codec, PowerSGD)
    make = meeting if checked.sync else sharded if checked.shard else approximating if approximates else _reducing
    distributed = make(optax.with_extra_args_support(tx), TreePlan("optimizer", name, checked))
    if checked.passes == 1:
        return distributed
    accumulates = accumulating(distributed, checked.passes)
    return distributed.around(accumulates) if isinstance(distributed, SyncTransformation) else accumulates


def _reducing(tx: optax.GradientTransformationExtraArgs, reduce: TreePlan) -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if reduce.options.op is Adasum:
            changes, state = tx.update(updates, state, params, **extra)
            return reduce(changes, params), state
        changes, state = tx.update(reduce(updates, params), state, params, **extra)
        return changes, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _watch(count: Count) -> Callable[[], object]:
    def before(params: Any, updates: Any) -> None:
        count("optax", lambda: sum(leaf.nbytes for leaf in jax.tree.leaves(updates)))

    return calls_of(optax, "apply_updates", before)


_lone_steps = LoneSteps(_watch, "optimizer = hvd.DistributedOptimizer(optimizer), or hvd.grad", traced=True)
