"""The launcher of `horovodish.run()`: `python -m horovodish.launcher.function.launcher CALLER FOLDER`

It is a process of its own, because a launcher takes signals and the main thread, and it ends when its caller does.
"""

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.function.files import OPTIONS, PROBLEM, read, write
from horovodish.launcher.run import run

PR_SET_PDEATHSIG = 1


def main(caller: int, folder: Path) -> int:
    """Runs the ranks and returns the exit status of the job. Removes the folder if the caller cannot."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        if os.getppid() != caller:
            return 1  # the caller ended before the kernel was told to watch it
        return run(read(folder, OPTIONS), os.environ)
    except (LaunchError, SettingError) as problem:
        write(folder, PROBLEM, problem)
        return 1
    finally:
        if os.getppid() != caller:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
