"""Links and GPUs by name. `source` is the page of the standard or of the vendor; empty where none was found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "INSIDE", "LINKS", "Gpu", "Link"]


@dataclass(frozen=True)
class Link:
    """A link of a host.

    Attributes:
        gbit: Gbit/s in each direction.
        microseconds: of a message. The names of links do not say it: these are round numbers for MPI over TCP, over
            verbs and over EFA, so measure yours.
        source: of the rate.
    """

    gbit: float
    microseconds: float
    source: str = ""

    @property
    def bandwidth(self) -> float:
        """Bytes per second in each direction."""
        return self.gbit * 1e9 / 8

    @property
    def latency(self) -> float:
        """Seconds of a message."""
        return self.microseconds * 1e-6


_BY = "https://www.ieee802.org/3/by/P802_3by_Objectives.pdf"
_BS = "https://www.ieee802.org/3/bs/NGOATH_3bs_Objectives_16_0122.pdf"
_IBTA = "https://www.infinibandta.org/infiniband-roadmap-reflects-industry-demand-for-increased-speed-flexibility/"

LINKS = {
    "ethernet-1g": Link(1, 50),
    "ethernet-10g": Link(10, 30),
    "ethernet-25g": Link(25, 20, _BY),
    "ethernet-100g": Link(100, 10),
    "ethernet-200g": Link(200, 10, _BS),
    "ethernet-400g": Link(400, 10, _BS),
    "infiniband-edr": Link(100, 2),
    "infiniband-hdr": Link(200, 2, _IBTA),
    "infiniband-ndr": Link(400, 2, _IBTA),
    "efa-400g": Link(400, 15),
    "efa-3200g": Link(3200, 15),
}
"""Between hosts."""

_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"


@dataclass(frozen=True)
class Inside:
    """The connection of the GPUs of a host.

    Attributes:
        bandwidth: of a GPU, bytes per second in each direction: half of what the vendor counts.
        source: of it.
    """

    bandwidth: float
    source: str

    def reduced(self, ranks: int) -> float:
        """Bytes per second of an allreduce of n ranks. Each rank sends 2 (n - 1) / n of the bytes."""
        return self.bandwidth * ranks / (2 * max(1, ranks - 1))


INSIDE = {
    "pcie-4": Inside(32e9, _A100),
    "pcie-5": Inside(64e9, _H200),
    "nvlink-3": Inside(300e9, _A100),
    "nvlink-4": Inside(450e9, _H100),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        memory: bytes.
        flops: floating point operations per second in bfloat16, without sparsity; for V100 in float16, since it has no
            bfloat16.
        bandwidth: of its memory, bytes per second.
        source: of all three.
    """

    memory: float
    flops: float
    bandwidth: float
    source: str


GPUS = {
    "v100": Gpu(32e9, 125e12, 900e9, _V100),
    "a100": Gpu(80e9, 312e12, 2039e9, _A100),
    "h100": Gpu(80e9, 989e12, 3.35e12, _H100),
    "h200": Gpu(141e9, 989e12, 4.8e12, _H200),
}
"""SXM modules; the A100 is that with 80 GB."""
