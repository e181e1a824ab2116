"""Commands that run this Python without the modules of the current folder.

`python -m` and `python -c` put the current folder first on `sys.path`, where the user's own `queue.py` or `numpy.py`
would be taken for the standard library's. The option -P against that needs Python 3.11, and Python 3.13 imports modules
before a program of -c has begun.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from horovodish import version

ANSWER_SECONDS = 60
_OPTIONS = ["-P"] if sys.version_info >= (3, 11) else []


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs as `python -m MODULE ARGUMENTS` does."""
    return [*program_command(f"import runpy; runpy.run_module('{module}', None, '__main__', True)"), *arguments]


def program_command(text: str) -> list[str]:
    """The command that runs as `python -c TEXT` does. `text` begins with a statement, not with an indentation.

    It finds this package last on `sys.path`, unless it is installed: a program of the user may have found it elsewhere.
    """
    parent = os.path.dirname(os.path.dirname(os.path.abspath(version.__file__)))
    return [sys.executable, *_OPTIONS, "-c", f"import sys; sys.path[:] = [*filter(None, sys.path), {parent!r}]; {text}"]


def answer(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The stdout and stderr of a command, and its exit status. The command reads nothing.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended within `ANSWER_SECONDS`, and was killed.
    """
    return subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ANSWER_SECONDS,
        check=False,
    )
