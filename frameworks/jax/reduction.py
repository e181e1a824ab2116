"""How a tree of gradients is reduced: in buckets, compressed, by all ranks of a process set or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovodish.compression import Compressor, check_compression
from horovodish.jax.collective import Collective
from horovodish.jax.trees import Leaves, decompressed, named, run_fused
from horovodish.process_sets import ProcessSet, check_kind
from horovodish.reduce_ops import Average, ReduceOp, chosen_op


@dataclass(frozen=True)
class Reduction:
    """An allreduce of trees whose leaves are fused."""

    call: Collective
    compression: Compressor

    @staticmethod
    def named(
        what: str,
        name: str | None,
        op: ReduceOp,
        compression: Compressor,
        gradient_predivide_factor: float,
        process_set: ProcessSet,
    ) -> Reduction:
        """Checks the arguments that optimizers and gradient functions share.

        Raises:
            ValueError: an `op` or `compression` that is none, or a predivide factor that is not positive or without
                `Average`.
            TypeError: `process_set` is no process set.
        """
        op = chosen_op(None, op)
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
        if gradient_predivide_factor <= 0:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is not positive")
        check_compression(compression)
        check_kind(process_set)
        call = Collective(
            **{**named(what, name), "kind": "allreduce"},
            op=op,
            prescale_factor=1.0 / gradient_predivide_factor,
            postscale_factor=float(gradient_predivide_factor),
            process_set=process_set,
        )
        return Reduction(call, compression)

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with: it is the only one, or outside the process set."""
        process_set = self.call.process_set
        return process_set.size() == 1 or not process_set.included()

    def __call__(self, tree: Any) -> Any:
        """The reduced tree; collective."""
        return tree if self.alone else reduce_tree(tree, self.call, self.compression)


def reduce_tree(tree: Any, call: Collective, compression: Compressor) -> Any:
    """An allreduce of a tree in buckets. Collective."""
    leaves, contexts = Leaves.of(tree, call, call.op).compressed(compression)
    return leaves.definition.unflatten(decompressed(run_fused(leaves, call), contexts, compression))
