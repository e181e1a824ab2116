"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor
from horovodish.gradients.options import GradientOptions, Groups
from horovodish.gradients.plan import GradientPlan
from horovodish.tensorflow.compression import Compression
from horovodish.tensorflow.gradients import plan_of, reduced_gradients
from horovodish.tensorflow.tracing import as_written, in_graph_for_sessions

__all__ = ["DistributedOptimizer"]

Optimizer: Any = tf.compat.v1.train.Optimizer


def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point; does not block.

    Takes Keras optimizers, for which it is `horovodish.keras.DistributedOptimizer`, and those of
    `tf.compat.v1.train`, whose `compute_gradients()` then gives reduced gradients, and `minimize()` uses them. The
    optimizer is the same object afterwards, of a subclass of its class.

    Args:
        optimizer: a `keras.Optimizer` or a `tf.compat.v1.train.Optimizer`.
        name, use_locking, device_dense, device_sparse: Horovod's; they have no meaning here.
        compression, sparse_as_dense, op, gradient_predivide_factor: as for `DistributedGradientTape`.
        num_groups, groups, process_set, scale_local_gradients: as for `DistributedGradientTape`.
        backward_passes_per_step, average_aggregated_gradients: for Keras optimizers, as for
            `horovodish.keras.DistributedOptimizer`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: arguments that do not go together, or an optimizer that is wrapped already.
        TypeError: no optimizer.

        The step raises what `allreduce` raises.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    """
    shared: dict[str, Any] = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
        "backward_passes_per_step": backward_passes_per_step,
    }
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        keras = importlib.import_module("horovodish.keras")
        return keras.DistributedOptimizer(
            optimizer, average_aggregated_gradients=average_aggregated_gradients, **shared
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "DistributedOptimizer wraps a keras.Optimizer or a tf.compat.v1.train.Optimizer, not "
            f"{type(optimizer).__name__}; for gradients of your own, use DistributedGradientTape or allreduce"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    distributed: Any = optimizer
    options = GradientOptions.checked(**shared)
    if options.passes > 1:
        raise ValueError(
            f"backward_passes_per_step={options.passes} needs a Keras optimizer, and this {type(optimizer).__name__} "
            "is one of tf.compat.v1.train. Add up the gradients of the plain optimizer in variables, and apply "
            "hvd.grouped_allreduce() of the sums when the window is complete"
        )
    distributed._plan = plan_of(options)
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
