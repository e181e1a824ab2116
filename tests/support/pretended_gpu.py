"""GPUs that are not there: CUDA's and NCCL's functions over host memory, and what a rank does with them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import horovodish as hvd
from horovodish import _native
from horovodish.collectives import devices
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle, submit
from support.sources import CSRC, ROOT

_SOURCES = [ROOT / "tests/native" / name for name in ("host_cuda.cc", "host_nccl.cc", "host_stream.h")]


@functools.cache
def library() -> Path:
    """The library, compiled if its sources have changed."""
    text = b"".join(source.read_bytes() for source in _SOURCES)
    built = ROOT / "build" / f"pretended-gpu-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        sources = [str(source) for source in _SOURCES if source.suffix == ".cc"]
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", str(unfinished)]
        subprocess.run(["g++", *options, *sources, "-lpthread"], check=True)
        unfinished.rename(built)
    return built


def variables(gpus: int, **more: str) -> dict[str, str]:
    """What a rank's environment needs for that many pretended GPUs."""
    path = str(library())
    return {"HOROVODISH_TEST_CUDA": path, "HOROVODISH_TEST_NCCL": path, "PRETEND_GPUS": str(gpus), **more}


class Stream:
    """A stream of the pretended CUDA."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["HOROVODISH_TEST_CUDA"])
        self._library.pretend_stream.restype = ctypes.c_void_p
        self.handle: int = self._library.pretend_stream()

    def hold(self, held: bool) -> None:
        """Keeps it from doing what it is given, or no longer."""
        self._library.pretend_hold(ctypes.c_void_p(self.handle), int(held))

    def wait(self) -> None:
        """Blocks until it has done what it was given."""
        self._library.pretend_wait(ctypes.c_void_p(self.handle))

    def capture(self, capturing: bool) -> None:
        """Says that a CUDA graph is being captured from it."""
        self._library.pretend_capture(ctypes.c_void_p(self.handle), int(capturing))

    def add(self, array: Any, summand: float) -> None:
        """Adds to float32 values when the stream gets there."""
        address = ctypes.c_void_p(array.ctypes.data)
        self._library.pretend_add(
            ctypes.c_void_p(self.handle), address, ctypes.c_size_t(array.size), ctypes.c_float(summand)
        )


class Gpu:
    """This rank's pretended GPU: collectives of NumPy arrays as if their memory were its."""

    def __init__(self, ordinal: int | None = None) -> None:
        self.ordinal = hvd.local_rank() if ordinal is None else ordinal
        self.stream = Stream()
        devices.use(self.ordinal, "a test's tensor")

    def submit(
        self, kind: str, sources: Sequence[Any], targets: Sequence[Any | None], name: str, **options: Any
    ) -> Handle[list[Any]]:
        described = []
        for source, target in zip(sources, targets, strict=True):
            code = _native.DTYPES[str(source.dtype)]
            described.append((source.ctypes.data, 0 if target is None else target.ctypes.data, code, source.shape))
        stream = options.pop("stream", self.stream)
        allocates = targets[0] is None
        return submit(
            Operation(kind, name, **options),
            described,
            keep_alive=(sources, targets),
            result=functools.partial(self._received, sources, stream) if allocates else lambda _: list(targets),
            placement=devices.Placement(self.ordinal, lambda: stream.handle, is_staged=False),
        )

    def reduce(self, arrays: Sequence[Any], name: str, op: str = "Sum", **options: Any) -> list[Any]:
        """An allreduce in place of copies, and its result once the stream is done."""
        copies = [np.array(array) for array in arrays]
        handle = self.submit("allreduce", copies, copies, name, op=getattr(hvd, op), **options)
        return self.finish(handle)

    def allocated_bytes(self) -> int:
        """How much memory of this rank's GPU the engine has allocated."""
        library = ctypes.CDLL(os.environ["HOROVODISH_TEST_CUDA"])
        library.pretend_allocated_bytes.restype = ctypes.c_size_t
        return int(library.pretend_allocated_bytes())

    def communicators_destroyed(self) -> int:
        """How many of the rank's communicators have ended in order."""
        return int(ctypes.CDLL(os.environ["HOROVODISH_TEST_CUDA"]).pretend_destroyed())

    def finish(self, handle: Handle[Any]) -> Any:
        """The result, when the stream has come so far."""
        result = handle.wait()
        self.stream.wait()
        return result

    def _received(self, sources: Sequence[Any], stream: Stream, native: _native.Handle) -> list[Any]:
        results = []
        for index, source in enumerate(sources):
            result = np.empty((sum(native.rows(index)), *source.shape[1:]), source.dtype)
            native.move_output(index, result.ctypes.data, stream.handle)
            results.append(result)
        return results
