"""`DistributedOptimizer`: a Keras optimizer that uses the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import counted
from horovodish.gradients.lone_steps import Count, LoneSteps, calls_of
from horovodish.gradients.options import GradientOptions, KerasOptions, not_wrapped, takes
from horovodish.gradients.plan import GradientPlan
from horovodish.keras.accumulation import Accumulation
from horovodish.keras.backends import gradients
from horovodish.keras.distribution import Distribution, distribute, distribution_of
from horovodish.keras.sync import Rounds

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]

BROADCAST_REMEDY = (
    "pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit(), or call "
    "hvd.broadcast_variables(model.variables, root_rank=0) before the first step"
)
IN_ORDER = (
    "compression sparse_as_dense gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients "
    "num_groups groups process_set scale_local_gradients"
)


@takes(KerasOptions, IN_ORDER)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    *in_order: object,
    **options: Unpack[KerasOptions],
) -> Any:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point.

    It does not block, except with `sync=Hierarchical("host")`.

    It works in `model.fit` and in your own loops, on Keras's TensorFlow, PyTorch and JAX backends, also in compiled
    steps. `apply`, `apply_gradients` and `stateless_apply` reduce the gradients first. Clipping, weight decay, moving
    averages and loss scaling then see reduced gradients.

    The optimizer stays the same object of the same class, with its variables and options. It is saved as an optimizer
    of this class, so a saved model can be loaded without horovodish. `hvd.load_model` wraps its optimizer again. There
    is one more method: with `register_local_var(variable)`, the gradients of a variable are not reduced, as with
    `PartialDistributedOptimizer`.

    Rules for gradients:

    - A gradient that is None on every rank stays None. If only some ranks have one, the others contribute zeros.
    - With `backward_passes_per_step=n`, a rank adds up the gradients of n-1 calls. The n-th call reduces the sum and
      updates the variables. A window that is not complete when `fit` ends continues in the next `fit`. It is not saved.
      Pass the same variables every time; in a `tf.function` the same variables must have gradients.
    - Keras's own `gradient_accumulation_steps` works, too, and reduces in every call.
    - Wrap before the first `fit`, or compile again: TensorFlow and JAX keep the step that they compiled, which reduces
      nothing. With any of `hvd.callbacks`, `fit` compiles it again.
    - Every rank must apply equally often. `hvd.callbacks` let `fit` have different numbers of batches.
    - For mixed precision wrap the scaling optimizer, `DistributedOptimizer(LossScaleOptimizer(optimizer))`. Where
      `compile` adds a LossScaleOptimizer by itself, `BroadcastGlobalVariablesCallback` does that.

    With `sync` the ranks meet from time to time, and each rank takes its own steps in between. So each rank has its own
    clipping, loss scaling and momentum. Variables must be equal on all ranks at the start, and are equal after a
    meeting. In a job of one rank nothing is reduced, but an outer optimizer steps. The optimizer has the progress of
    the round in its variables, so a `.keras` file has it, too. The optimizer has two more methods, for use outside of
    compiled programs:

        synchronized()        a context to evaluate or save in: the variables have the values that a meeting would
                              give them now. At its end each rank gets its own values back
        end_round()           meet now, as at the end of training. `fit` with any of `hvd.callbacks` does so at its end

    Args:
        optimizer: a `keras.optimizers.Optimizer`, built or not.
        name: the name of the reductions in messages and the timeline, unique on each rank. Without it, a number.
        device_dense, device_sparse: Horovod's, without effect here.
        options: see `KerasOptions`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: an unknown `op` or `compression`, a predivide factor that is not positive or without `Average`,
            passes per step that are not a whole number, invalid `groups`, a policy with fragments or an overlap, an
            optimizer that is wrapped already, or a process set that is not in use.
        TypeError: `optimizer` is no Keras optimizer, or `process_set` no process set.
        NotInitializedError: before `init()`.

        Applying raises the errors of `horovodish.collectives`, such as MismatchError.

    Example:
        >>> optimizer = keras.optimizers.Adam(0.001 * hvd.size())
        >>> model.compile(hvd.DistributedOptimizer(optimizer), loss="sparse_categorical_crossentropy")
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """
    if type(optimizer).__module__.startswith("tf_keras."):
        raise TypeError(
            f"DistributedOptimizer wraps optimizers of Keras 3, and this {type(optimizer).__name__} is one of Keras 2 "
            "(tf_keras): unset TF_USE_LEGACY_KERAS, or use hvd.DistributedGradientTape in a training loop of your own"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise not_wrapped("DistributedOptimizer", "a keras.optimizers.Optimizer", optimizer)
    if distribution_of(optimizer):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    checked = GradientOptions.checked(**options)
    checked.warn_of_one_bit(optimizer)
    process_set = checked.process_set
    what = name or ""
    if name is None:  # a rank outside the set never reduces, and counts for no other set
        number = counted("optimizer", checked_id(process_set)) if process_set.included() else 0
        what = f"optimizer {number}"
        name = f"gradients of {what}"
    checked.compare_before_sets()
    averages = checked.values["average_aggregated_gradients"]
    window = Accumulation(checked.passes, averages) if checked.passes > 1 else None
    plan = GradientPlan(checked, gradients(), remedy=BROADCAST_REMEDY)
    rounds = Rounds(f"changes of {what}", checked, gradients(), BROADCAST_REMEDY) if checked.sync else None
    distribution = Distribution(name, plan, window, rounds)
    distribute(optimizer, distribution)
    if rounds is not None and optimizer.built:
        distribution.learn(optimizer, optimizer._trainable_variables)
    return optimizer


@takes(KerasOptions, IN_ORDER)
def PartialDistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    *in_order: object,
    local_layers: Sequence[Any] | Any | None = None,
    **options: Unpack[KerasOptions],
) -> Any:
    """As `DistributedOptimizer`, but the gradients of some layers are not reduced.

    So each rank can train layers of its own, such as the shard of an embedding table.

    Args:
        optimizer: as for `DistributedOptimizer`; so are all other arguments.
        local_layers: a built layer or several. Their gradients are not reduced, but divided by the number of ranks
            unless `scale_local_gradients=False`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: a local layer has no variables yet; otherwise as `DistributedOptimizer`.

    Example:
        >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[model.layers[0]])
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(f"local_layers takes Keras layers, not {type(layer).__name__}")
        if not layer.built:
            raise ValueError(f"local_layers: {layer.name} is not built yet; build the model first")
    distributed = DistributedOptimizer(optimizer, name, **options)
    for layer in layers:
        for variable in layer.trainable_variables:
            distributed.register_local_var(variable)
    distributed._distribution.local += layers
    return distributed


def _watch(count: Count) -> Callable[[], object]:
    def before(optimizer: Any, grads: Any, *_: object, **__: object) -> None:
        if distribution_of(optimizer) is None:
            count(f"keras.optimizers.{type(optimizer).__name__}", lambda: _bytes_of(grads))

    return calls_of(keras.optimizers.Optimizer, "apply", before)


def _bytes_of(gradients: Sequence[Any]) -> int:
    """Their bytes in float32; a dimension may be unknown while a function is traced."""
    shapes = [tuple(each.shape) for each in gradients if each is not None]
    return sum(4 * math.prod(length or 1 for length in shape) for shape in shapes)


_lone_steps = LoneSteps(_watch, "pass hvd.DistributedOptimizer(optimizer) to compile()", traced=True)
