"""`DistributedOptimizer`: an optimizer that uses the gradients of all ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovodish.gradients.options import GradientOptions, KerasOptions, not_wrapped, takes
from horovodish.gradients.plan import GradientPlan
from horovodish.tensorflow.gradients import plan_of, reduced_gradients
from horovodish.tensorflow.tracing import as_written, in_graph_for_sessions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer"]

Optimizer: Any = tf.compat.v1.train.Optimizer


@takes(
    KerasOptions,
    "compression sparse_as_dense backward_passes_per_step op gradient_predivide_factor "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    *in_order: object,
    **options: Unpack[KerasOptions],
) -> Any:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point; does not block.

    Takes Keras optimizers, as `horovodish.keras.DistributedOptimizer` does, and optimizers of `tf.compat.v1.train`:
    their `compute_gradients()` then gives reduced gradients, and `minimize()` uses them. The optimizer is the same
    object afterwards, of a subclass of its class. Only Keras optimizers take
    `backward_passes_per_step` above 1, and `sync`.

    Args:
        optimizer: a `keras.Optimizer` or a `tf.compat.v1.train.Optimizer`.
        name, use_locking, device_dense, device_sparse: Horovod's; they have no meaning here.
        options: see `KerasOptions`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: arguments that do not go together, or an optimizer that is wrapped already.
        TypeError: no optimizer.

        The step raises the errors of `allreduce`.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    """
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return importlib.import_module("horovodish.keras").DistributedOptimizer(optimizer, **options)
    if not isinstance(optimizer, Optimizer):
        raise not_wrapped("DistributedOptimizer", "a keras.Optimizer or a tf.compat.v1.train.Optimizer", optimizer)
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    distributed: Any = optimizer
    checked = GradientOptions.checked(**options)
    if checked.passes > 1:
        raise ValueError(
            f"backward_passes_per_step={checked.passes} needs a Keras optimizer, and this {type(optimizer).__name__} "
            "is one of tf.compat.v1.train. Add up the gradients of the plain optimizer in variables, and apply "
            "hvd.grouped_allreduce() of the sums when the window is complete"
        )
    if checked.sync is not None:
        raise ValueError(
            f"sync= needs a Keras optimizer, and this {type(optimizer).__name__} is one of tf.compat.v1.train. Remedy: "
            "use one of keras.optimizers"
        )
    distributed._plan = plan_of(checked)
    distributed.__class__ = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    return optimizer


class _Distributed(Optimizer):
    _plan: GradientPlan

    def register_local_var(self, variable: Any) -> None:
        """The gradient of `variable` stays this rank's."""
        self._plan.local.append(variable)

    @as_written
    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks and their variables. Collective."""
        pairs = super().compute_gradients(*arguments, **options)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        return list(zip(reduced_gradients(gradients, variables, self._plan), variables, strict=True))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
        """As the wrapped optimizer's. A graph for sessions writes nothing before all gradients have come."""
        pairs = list(grads_and_vars)
        arrived = [gradient for gradient, _ in pairs if gradient is not None] if in_graph_for_sessions() else []
        with tf.control_dependencies(arrived):
            return super().apply_gradients(pairs, *arguments, **options)
