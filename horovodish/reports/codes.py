"""The effect of codecs on each tensor: the bytes saved, the time spent, and the encoding error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovodish import _native
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.reports.durations import text_of_seconds
from horovodish.runtime import basics

__all__ = ["CompressionReport", "TensorCodes", "compression_report"]

_SHOWN_TENSORS = 32
_CALLS = "calls of allreduce"
_CODECS = {number: kind for kind, number in _native.CODECS.items()}


@dataclass(frozen=True)
class TensorCodes:
    """Figures of one tensor that this rank has encoded.

    Attributes:
        name: of the parameter, or its number where it has no name. All calls of `allreduce` with one codec count as one
            tensor.
        owner: the optimizer or tape that reduces it; empty for calls of `allreduce`.
        codec: such as "int8" or "topk(0.01)".
        steps: in how many steps it was encoded; of calls, how many tensors.
        value_bytes: the values that this rank has sent to other hosts, before they were encoded.
        code_bytes: the same after they were encoded, which is what travelled.
        encode_seconds: how long this rank has encoded, error feedback included.
        decode_seconds: how long it has decoded and added.
        error: the norm of what the codes have left out over the norm of this rank's gradient, in the first encoded step
            or the last hundredth one after it. With error feedback this is what the next step adds. NaN if the gradient
            was zero or had no finite values.
    """

    name: str
    owner: str
    codec: str
    steps: int
    value_bytes: int
    code_bytes: int
    encode_seconds: float
    decode_seconds: float
    error: float

    @property
    def ratio(self) -> float:
        """How many times shorter the codes are; NaN if this rank has sent none of the tensor."""
        return self.value_bytes / self.code_bytes if self.code_bytes else math.nan


@dataclass(frozen=True)
class CompressionReport:
    """Figures of the tensors that this rank has encoded; `str()` gives a table, the tensor with most bytes first.

    Attributes:
        tensors: those that were encoded, by owner and name.
        hosts: on how many hosts the ranks of the process set are.
    """

    tensors: tuple[TensorCodes, ...]
    hosts: int

    def __str__(self) -> str:
        if self.hosts == 1:
            return "nothing is encoded: all ranks are on one host, and codes travel between hosts only"
        if not self.tensors:
            return (
                "nothing was encoded: no tensor was reduced with a codec, or Compression.auto chose none, or the first"
                " start= steps are not over, or no parameter is large enough; where= chooses others"
            )
        values, codes = (sum(getattr(one, each) for one in self.tensors) for each in ("value_bytes", "code_bytes"))
        most_first = sorted(self.tensors, key=lambda one: one.value_bytes, reverse=True)
        shown = most_first[:_SHOWN_TENSORS]
        width = max(len(one.name) for one in shown)
        lines = [
            f"what this rank sent to other hosts: {codes / 1e6:.1f} MB instead of {values / 1e6:.1f}",
            f"  {'tensor':<{width}}  codec         steps        MB   ratio    encode    decode   error",
        ]
        for one in shown:
            seconds = "".join(f"{text_of_seconds(its):>10}" for its in (one.encode_seconds, one.decode_seconds))
            lines.append(
                f"  {one.name:<{width}}  {one.codec:<13}{one.steps:>6}{one.value_bytes / 1e6:>10.1f}{one.ratio:>8.1f}"
                f"{seconds}{one.error:>8.2g}"
            )
        if len(most_first) > _SHOWN_TENSORS:
            lines.append(f"  and {len(most_first) - _SHOWN_TENSORS} more tensors with fewer bytes")
        return "\n".join(lines)


def compression_report(process_set: ProcessSet = global_process_set) -> CompressionReport:
    """Report the effect of codecs such as `Compression.int8`, by tensor, since `init()` or the set was added.

    Not collective: any rank may call it at any time. A rank reports the values that it has encoded itself. If a host
    has several ranks, these are a part of each tensor. Norms are measured in one step of a hundred.

    If an optimizer is not used any more while another one trains, the report drops its tensors, and memory their
    errors, at the latest when another tensor has been reduced 2000 times. If a tensor is used again after 1000 steps or
    more of another one, it may begin again, with errors of zero and `start=` steps without a codec.

    Args:
        process_set: the ranks that reduce the tensors.

    Returns:
        The report.

    Raises:
        ValueError: the set is not in use, or this rank is outside it.
        NotInitializedError: before `init()`.

    Example:
        >>> print(hvd.compression_report())
        what this rank sent to other hosts: 380.0 MB instead of 1496.7
          tensor    codec         steps        MB   ratio    encode    decode   error
          2.weight  int8             35     587.2     3.9    373 ms    358 ms  0.0086
          4.weight  int8             35     587.2     3.9    539 ms    416 ms    0.01
          0.weight  int8             35     293.6     3.9    171 ms    176 ms  0.0086
          6.weight  int8             35      28.7     3.9   12.2 ms   24.4 ms   0.012
    """
    identity = checked_id(process_set)
    running = basics.running()
    hosts = sum(any(rank in process_set.ranks for rank in ranks) for ranks in running.engine_topology.hosts)
    tensors = tuple(
        TensorCodes(
            name.removeprefix(owner).lstrip("., ") or _CALLS,
            owner,
            _CODECS[kind] + (f"({share})" if share else ""),
            steps,
            round(value_bytes),
            round(code_bytes),
            encode_seconds,
            decode_seconds,
            math.sqrt(error / gradient) if gradient else math.nan,
        )
        for owner, name, kind, share, steps, figures in running.engine.code_reports(identity)
        for value_bytes, code_bytes, encode_seconds, decode_seconds, gradient, error in [figures]
    )
    return CompressionReport(tensors, hosts)
