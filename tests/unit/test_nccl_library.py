"""Which NCCL is taken, and what is said about those that cannot be."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovodish import _native
from horovodish.collectives import devices
from horovodish.collectives.operation import Codec, Operation
from horovodish.collectives.reduce_ops import Adasum, Average, Max, Product, ReduceOp, Sum
from horovodish.launcher.report.check import nccl_hints
from horovodish.runtime import nccl_library
from support.pretended_gpu import library, variables

REMEDY = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, as torch.version.cuda says)"

USES = """
import horovodish as hvd
from horovodish.collectives import devices
hvd.init()
try:
    devices.use({ordinal}, "gradient of w")
except hvd.UnsupportedTensorError as problem:
    print(problem)
print(hvd.nccl_built())
"""


def said(ordinal: int = 0, **more: str) -> list[str]:
    """What a process says that uses a device for the first time."""
    environment = {"PATH": "/usr/bin", **variables(1), **more}
    command = [sys.executable, "-c", USES.format(ordinal=ordinal)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_keeps_a_process_from_using_a_gpu(tmp_path: Path) -> None:
    assert said() == ["22907"]
    [text, version] = said(PRETEND_NCCL_VERSION="2708")
    assert text == (
        f"gradient of w: CUDA tensors cannot be used: NCCL 2.7.8 of {library()} (HOROVODISH_TEST_NCCL) is too old, "
        f"2.18 or later is needed. Remedy: {REMEDY}"
    )
    assert version == "0"
    [text, _] = said(HOROVODISH_TEST_CUDA=str(tmp_path / "none"))
    assert text.startswith(f"gradient of w: CUDA tensors cannot be used: {tmp_path}/none: it does not load: ")
    [text, _] = said(ordinal=3)
    assert text.endswith("CUDA failed while the device was looked up: CUDA_ERROR_INVALID_DEVICE, of the library that "
                         "stands in for CUDA")  # fmt: skip


def test_the_order_of_the_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class File:
        name = "libnccl.so.2"

        def locate(self) -> Path:
            return tmp_path / self.name

    def files(wheel: str) -> list[File]:
        if wheel == "nvidia-nccl-cu12":
            return [File()]
        raise importlib.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(nccl_library, "_loaded", lambda: ["/torchs/libnccl.so.2"])
    monkeypatch.setattr(importlib.metadata, "files", files)
    assert list(nccl_library.candidates({})) == [
        ("/torchs/libnccl.so.2", "loaded already"),
        (str(tmp_path / "libnccl.so.2"), "nvidia-nccl-cu12"),
        ("libnccl.so.2", "the system's"),
    ]
    assert list(nccl_library.candidates({nccl_library.NCCL_VARIABLE: "/given"})) == [("/given", "HOROVODISH_TEST_NCCL")]


def test_the_advice_of_check() -> None:
    new = nccl_library.Found("libnccl.so.2", "the system's", (2, 29, 7))
    old = nccl_library.Found("libnccl.so.2", "the system's", (2, 17, 1))
    assert nccl_hints(None, None) == nccl_hints(new, (13, 0)) == []
    assert nccl_hints(None, (12, 4)) == ["CUDA tensors need NCCL 2.18 or later: pip install nvidia-nccl-cu12"]
    assert nccl_hints(old, (13, 0)) == [
        "CUDA tensors need NCCL 2.18 or later, and this is 2.17.1 libnccl.so.2 (the system's): install a newer one "
        "where it is from"
    ]


def test_what_nccl_cannot_do() -> None:
    def problem(op: ReduceOp, dtype: str, prescale: float = 1.0, postscale: float = 1.0, **options: Any) -> str:
        factors = {"prescale_factor": prescale, "postscale_factor": postscale}
        operation = Operation(**{"kind": "allreduce", "name": "x", "op": op, **factors, **options})
        return devices.problem_for_nccl(operation, [_native.DTYPES["float32"], _native.DTYPES[dtype]])

    assert problem(Sum, "bfloat16") == problem(Average, "float16") == problem(Product, "int64") == ""
    assert problem(Sum, "float32", 0.5, 3.0) == problem(Average, "float64", 1e-30) == ""
    assert problem(Sum, "bool", kind="allgather") == ""
    assert problem(Sum, "int16") == "NCCL does not reduce int16"
    assert problem(Adasum, "float32") == "NCCL has no Adasum"
    assert problem(Average, "int32") == "NCCL's average of integers counts joined ranks"
    assert problem(Max, "float32", 2.0) == "NCCL scales sums of floating-point numbers only"
    assert problem(Sum, "float16", 1e-6).endswith("loses digits of this factor")
    for kind in _native.CODECS.keys() - {"none"}:
        codec = Codec(_native.CODECS[kind], 0.5, True, 0)
        assert problem(Sum, "float32", codec=codec) == ("" if kind == "auto" else "codes are made in host memory")
        assert problem(Sum, "float32", codec=codec._replace(encodes=False)) == ""
