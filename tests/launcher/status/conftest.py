"""Jobs that hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

NAME = f"hang_{os.getpid()}"
"""The name of the script. Jobs of other tests, which run at the same time, have other names."""
TESTS = Path(__file__).parents[2]
PRELUDE = """
import ctypes, os, signal, sys, time
import numpy as np
import horovodish as hvd
from horovodish.runtime import basics

def call(name="layer.weight"):
    hvd.allreduce(np.zeros(3), name=name)

def begin():
    hvd.init()
    call("before")
    basics.engine().begin_step()

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
"""


@pytest.fixture
def hang(launch: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A function that starts 3 ranks of a script."""

    def start(code: str, *, plane: str = "auto", flags: Sequence[str] = (), **variables: str) -> Any:
        script = tmp_path / f"{NAME}.py"
        script.write_text(PRELUDE + code)
        paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        env = {"HOROVODISH_PLANE": plane, "HOROVODISH_STALL_CHECK": "0", "PYTHONPATH": paths, **variables}
        return launch("run", "-np", "3", *flags, sys.executable, str(script), env=env)

    return start
