"""An agent: it joins a meeting and starts what mpirun wants to be run on this host, as its children.

A person or a pod starts it with `horovodish agent`, an actor of Ray or a task of Spark with `run_agent()`. Messages are
words:

    to the meeting    agent NUMBER SLOTS GPUS PROCESS PARENT HOST MACHINE ...
                                       where this agent runs; see `describe_host()` of supervisor.py
                      said RUN TEXT    a command has written this
                      ended RUN STATUS  a command has ended with this exit status
                      leaving REASON   this agent ends
    to the agent      run RUN GPUS COMMAND
                                       start this command of a shell, which sees these GPUs; "-": this process's GPUs
                      end RUN          end it
                      leave            end this agent

When the agent ends, all that it has started ends: it is the parent of daemons whose own parents have ended.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.job.outcome import signal_name
from horovodish.launcher.job.output import say
from horovodish.launcher.mpirun.installation import with_home
from horovodish.launcher.own_python import module_command
from horovodish.launcher.supervisor.supervisor import describe_host
from horovodish.launcher.supervisor.tcp_end import NotAdmittedError, TcpSupervisorEnd, call
from horovodish.settings import AGENT_SECRET_VARIABLE

PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1
"""How often to look for children that have ended, and whether the parent is still there."""
ORPHANED_SECONDS = 4.0
"""How long daemons and supervisors may take to find out by themselves that their launcher is gone."""
GRACE_SECONDS = 3.0
"""How long they may take to end after SIGTERM. Supervisors give their ranks 2 seconds."""
JOIN_SECONDS = 600.0
"""How long an agent that was started by hand waits for a launcher."""
RETRY_SECONDS = 1.0
GONE = "the launcher is gone"
ENDED_BY_ITSELF = 3
"""The exit status of an agent that has joined and was not told to end."""
ENDS = "horovodish: the agent ends: "
"""Begins the last line of an agent that was not told to end."""
PIECE_BYTES = 1 << 14
"""A byte that is no UTF-8 becomes three, and a message must not be longer than `LONGEST_MESSAGE`."""
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
ADDRESS = r"(?:\[[^][\s,]+\]|[^][:\s,]+)"
JOIN = re.compile(rf"({ADDRESS}(?:,{ADDRESS})*):([0-9]{{1,5}})")
"""The value of --join. An IPv6 address is in brackets, as it contains colons."""


def run_agent(contact: str, number: int, *, starts_again: bool = False) -> str:
    """Runs an agent with one slot, which ends with this process. Blocks until the agent has ended.

    Args:
        contact: of the meeting. It is secret, so the agent reads it from stdin and not from its command line.
        number: agents are ordered by it.
        starts_again: whether to start another agent when one that has joined ends without being told to.

    Returns:
        Why the agent has ended; nothing if it was told to.
    """
    command = module_command("horovodish.launcher.agents.agent", str(os.getpid()))
    has_joined = False
    while True:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        _, said = process.communicate(f"{number} 1 {contact}".encode())
        has_joined |= process.returncode == ENDED_BY_ITSELF or process.returncode < 0
        if not process.returncode or not (starts_again and has_joined):
            break
        time.sleep(RETRY_SECONDS)
    if process.returncode < 0:
        return f"it was killed by {signal_name(-process.returncode)}"
    return last_line(said.decode(errors="replace")).removeprefix(ENDS) if process.returncode else ""


class Agent:
    """An agent that has joined.

    Args:
        link: to the meeting.
        parent: the agent ends when this process ends; 0: none.
    """

    def __init__(self, link: TcpSupervisorEnd, parent: int = 0) -> None:
        self._link = link
        self._parent = parent
        self._runs: dict[int, int] = {}  # the process of each run
        self._pipes: dict[int, int] = {}  # the run by the pipe of its output
        self._signals: list[int] = []
        self._is_told_to_leave = False
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signals.append(number))

    def run(self, number: int, slots: int) -> str:
        """Serves the meeting until it is over. Returns why it ended; nothing if the meeting has told it to leave."""
        gpus = os.environ.get(GPUS_VARIABLE, "-").replace(" ", "") or ","
        self._link.send(f"agent {number} {slots} {gpus} {describe_host()}")
        while not (reason := self._reason_to_leave()):
            self._turn()
        self._link.send(f"leaving {reason}")
        is_orphaned = self._is_told_to_leave or not self._link.is_open
        self._end_all(ORPHANED_SECONDS if is_orphaned else 0.0)
        self._link.finish()
        return "" if self._is_told_to_leave else reason

    def _reason_to_leave(self) -> str:
        if self._is_told_to_leave:
            return "it was told to"
        if self._parent and os.getppid() != self._parent:
            return "its process was ended"
        if self._signals:
            return f"it got {signal.Signals(self._signals[0]).name}"
        return "" if self._link.is_open else GONE

    def _turn(self) -> None:
        poller = select.poll()
        for file, events in {**self._link.interests(), **dict.fromkeys(self._pipes, select.POLLIN)}.items():
            poller.register(file, events)
        ready = dict(poller.poll(LOOK_SECONDS * 1000))
        for message in self._link.serve(ready):
            self._take(message.decode(errors="surrogateescape"))
        for pipe in [pipe for pipe in self._pipes if pipe in ready]:
            self._pass_on(pipe)
        self._reap()

    def _take(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if word == "run":
            run, gpus, command = rest.split(" ", 2)
            self._start(int(run), gpus, command)
        elif word == "end" and int(rest) in self._runs:
            os.killpg(self._runs[int(rest)], signal.SIGTERM)
        elif word == "leave":
            self._is_told_to_leave = True

    def _start(self, run: int, gpus: str, command: str) -> None:
        environ = with_home(os.environ)
        if gpus != "-":
            environ[GPUS_VARIABLE] = gpus.strip(",")
        pipe, end = os.pipe()
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=end,
            stderr=end,
            start_new_session=True,
        )
        os.close(end)
        self._runs[run] = process.pid
        self._pipes[pipe] = run
        process.returncode = 0  # `_reap()` waits for it

    def _pass_on(self, pipe: int) -> None:
        if data := os.read(pipe, PIECE_BYTES):
            self._link.send(f"said {self._pipes[pipe]} {data.decode(errors='replace')}")
        else:
            os.close(pipe)
            del self._pipes[pipe]

    def _reap(self) -> bool:
        """Waits for the children that have ended. False if there are none any more."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            for run in [run for run, process in self._runs.items() if process == pid]:
                del self._runs[run]
                for pipe in [pipe for pipe, its in self._pipes.items() if its == run]:
                    os.set_blocking(pipe, False)
                    self._take_rest(pipe)
                code = os.waitstatus_to_exitcode(status)
                self._link.send(f"ended {run} {code if code >= 0 else 128 - code}")

    def _take_rest(self, pipe: int) -> None:
        """Passes on the rest of a command's output: a daemon that the command has started may keep the pipe open."""
        try:
            while pipe in self._pipes:
                self._pass_on(pipe)
        except BlockingIOError:
            os.close(pipe)
            del self._pipes[pipe]

    def _end_all(self, patience: float) -> None:
        for number, seconds in ((0, patience), (signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
            told: set[int] = set()
            ends_at = time.monotonic() + seconds
            while self._reap() and time.monotonic() < ends_at:
                for pid in set(children()) - told if number else ():  # what an ended child has started is ours now
                    os.kill(pid, number)
                    told.add(pid)
                time.sleep(LOOK_SECONDS / 2)


def children() -> list[int]:
    """The children of this process."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def last_line(said: str) -> str:
    """The last line that names an error, of what an agent has written, or of a traceback of Python or Java."""
    lines = [line.strip(" \t:") for line in said.splitlines() if line.strip()] or ["without a word"]
    names_error = re.compile(r"(?!at |Caused by: ).*(Error|Exception)")
    return next((line for line in reversed(lines) if names_error.match(line)), lines[-1])


def written(addresses: Sequence[str]) -> str:
    """Addresses as --join takes them."""
    return ",".join(f"[{address}]" if ":" in address else address for address in addresses)


def key_of(secret: str) -> bytes:
    """The key that both sides derive from a secret of any length."""
    return hashlib.sha256(secret.encode()).digest()


def join_by_hand(at: str, slots: int | None, secret: str) -> int:
    """`horovodish agent`: joins as soon as the launcher is there. Returns the exit status.

    Args:
        at: addresses of the launcher, separated by commas, and the port: ADDRESS,...:PORT. IPv6 is in brackets.
        slots: for how many ranks the agent stands; None: as many as there are GPUs, or else cores.
        secret: that the launcher knows.

    Raises:
        SettingError: there is no secret, or `at` is not of this form.
        LaunchError: no launcher has let it in, or its job has not ended by itself.
    """
    found = JOIN.fullmatch(at)
    if not found or not 0 < int(found[2]) < 1 << 16:
        raise SettingError(f"--join {at}: it is written as ADDRESS:PORT, with an IPv6 address in brackets")
    if not secret:
        raise SettingError(
            f"{AGENT_SECRET_VARIABLE} is missing: the launcher prints it, or has it in the same variable"
        )
    contact = " ".join([key_of(secret).hex(), found[2], *(each.strip("[]") for each in found[1].split(","))])
    gives_up_at = time.monotonic() + JOIN_SECONDS
    said, was_there = "", False
    while True:
        try:
            link = call(contact)
            break
        except OSError as problem:  # the launcher may start later, and its name may not be known yet
            is_there = isinstance(problem, NotAdmittedError)
            if was_there and not is_there:
                raise LaunchError(f"the agent ends: {GONE}, and did not let it in") from problem
            was_there = is_there
            if time.monotonic() > gives_up_at:
                raise LaunchError(f"the agent cannot join: {problem}") from problem
            if str(problem) != said:
                said = str(problem)
                say(f"the agent cannot join yet: {problem}; it tries again")
            time.sleep(RETRY_SECONDS)
    gpus = [gpu for gpu in describe_host().split(" ")[7].split(",") if gpu not in ("", "-")]
    reason = Agent(link).run(0, slots or len(gpus) or len(os.sched_getaffinity(0)))
    if reason:
        raise LaunchError(f"the agent ends: {reason}")
    return 0


def main(arguments: Sequence[str]) -> int:
    number, slots, contact = sys.stdin.read().split(" ", 2)
    try:
        link = call(contact)
    except OSError as problem:
        print(f"{ENDS}it cannot reach the launcher: {problem}", file=sys.stderr)
        return 1
    reason = Agent(link, int(arguments[0])).run(int(number), int(slots))
    if reason:
        print(f"{ENDS}{reason}", file=sys.stderr)
    return ENDED_BY_ITSELF if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
