"""Scripts that the launcher runs on several ranks, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def output_of(
    script: Path,
    *arguments: object,
    np: int,
    timeout: float = 300,
    flags: Sequence[str] = (),
    with_errors: bool = False,
    status: int = 0,
) -> str:
    """What `horovodish run -np NP FLAGS python SCRIPT ARGUMENTS` prints.

    Args:
        script: a Python file.
        arguments: of the script.
        np: the number of ranks; 0 to run the script without the launcher.
        timeout: in seconds.
        flags: of the launcher.
        with_errors: give what it writes to stderr, too, behind the rest.
        status: with which it must end.
    """
    launcher = [sys.executable, "-m", "horovodish.launcher", "run", "-np", str(np), *flags] if np else []
    command = [*launcher, sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished.stdout + (finished.stderr if with_errors else "")
