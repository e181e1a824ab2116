"""Gradient tapes that give gradients reduced over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from horovodish.gradients.lone_steps import Count, LoneSteps, calls_of
from horovodish.gradients.options import GradientOptions, TapeOptions, not_wrapped, takes
from horovodish.gradients.plan import GradientPlan
from horovodish.tensorflow.gradients import plan_of, reduced_gradients
from horovodish.tensorflow.tracing import as_written

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

Tape = TypeVar("Tape", bound=tf.GradientTape)


@as_written
@takes(
    TapeOptions,
    "compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set scale_local_gradients",
)
def DistributedGradientTape(  # noqa: N802, Horovod's name
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    *in_order: object,
    **options: Unpack[TapeOptions],
) -> Tape:
    """Make `gradtape.gradient()` give the gradients of all ranks. Every rank must call that equally often.

    The tape is the same object afterwards. It may have recorded already, or not yet. In a `tf.function` gradients
    travel while others are still computed. In a world of one rank, and on a rank outside `process_set`, it does what
    it did before.

    A gradient that is None on every rank stays None. Where only some ranks have one, the others contribute zeros when
    executing eagerly; in a function, where it is settled when that is traced, the ranks must have the same ones. The
    slices of IndexedSlices are gathered, unless `sparse_as_dense` is set; their `op` is `Average` or `Sum`.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse: Horovod's, without effect here: TensorFlow chooses where operations run.
        options: see `TapeOptions`.

    Returns:
        `gradtape`, with one more method: after `register_local_source(variable)` the gradient of that variable stays
        this rank's. `jacobian()` and `batch_jacobian()` are refused.

    Raises:
        ValueError: arguments that do not go together, or a tape that is wrapped already.
        TypeError: `gradtape` is no tape.

        `gradient()` raises the errors of `allreduce`.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(labels, model(inputs))
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    checked = GradientOptions.checked(**options)
    if not isinstance(gradtape, tf.GradientTape):
        raise not_wrapped("DistributedGradientTape", "a tf.GradientTape", gradtape)
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is wrapped already; wrap a tape once")
    distributed: Any = gradtape
    distributed._plan = plan_of(checked)
    distributed.__class__ = type(type(gradtape).__name__, (_Distributed, type(gradtape)), {})
    return gradtape


@as_written
@takes(
    TapeOptions,
    "compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set local_layers "
    "scale_local_gradients",
)
def PartialDistributedGradientTape(  # noqa: N802, Horovod's name
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    *in_order: object,
    local_layers: Any = None,
    **options: Unpack[TapeOptions],
) -> Tape:
    """As `DistributedGradientTape`, but the gradients of some layers are not reduced, such as a sharded embedding's.

    Args:
        local_layers: a Keras layer or `tf.Module`, or a list of them, whose trainable variables are local sources.

    The other arguments, the result and the errors are as for `DistributedGradientTape`.

    Example:
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=[sharded_embedding])
    """
    layers = local_layers if isinstance(local_layers, list | tuple) else [local_layers]
    for layer in layers:
        if layer is not None and not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers must be layers with trainable_variables, not {type(layer).__name__}")
    wrapped: Any = DistributedGradientTape(gradtape, **options)
    for layer in layers:
        for variable in [] if layer is None else layer.trainable_variables:
            wrapped.register_local_source(variable)
    return wrapped


class _Distributed(tf.GradientTape):
    _plan: GradientPlan

    def register_local_source(self, source: Any) -> None:
        """The gradient of `source` stays this rank's."""
        self._plan.local.append(source)

    @as_written
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """As `tf.GradientTape.gradient`, of all ranks. Collective; blocks when executing eagerly."""
        gradients = super().gradient(target, sources, *arguments, **options)
        reduced = reduced_gradients(tf.nest.flatten(gradients), tf.nest.flatten(sources), self._plan)
        return tf.nest.pack_sequence_as(sources, reduced)

    @as_written
    def jacobian(self, *arguments: Any, **options: Any) -> Any:
        """Refused: it asks for many gradients at once, and each would be reduced."""
        raise NotImplementedError(
            "a wrapped tape has no jacobian() and no batch_jacobian(): use a tape that is not wrapped for the Jacobian "
            "of this rank's values, and reduce what you compute from it with hvd.allreduce"
        )

    batch_jacobian = jacobian


def _watch(count: Count) -> Callable[[], object]:
    def before(tape: tf.GradientTape, target: Any, sources: Any, *_: object, **__: object) -> None:
        if not isinstance(tape, _Distributed):
            count("tf.GradientTape", lambda: _bytes_of_variables(tf.nest.flatten(sources)))

    return calls_of(tf.GradientTape, "gradient", before)


def _bytes_of_variables(sources: list[Any]) -> int:
    variables = [tf.convert_to_tensor(each) for each in sources if hasattr(each, "assign")]
    return sum(each.shape.num_elements() * each.dtype.size for each in variables)


_lone_steps = LoneSteps(
    _watch,
    "tape = hvd.DistributedGradientTape(tape), or hvd.DistributedOptimizer(optimizer) with Keras",
    traced=True,
)
