"""Ctrl-C while the command `horovodish` still imports what it needs: the command ends without a traceback."""

import os
import signal
import sys
import threading

__all__ = ["end_commands_quietly"]

_COMMANDS = ("horovodish", "horovodrun")


def end_commands_quietly() -> None:
    """If this process is the command, let Ctrl-C end it at once, until `horovodish.launcher.cli.main()` begins.

    In other programs Ctrl-C raises KeyboardInterrupt as before.
    """
    is_command = os.path.basename(sys.argv[0]) in _COMMANDS or sys.orig_argv[1:3] == ["-m", "horovodish.launcher"]
    is_main = threading.current_thread() is threading.main_thread()
    if is_command and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
