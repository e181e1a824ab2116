"""The program that mpirun starts in place of a rank: `python supervisor.py SOCKET RANK_VARIABLE COMMAND...`

It connects to the launcher's SOCKET, gets the rank's stdin, stdout and stderr, starts COMMAND as a process group of its
own and looks after it. Messages are datagrams of a word and numbers:

    to the launcher     rank RANK          this is the supervisor of RANK
                        started            the rank runs
                        told               mpirun wants the rank to end
                        ended STATUS       the rank has ended, with this status of waitpid()
    to the supervisor   start              comes with the three files
                        signal NUMBER      send this to the rank's process group
                        leave              the supervisor can go

When the launcher is gone, the rank is ended. When the supervisor itself is killed, the kernel kills the rank. It runs
as `python -I -S` and imports little, because it costs memory and start-up time once per rank.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

GRACE_SECONDS = 2.0
"""How long a rank may take to end after SIGTERM when the launcher is not there to kill it."""

SEGMENTS = "segments"
"""A link in the run folder to a folder in memory."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # a shell's exit statuses
PR_SET_PDEATHSIG = 1


class Supervisor:
    """Looks after one rank; see the docstring of the module."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.wakeup, write_end = os.pipe()
        for end in (self.wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the number arrives in the pipe
        self.pid = 0
        self.running = True
        self.status = 0
        self.wanted = True
        self.is_orphan = False
        self.kill_at: float | None = None

    def run(self, rank: str, command: list[str]) -> int:
        """Starts the rank, serves the launcher until there is nothing left to do, returns the rank's exit status."""
        self.send(f"rank {rank}")
        _, files, _, _ = socket.recv_fds(self.link, 64, 3)
        if len(files) < 3:
            return 1  # the launcher is gone
        self.pid = start(command, files)
        for file in files:
            os.close(file)  # so that the launcher sees the end of what the rank writes
        self.send("started")

        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        poller.register(self.wakeup, select.POLLIN)
        while self.running or self.wanted:
            left = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            ready = [file for file, _ in poller.poll(None if left is None else left * 1000)]
            if left == 0.0:
                self.kill_at = None
                self.signal_rank(signal.SIGKILL)
            if self.wakeup in ready:
                self.take_signals(os.read(self.wakeup, 64))
            if self.link.fileno() in ready and not self.take_message():
                poller.unregister(self.link)
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def take_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self.send("told")
            self.end_rank()
        zombie = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if self.running else None
        if zombie:
            if (zombie.si_code, zombie.si_status) != (os.CLD_EXITED, 0):
                # What a rank that failed has left behind. The zombie keeps the group's number from being used again.
                self.signal_rank(signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
            self.running = False
            self.send(f"ended {self.status}")

    def take_message(self) -> bool:
        """Does what the launcher says; False when the launcher is gone."""
        try:
            words = self.link.recv(64).split()
        except OSError:
            words = []
        if not words:
            self.is_orphan = self.wanted
            self.wanted = False
            self.end_rank()
        elif words[0] == b"signal":
            self.signal_rank(int(words[1]))
        elif words[0] == b"leave":
            self.wanted = False
        return bool(words)

    def end_rank(self) -> None:
        self.signal_rank(signal.SIGTERM)
        self.signal_rank(signal.SIGCONT)  # a stopped process sees SIGTERM only when it goes on
        self.kill_at = time.monotonic() + GRACE_SECONDS

    def signal_rank(self, number: int) -> None:
        if self.running:
            os.killpg(self.pid, number)

    def send(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; take_message() notices
            self.link.send(message.encode())


def start(command: list[str], files: list[int]) -> int:
    """Starts the rank with these files as its stdin, stdout and stderr; returns its process id."""
    prctl = ctypes.CDLL(None).prctl
    supervisor = os.getpid()
    # A signal that comes before the rank has its own handlers waits for them.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        with contextlib.suppress(OSError):  # both sides do it; this one fails when the rank has done it
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != supervisor:
            os._exit(1)  # the supervisor was killed before the kernel was told to watch it
        for target, file in enumerate(files):
            os.dup2(file, target)
        # Python ignores SIGPIPE and SIGXFSZ, a shell may have SIGINT ignored: the rank starts with the defaults.
        for number in (*PASSED_ON, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        os.execvp(command[0], command)
    except OSError as problem:
        os.write(2, f"horovodish: cannot start {command[0]}: {problem.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(problem, FileNotFoundError) else NOT_EXECUTABLE)


def remove_folder(folder: str) -> None:
    """Removes the run folder that a killed launcher has left."""
    import shutil  # seldom needed

    # Other supervisors do the same, so what is there may be gone at any time.
    shutil.rmtree(os.path.realpath(os.path.join(folder, SEGMENTS)), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    address, rank_variable, *command = sys.argv[1:]
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(address)
    except OSError as problem:
        print(f"horovodish: the launcher cannot be reached: {problem}", file=sys.stderr)
        return 1
    supervisor = Supervisor(link)
    status = supervisor.run(os.environ[rank_variable], command)
    if supervisor.is_orphan:
        remove_folder(os.path.dirname(address))
    return status


if __name__ == "__main__":
    sys.exit(main())
