"""PowerSGD: the gradient of a matrix travels as two thin factors of an approximation, by two plain allreduces.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, https://arxiv.org/abs/1905.13727. The linear algebra is written for every framework with NumPy's names.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import numpy as np

from horovodish.collectives.codecs import CodecCompressor, Where
from horovodish.collectives.operation import Operation

__all__ = ["LowRank", "PowerSGD", "approximated", "powersgd"]

Reduce = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class PowerSGD(CodecCompressor):
    """PowerSGD and its options. It is no code of the engine: a shim multiplies matrices, and the engine adds factors.

    Attributes:
        rank: how many columns a factor has.
    """

    kind: str = "powersgd"
    rank: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rank, bool) or not isinstance(self.rank, SupportsIndex) or self.rank < 1:
            raise ValueError(f"Compression.powersgd({self.rank!r}): the rank must be a whole number, 1 or more")

    def __repr__(self) -> str:
        return f"Compression.powersgd({self.rank})"

    def of(self, name: str, shape: tuple[int, ...], owner: str = "") -> None:
        """None: the engine encodes nothing."""

    def matrix(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The rows and columns that a parameter has as a matrix; None if its gradient travels as it is.

        Of all places to cut the dimensions in two, it takes the one with the shortest factors.
        """
        cuts = [(math.prod(shape[:place]), math.prod(shape[place:])) for place in range(1, len(shape))]
        rows, columns = min(cuts, key=sum, default=(0, 0))
        is_shorter = (rows + columns) * self.rank < rows * columns
        return (rows, columns) if is_shorter and self.chooses(name, shape) else None

    def label(self) -> str:
        """The options, for a parameter's name, so that ranks whose options differ get a MismatchError."""
        return f"{self!r}, start={self.start}, error_feedback={bool(self.error_feedback)}"

    def applied(self, operation: Operation) -> NoReturn:
        """Raise ValueError: a single tensor has no next step that brings what was left out."""
        raise ValueError(f"compression={self!r} is for DistributedOptimizer; use Compression.int8 here")


def powersgd(rank: int = 2, *, error_feedback: bool = True, start: int = 0, where: Where | None = None) -> PowerSGD:
    """PowerSGD with this many columns in each factor, and with the options of a codec."""
    return PowerSGD("powersgd", 0.0, error_feedback, start, where, rank)


class LowRank(NamedTuple):
    """The state of one parameter between steps.

    Attributes:
        error: what it has given and no approximation has had yet; shape (m, n), float32. None without feedback.
        factor: the columns of the second factor, as an orthonormal basis; shape (n, r).
        draw: random numbers, the same on every rank; shape (n, r).
    """

    error: Any
    factor: Any
    draw: Any

    @staticmethod
    def begun(framework: Any, power: PowerSGD, name: str, shape: tuple[int, ...], **place: Any) -> LowRank:
        """Before the first step. `place` is for the framework, such as `device=`."""
        matrix = power.matrix(name, shape)
        assert matrix is not None
        random = np.random.default_rng(zlib.crc32(name.encode()))
        draw = framework.asarray(random.standard_normal((matrix[1], power.rank), np.float32), **place)
        return LowRank(framework.zeros(matrix, **place) if power.error_feedback else None, draw, draw)


class Algebra:
    """The arithmetic of a step on whole matrices. The results are new arrays.

    Attributes:
        framework: a module with NumPy's names, `torch` or `jax.numpy`.
    """

    def __init__(self, framework: Any):
        self.framework = framework

    def total(self, gradient: Any, error: Any, columns: int) -> Any:
        """The sum of a gradient and the error of the steps before, as a matrix in float32."""
        matrix = self.framework.asarray(gradient, dtype=self.framework.float32).reshape(-1, columns)
        return matrix if error is None else matrix + error

    def rest(self, total: Any, basis: Any, own: Any, error: Any, finite: Any) -> Any:
        """The error of two factors as an approximation of a total; the earlier error if they are not finite."""
        return self.framework.where(finite, total - basis @ own.T, error)

    def product(self, basis: Any, second: Any, gradient: Any, finite: Any) -> Any:
        """The product of two factors, as the gradient is; NaN if they are not finite."""
        product = basis @ self.framework.where(finite, second, math.nan).T
        return self.framework.asarray(product, dtype=gradient.dtype).reshape(gradient.shape)


def approximated(
    algebra: Algebra, gradients: dict[str, Any], kept: dict[str, LowRank], reduce: Reduce
) -> tuple[dict[str, Any], dict[str, LowRank]]:
    """Approximations of gradients of all ranks, and the errors to keep for the next step. Collective.

    Every rank computes the same results from the same factors. If a gradient is not finite on a rank, the result is NaN
    on all ranks, and the kept error does not change.

    Args:
        algebra: of the framework.
        gradients: of this rank, by the parameter's name.
        kept: of these parameters.
        reduce: an allreduce. It gets "first" or "second", and this rank's factors by the parameter's name.
    """
    framework = algebra.framework
    given = {
        name: algebra.total(gradient, kept[name].error, len(kept[name].factor)) for name, gradient in gradients.items()
    }
    firsts = reduce("first", {name: matrix @ kept[name].factor for name, matrix in given.items()})
    # Householder's QR is orthonormal whatever the rank of the factor is; dividing by norms is not.
    bases = {name: framework.linalg.qr(first)[0] for name, first in firsts.items()}
    own = {name: matrix.T @ bases[name] for name, matrix in given.items()}
    results, following = {}, {}
    for name, second in reduce("second", own).items():
        (error, factor, draw), gradient, basis = kept[name], gradients[name], bases[name]
        finite = framework.isfinite(second).all()
        if error is not None:
            # This rank's own factors leave it out, as in algorithm 2. What the reduced factors leave out has the
            # differences of the ranks, which would add up from step to step.
            error = algebra.rest(given[name], basis, own[name], error, finite)
        # A column of zeros would stay one, so it is drawn anew. Beside other columns the draw is too small to count.
        factor = framework.where(finite, framework.linalg.qr(second + 1e-30 * draw)[0], factor)
        following[name] = LowRank(error, factor, draw)
        results[name] = algebra.product(basis, second, gradient, finite)
    return results, following
