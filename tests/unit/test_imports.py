"""Importing horovodish is cheap: no framework, no MPI, no thread."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from horovodish.supported import FRAMEWORKS

HEAVY = [*FRAMEWORKS, "cloudpickle", "mpi4py", "sklearn", "yaml"]

PROBE = f"""
import json, os, sys
{{statement}}
loaded = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps({{{{"loaded": loaded, "threads": len(os.listdir("/proc/self/task"))}}}}))
"""


def after(statement: str) -> dict[str, Any]:
    """What is loaded, and how many threads run, in a fresh process after `statement`."""
    program = [sys.executable, "-c", PROBE.format(statement=statement)]
    # NumPy's own linear algebra starts threads unless it is told not to.
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "module",
    [
        "horovodish",
        "horovodish.collectives",
        "horovodish.runtime.basics",
        "horovodish.mpi.binding",
        "horovodish.launcher.cli",
    ],
)
def test_import_loads_no_framework_and_starts_no_thread(module: str) -> None:
    assert after(f"import {module}") == {"loaded": [], "threads": 1}


def test_the_core_loads_no_launcher() -> None:
    program = "import sys, horovodish; print([name for name in sys.modules if 'launcher' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"


def test_this_test_sees_a_module() -> None:
    assert after("import mpi4py")["loaded"] == ["mpi4py"]


def test_this_test_sees_a_thread() -> None:
    waits = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert after(waits)["threads"] == 2
