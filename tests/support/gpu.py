"""Tests that need a GPU: skipped with a reason where there is none, unless HOROVODISH_TEST_GPU=1 says there must be."""

from __future__ import annotations

import ctypes
import os

import pytest


def problem() -> str:
    """Why tests cannot use a GPU here; empty when they can."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver on this machine"
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver has no GPU"
    return ""


def needs_gpu() -> None:
    """Called first by a test with the marker `gpu`."""
    why = problem()
    if why and os.environ.get("HOROVODISH_TEST_GPU") == "1":
        pytest.fail(f"HOROVODISH_TEST_GPU=1, but {why}")
    if why:
        pytest.skip(f"{why}; on a machine with a GPU: make test-gpu")
