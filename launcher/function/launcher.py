"""The launcher of `horovodish.run()`: `python -m horovodish.launcher.function.launcher CALLER FILE`

It is a process of its own, because a launcher takes signals and the main thread, and it ends when its caller does. It
reads its options from stdin. To the open file with the number FILE it writes why there are no ranks, if there are none.
"""

import ctypes
import os
import pickle
import signal
import sys

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.run import run

PR_SET_PDEATHSIG = 1


def main(caller: int, problem_file: int) -> int:
    """Runs the ranks and returns the exit status of the job."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != caller:
        return 1  # the caller ended before the kernel was told to watch it
    options = pickle.load(sys.stdin.buffer)
    try:
        return run(options, os.environ)
    except (LaunchError, SettingError) as problem:
        os.write(problem_file, pickle.dumps(problem))
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
