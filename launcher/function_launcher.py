"""The launcher of `horovodish.run()`: `python -m horovodish.launcher.function_launcher CALLER FOLDER RUN_ARGUMENTS...`

It is a process of its own, because a launcher takes signals and the main thread, and it ends when its caller does.
"""

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.cli import request
from horovodish.launcher.flags import run_parser
from horovodish.launcher.function_files import write
from horovodish.launcher.run import run

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(caller: int, folder: Path, arguments: list[str]) -> int:
    """Runs the ranks and returns the exit status of the job. Removes the folder if the caller cannot."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        # The caller may have ended before the kernel was told to watch it.
        return run(request(run_parser().parse(arguments), os.environ), os.environ) if os.getppid() == caller else 1
    except (LaunchError, SettingError) as problem:
        write(folder, problem)
        return 1
    finally:
        if os.getppid() != caller:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
