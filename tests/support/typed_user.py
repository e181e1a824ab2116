"""What a type checker knows of a user's imports. `make types` checks it, with every `Any` refused; nothing runs it."""

import horovodish
import horovodish.jax
import horovodish.keras
import horovodish.mlx
import horovodish.tensorflow
import horovodish.torch
from horovodish.jax import rank as rank_in_jax
from horovodish.keras import rank as rank_in_keras
from horovodish.tensorflow import rank as rank_in_tensorflow
from horovodish.torch import DuplicateNameError
from horovodish.torch import rank as rank_in_torch
from horovodish.torch.mpi_ops import size as size_in_mpi_ops


def answers() -> list[int]:
    try:
        return [rank_in_jax(), rank_in_keras(), rank_in_tensorflow(), rank_in_torch(), size_in_mpi_ops()]
    except DuplicateNameError:
        return [horovodish.rank(), horovodish.jax.size(), horovodish.keras.size(), horovodish.mlx.size()]


def results() -> list[list[int]]:
    return horovodish.run(answers, num_proc=2) or horovodish.torch.run(answers, num_proc=2)


def wrong_options() -> None:
    """An option that a function does not take, and a value of a wrong type."""
    horovodish.keras.DistributedOptimizer(None, gruops=2)  # type: ignore[call-arg]
    horovodish.keras.DistributedOptimizer(None, groups=2, op="mean")  # type: ignore[arg-type]
