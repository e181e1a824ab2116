"""The program that mpirun starts in place of a rank: `python supervisor.py NAME=VALUE...`

It connects to the launcher, asks for the command of the ranks, starts it as a process group of its own and looks after
it. The command does not pass through mpirun, which takes some words of a program for its own flags. The names are

    host      the name of the launcher's host
    socket    the launcher's Unix socket there, in the folder of the run
    rank      the variable that tells a process its rank, set by mpirun
    segments  the variable that tells MPI its folder for shared memory; empty if MPI needs none

On the launcher's host, messages are datagrams over the Unix socket, and the rank's stdin, stdout and stderr come with
`start`. On any other host the variable HOROVODISH_LAUNCHER says where the launcher is, and one TCP connection carries
the messages and what the rank reads and writes, in frames. Messages are words:

    to the launcher     command AT     asks for a piece of the command that begins with this byte
                        rank RANK PROCESS DAEMON HOST MACHINE CORES OWN_CORES PYTHON GPUS PORT PROBLEM
                                       where this supervisor runs, and why the command cannot be run there, if so
                        phase PHASE PROCESS
                                       a process of the rank has reached this phase; see waiting.py
                        state PROCESS STATE
                                       the answer to `state`: the rank's process and the letter that /proc shows for
                                       its state
                        status NUMBER PROCESS STATE KIB PAGE ANSWER
                                       the answer to `status`: as for `state`; the memory that the process uses; its
                                       page of memory, see horovodish/csrc/engine/status_page.h, as hexadecimal digits
                                       behind this host's time in nanoseconds, or "-"; what the rank itself answers
                        told           mpirun wants the rank to end
                        abandoned      the parent of this supervisor has ended: mpirun, or its daemon on this host
                        failure TEXT   the rank has left this report of an exception
                        ended STATUS   the rank has ended, with this status of waitpid()
                        cleared        if the rank failed, nothing that it had started runs any more
                        read           there is room for a piece of stdin (on other hosts)
    to the supervisor   command PIECE  a piece of the command; each word ends with a null byte; without bytes after the
                                       end
                        start STDIN VARIABLES
                                       whether the rank reads stdin, and its own environment variables
                        signal NUMBER  send this to the rank's process group
                        state          say what the rank is doing
                        status NUMBER QUESTION
                                       say all that is known of the rank, and ask it; with `stacks`, also for its Python
                                       stacks
                        news LINE      pass this on to the rank
                        leave          exit; the elastic job has ended, or goes on elsewhere
                        leave keep     exit; new ranks of the job will want the state that is in memory of this host

If the launcher is gone, the supervisor ends the rank. If the supervisor is killed, the kernel kills the rank. The
supervisor runs as `python -I -S` and imports little, because every rank pays for its memory and start-up time. Other
hosts run it from its text, so that the launcher's own version runs there, whatever is installed. Therefore all of it is
in this file and in tcp_end.py.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from horovodish.launcher.supervisor.tcp_end import TcpSupervisorEnd

LAUNCHER_VARIABLE = "HOROVODISH_LAUNCHER"
"""The secret of the run as hexadecimal digits, the launcher's port and its addresses, separated by spaces."""
RUN_DIR_VARIABLE = "HOROVODISH_RUN_DIR"
PROCESS_VARIABLE = "HOROVODISH_SUPERVISOR_PROCESS"
STATE_FOLDER_VARIABLE = "HOROVODISH_STATE_FOLDER"
"""Names the state folder of an elastic job, which contains one folder per host."""

GRACE_SECONDS = 2.0
"""How long a rank may take to end after SIGTERM when the launcher is not there to kill it."""
REST_SECONDS = 1.0
"""How long processes that a failed rank has left behind may take to end after SIGTERM."""
LOOK_SECONDS = 0.05
"""How often to look for the report of a rank that raised, and whether the parent is still there."""

SEGMENTS = "segments"
"""A link in the run folder to a folder in memory."""
MEMORY = "/dev/shm"

DAEMONS_FOLDER = "PMIX_SERVER_TMPDIR"
"""The variable that names the folder of Open MPI's daemon, which it leaves behind when it is killed."""

CLEANER = """
trap '' TERM INT HUP
read -r word fate
daemon=$1 folder=$2 state=$3
shift 3
rm -rf -- "$@"
[ "$fate" != forget ] || (
    job=${state%/*}
    cd -P -- "$job" && [ "$(pwd -P)" = "$job" ] && [ -O . ] && rm -rf -- "./${state##*/}" && rmdir -- "$job"
) 2>/dev/null
ends_within() {
    tenths=$1
    while kill -0 "$daemon" 2>/dev/null; do
        [ "$tenths" -gt 0 ] || return
        sleep 0.1
        tenths=$((tenths - 1))
    done
}
[ "$word" != orphan ] || for signal in 0 TERM KILL; do
    kill -$signal "$daemon" 2>/dev/null
    ends_within 50
done
[ -n "$folder" ] || exit
[ "$word" = abandoned ] || ends_within 150 || exit
rm -rf -- "$folder"
"""
"""A shell script. It reads two words when the supervisor has ended. The first is "abandoned" if the daemon was gone (a
zombie may be left of it), "orphan" if the launcher was gone, or "ended". The second is "keep" or "forget": what to do
with the state of an elastic job. It reads nothing if the supervisor was killed. It waits 15 seconds for the daemon to
end, because one
that ends in haste leaves its folder. Everybody can read the name of the state's folder, so the script removes the
state only where no link leads there and the folder around it is this user's."""

CLOSED = b"closed\n"
"""In place of the answer of a rank that takes no questions."""
ANSWER_SECONDS = 0.5
"""How long a rank may take to say what it does."""
STACKS_SECONDS = 1.5
"""The same with its stacks: for these the rank waits until no thread runs Python code."""
PY_SPY_SECONDS = 4.0
NO_PY_SPY = b"this process cannot show its stacks itself. Remedy: pip install py-spy, on each host"

LONGEST_MESSAGE = 1 << 16
LONGEST_ANSWER = LONGEST_MESSAGE - (1 << 14)
LONGEST_REPORT = LONGEST_MESSAGE - 64

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # a shell's exit statuses
PLAIN_FLAGS = ("-u", "-O", "-OO", "-B", "-E", "-I", "-P", "-s", "-S")
"""Flags of Python after which a script may come."""
MOST_TRIES = 10
"""How often to make a folder in another one that is removed meanwhile, which a supervisor of earlier ranks may do."""
PR_SET_PDEATHSIG = 1


class UnixSupervisorEnd:
    """The supervisor's end of a link to a launcher on this host.

    Attributes:
        is_open: False once the launcher is gone.
    """

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(path)
        if (user := user_of(self._connection)) != os.geteuid():
            raise PermissionError(f"the socket {path} belongs to user {user}")
        self._files: list[int] = []
        self.is_open = True

    def interests(self) -> dict[int, int]:
        """The events to wait for, by file."""
        return {self._connection.fileno(): select.POLLIN} if self.is_open else {}

    def serve(self, ready: Mapping[int, int]) -> list[bytes]:
        """Sends and receives without blocking, and returns the messages that have arrived."""
        if self._connection.fileno() not in ready:
            return []
        try:
            message, files, _, _ = socket.recv_fds(self._connection, LONGEST_MESSAGE, 3)
        except OSError:
            message, files = b"", []
        self._files += files
        self.is_open = bool(message)
        return [message] if message else []

    def rank_files(self, has_stdin: bool) -> list[int]:
        """The rank's stdin, stdout and stderr."""
        return self._files

    def send(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; serve() notices
            self._connection.send(message.encode(errors="surrogateescape"))

    def take_rest(self) -> None:
        """Does nothing: the launcher reads the rank's pipes itself."""

    def finish(self) -> None:
        """Does nothing: every message is sent at once."""


class Supervisor:
    """Looks after one rank; see the docstring of the module.

    Args:
        link: to the launcher.
        rank: which rank.
        folder: where the rank leaves its report.
        segments: the variable for a folder in memory; empty if MPI needs none.
        state: the folder for the state of an elastic job; empty if there is none.
    """

    def __init__(
        self,
        link: "UnixSupervisorEnd | TcpSupervisorEnd",
        rank: str,
        folder: str,
        segments: str,
        state: str = "",
    ) -> None:
        self.link = link
        self.rank = rank
        self.words = b""  # of the command, as far as they have come
        self.command: list[str] = []
        self.folder = folder
        self.segments = segments
        self.state = state
        self.daemon = os.getppid()
        self.is_abandoned = False
        self.report: str | None = os.path.join(folder, f"rank-{rank}.failure")
        self.phases: list[str] = []
        self.wakeup, write_end = os.pipe()
        for end in (self.wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the number arrives in the pipe
        self.pid = 0
        self.running = False
        self.status = 1 << 8
        self.wanted = True
        self.is_orphan = False
        self.fate = "keep"
        self.kill_at: float | None = None
        self.look_at: float | None = None
        self.questions: list[Question] = []

    def run(self) -> int:
        """Serves the launcher until the rank has ended and the launcher lets go. Returns the rank's exit status."""
        self.link.send("command 0")
        while self.running or self.wanted:
            ready = self.wait()
            if self.wakeup in ready:
                self.take_signals(os.read(self.wakeup, 64))
            for message in self.link.serve(ready):
                self.take_message(message)
            self.take_answers(ready)
            if not self.link.is_open and self.wanted:
                self.is_orphan = True
                self.fate = "forget"
                self.wanted = False
                self.end_rank()
        self.link.finish()
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def wait(self) -> "dict[int, int]":
        """Waits for something to do, and does everything that is due by the clock. Returns the files that are ready."""
        poller = select.poll()
        poller.register(self.wakeup, select.POLLIN)
        for file, events in self.link.interests().items():
            poller.register(file, events)
        for question in self.questions:
            if question.source is not None:
                poller.register(question.source, select.POLLIN)
        ends = (question.ends_at for question in self.questions)
        due = min((at for at in (self.kill_at, self.look_at, *ends) if at is not None), default=None)
        ready = poller.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self.signal_rank(signal.SIGKILL)
        if self.look_at is not None and now >= self.look_at:
            self.look_at = now + LOOK_SECONDS
            self.look_for_report()
            self.look_for_phases()
            self.look_for_daemon()
        return dict(ready)

    def take_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self.link.send("told")
            self.end_rank()
        zombie = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if self.running else None
        if zombie:
            self.running = False
            self.status = zombie.si_status << 8 if zombie.si_code == os.CLD_EXITED else zombie.si_status
            self.look_for_report()
            self.look_for_phases()
            self.look_for_daemon()  # its end may be the reason why the rank was told to end
            self.link.take_rest()
            self.link.send(f"ended {self.status}")
            if self.status != 0:
                end_rest(self.pid)  # while the zombie keeps the group's number from being used again
            os.waitpid(self.pid, 0)
            self.link.send("cleared")

    def take_message(self, message: bytes) -> None:
        word, _, rest = message.partition(b" ")
        if word == b"command":
            self.take_command(rest)
        elif word == b"start":
            has_stdin, _, variables = rest.partition(b" ")
            self.start_rank(
                has_stdin == b"1", dict(each.split("=", 1) for each in variables.decode().split("\0") if each)
            )
        elif word == b"signal":
            self.signal_rank(int(rest))
        elif word == b"state" and self.running:
            self.link.send("state {} {}".format(*self.rank_process()))
        elif word == b"status":
            number, _, question = rest.decode().partition(" ")
            self.ask_rank(number, wants_stacks=question == "stacks")
        elif word == b"news":
            with open(os.path.join(self.folder, f"rank-{self.rank}.news"), "ab") as file:
                file.write(rest + b"\n")
        elif word == b"leave":
            self.wanted = False
            self.fate = "keep" if rest else "forget"
            if self.running:
                self.end_rank()

    def take_command(self, piece: bytes) -> None:
        """Asks for the next piece of the command. When it is complete, reports to the launcher."""
        self.words += piece
        if piece:
            self.link.send(f"command {len(self.words)}")
            return
        self.command = [os.fsdecode(word) for word in self.words.split(b"\0")[:-1]]
        problem = problem_of(self.command, os.environ.get("PATH", os.defpath))
        problem = problem or problem_of_daemon(os.environ.get(DAEMONS_FOLDER, "")) or problem_of_state(self.state)
        self.link.send(f"rank {self.rank} {describe_host()} {problem}")

    def start_rank(self, has_stdin: bool, variables: "dict[str, str]") -> None:
        own = {RUN_DIR_VARIABLE: self.folder, PROCESS_VARIABLE: str(os.getpid())}
        environ = {**os.environ, **variables, **own}
        environ.pop(STATE_FOLDER_VARIABLE, None)
        if self.state:
            environ[STATE_FOLDER_VARIABLE] = self.state
        segments = os.path.join(self.folder, SEGMENTS)
        if self.segments and os.path.exists(segments):
            environ.setdefault(self.segments, segments)
        files = self.link.rank_files(has_stdin)
        self.pid = start(self.command, files, environ, self.state)
        self.running = True
        self.look_at = time.monotonic() + LOOK_SECONDS
        for file in files:
            os.close(file)  # so that the launcher sees the end of what the rank writes

    def look_for_phases(self) -> None:
        with contextlib.suppress(OSError):  # it has not reached any
            with open(os.path.join(self.folder, f"rank-{self.rank}.phases"), encoding="ascii") as file:
                phases = file.read().splitlines()
            for phase in phases[len(self.phases) :]:
                self.link.send(f"phase {phase}")
            self.phases = phases

    def rank_process(self) -> "tuple[int, str]":
        """The process that is the rank, and its state: the one that has reached a phase, whatever its children do.

        Before any phase it is the process that was started. If that process waits for a stopped child, as a shell waits
        for the script, it is the stopped child.
        """
        main = int(self.phases[-1].split()[-1]) if self.phases else self.pid
        state, _, group = stat_of(main)
        if group == self.pid and state not in "ZX" and (self.phases or not waits_for_a_child(main)):
            return main, state  # without a look at all processes of the host, which has many ranks
        found = processes_of(self.pid)
        chain = [self.pid]
        for each in chain:
            if waits_for_a_child(each):
                chain += [pid for pid, (_, parent) in found.items() if parent == each]
        pid = next((each for each in chain if each in found and found[each][0] in "Tt"), self.pid)
        return pid, found[pid][0] if pid in found else "Z"

    def ask_rank(self, number: str, wants_stacks: bool) -> None:
        pid, state = self.rank_process() if self.running else (self.pid, "Z")
        place = os.path.join(self.folder, SEGMENTS, f"rank-{self.rank}")
        known = f"status {number} {pid} {state} {memory_of(pid)} {page_of(place)}"
        source = None if state in "TtZ" else question_to(f"{place}.door", b"k" if wants_stacks else b"s")
        question = Question(known, pid, source, wants_stacks and state != "Z")
        if source is None and state not in "TtZ":
            question.answer = CLOSED  # it has not begun, or has ended
        self.questions.append(question)

    def take_answers(self, ready: "dict[int, int]") -> None:
        for question in list(self.questions):
            if question.source in ready:
                question.read()
            if question.is_over:
                self.questions.remove(question)
                self.link.send(f"{question.known} {question.answer[:LONGEST_ANSWER].decode(errors='ignore')}")

    def look_for_report(self) -> None:
        if self.report and os.path.exists(self.report):
            with open(self.report, "rb") as file:
                self.link.send(f"failure {file.read(LONGEST_REPORT).decode(errors='ignore')}")
            self.report = None

    def look_for_daemon(self) -> None:
        if os.getppid() != self.daemon and not self.is_abandoned:
            self.is_abandoned = True
            self.link.send("abandoned")

    def end_rank(self) -> None:
        self.signal_rank(signal.SIGTERM)
        self.signal_rank(signal.SIGCONT)  # a stopped process sees SIGTERM only when it goes on
        self.kill_at = time.monotonic() + GRACE_SECONDS

    def signal_rank(self, number: int) -> None:
        """Sends a signal to the rank's process group; SIGKILL to the rank alone, whose rest is ended after it."""
        if self.running and number == signal.SIGKILL:
            os.kill(self.pid, number)
        elif self.running:
            os.killpg(self.pid, number)


class Question:
    """A question of `horovodish status` about a rank, and the answer as far as it has come.

    Args:
        known: the message to the launcher, without the answer.
        pid: the process of the rank.
        source: the file to read the rank's answer from, to its end. None: the rank is not asked.
        wants_stacks: whether the answer must have Python stacks. If the rank does not give them, py-spy does.
    """

    def __init__(self, known: str, pid: int, source: "int | None", wants_stacks: bool) -> None:
        self.known = known
        self.pid = pid
        self.source = source
        self.wants_stacks = wants_stacks
        seconds = STACKS_SECONDS if wants_stacks else ANSWER_SECONDS
        self.ends_at = time.monotonic() + (0.0 if source is None else seconds)
        self.answer = b""
        self.helper = 0  # the process of py-spy

    @property
    def is_over(self) -> bool:
        """Whether all has come that will come. Starts py-spy if it is needed."""
        if self.source is not None and time.monotonic() < self.ends_at:
            return False
        if self.source is not None:
            os.close(self.source)
            self.source = None
        if self.helper:
            os.kill(self.helper, signal.SIGKILL)
            os.waitpid(self.helper, 0)
            self.helper = 0
        if self.wants_stacks and b"stacks\n" not in self.answer:
            self.answer += b"stacks\n"
            self.source, self.helper = py_spy(self.pid)
            self.ends_at = time.monotonic() + PY_SPY_SECONDS
            self.answer += b"" if self.source else NO_PY_SPY
        return self.source is None

    def read(self) -> None:
        try:
            data = os.read(self.source or 0, LONGEST_MESSAGE)
        except OSError:
            data = b""  # the rank has ended
        self.answer += data
        if not data or len(self.answer) > LONGEST_ANSWER:
            self.ends_at = 0.0


def question_to(path: str, question: bytes) -> "int | None":
    """Asks the rank whose socket is there. Returns where its answer can be read; None if there is no such socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.setblocking(False)
        door.connect(os.path.realpath(path))
        door.send(question)
        return door.detach()
    return None


def py_spy(pid: int) -> "tuple[int | None, int]":
    """Lets py-spy read the stacks of a process.

    Returns:
        Where they can be read, and the process of py-spy; None and 0 if it is not installed or cannot be started.
    """
    places = [*os.environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    programs = (os.path.join(place, "py-spy") for place in places)
    program = next((each for each in programs if os.access(each, os.X_OK)), None)
    if program is None:
        return None, 0
    read_end, write_end = os.pipe()
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    actions = [(os.POSIX_SPAWN_DUP2, write_end, 1), (os.POSIX_SPAWN_DUP2, write_end, 2)]
    try:
        return read_end, os.posix_spawn(program, command, os.environ, file_actions=actions)
    except OSError:
        os.close(read_end)
        return None, 0
    finally:
        os.close(write_end)


def memory_of(pid: int) -> int:
    """How many KiB of memory a process uses. 0 if it has ended."""
    with (
        contextlib.suppress(OSError, StopIteration),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
    ):
        return int(next(line for line in file if line.startswith("VmRSS:")).split()[1])
    return 0


def page_of(place: str) -> str:
    """The page of a rank, for the message `status`."""
    try:
        with open(f"{place}.page", "rb") as file:
            return f"{time.monotonic_ns()}:{file.read(256).hex()}"
    except OSError:
        return "-"


def describe_host() -> str:
    """This process and its host.

    They are its process id and its parent's, host name, boot id, cores of both, Python, GPUs and a port that is free.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        machine = file.read().strip()
    own = len(os.sched_getaffinity(0))
    try:
        cores = len(os.sched_getaffinity(os.getppid()))  # a rank may be bound to some of the daemon's cores
    except OSError:
        cores = own
    numbers = sorted(int(name[6:]) for name in os.listdir("/dev") if name[:6] == "nvidia" and name[6:].isdecimal())
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, numbers))).replace(" ", "")
    python = ".".join(map(str, sys.version_info[:3]))
    with socket.socket() as chosen:
        chosen.bind(("", 0))
        port = chosen.getsockname()[1]
    return f"{os.getpid()} {os.getppid()} {socket.gethostname()} {machine} {cores} {own} {python} {gpus or '-'} {port}"


def problem_of(command: "list[str]", path: str) -> str:
    """Why a command cannot be run here: a shell's exit status and a reason. Empty if it can be run."""
    program = command[0]
    places = [program] if "/" in program else [os.path.join(folder, program) for folder in path.split(os.pathsep)]
    files = [each for each in places if os.path.isfile(each)]
    if any(os.access(each, os.X_OK) for each in files):
        script = script_of(command)
        return f"{NOT_FOUND} there is no script {script}" if script and not os.path.exists(script) else ""
    if files or os.path.isfile(program):
        python = f": start it with python {program}" if program.endswith(".py") else ""
        return f"{NOT_EXECUTABLE} {program} is not executable{python}"
    if os.path.isdir(program):
        return f"{NOT_EXECUTABLE} {program} is a folder: name a program in it, or start a script with python"
    if len(program.split()) > 1:
        return f"{NOT_FOUND} {program}: command not found (leave the quotes around the whole command out)"
    if program.endswith(".py"):
        return f"{NOT_FOUND} there is no script {program}; a script is started with python {program}"
    return f"{NOT_FOUND} {program}: command not found"


def script_of(command: "list[str]") -> str:
    """The script that a command lets Python run; empty if that is not certain."""
    is_python = os.path.basename(command[0]).rstrip("0123456789.") == "python"
    words = [word for word in command[1:] if word not in PLAIN_FLAGS]
    return words[0] if is_python and words and not words[0].startswith("-") else ""


def allow_many_files() -> None:
    """Raises the limit of open files as far as the user may: some connections grow with the number of hosts or ranks.

    Child processes inherit it. The usual limit of 1024 is one for programs that call select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses an unlimited one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def problem_of_daemon(folder: str) -> str:
    """Why Open MPI's daemon here cannot be trusted, as `problem_of`: it takes a folder in /tmp that is there already.

    The name ends with the daemon's process id, which others can guess. Ranks read data of the job from there.
    """
    try:
        owner = os.stat(folder).st_uid
    except OSError:
        return ""  # there is none
    if owner == os.geteuid():
        return ""
    return f"{NOT_EXECUTABLE} {folder}, where Open MPI keeps data of the job, belongs to user {owner}: have it removed"


def problem_of_state(folder: str) -> str:
    """Makes the folder of the state. If that cannot be, returns a shell's exit status and the reason, else nothing."""
    try:
        if folder:
            make_private(folder, levels=2)
    except OSError as problem:
        return f"{NOT_EXECUTABLE} {problem}"
    return ""


def start(command: "list[str]", files: "list[int]", environ: "dict[str, str]", state: str) -> int:
    """Starts the rank with these files as its stdin, stdout and stderr; returns its process id.

    The folder of the state may have been removed since it was made: by a supervisor of earlier ranks of the job.
    """
    prctl = ctypes.CDLL(None).prctl
    supervisor = os.getpid()
    # Signals wait until the rank has its own handlers.
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
        # Python ignores SIGPIPE and SIGXFSZ, and a shell may ignore SIGINT. The rank starts with the defaults.
        for number in (*PASSED_ON, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if state:
            make_private(state, levels=2)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        os.execvpe(command[0], command, environ)
    except OSError as problem:
        os.write(2, os.fsencode(f"horovodish: cannot start {command[0]}: {problem.strerror or problem}\n"))
        os._exit(NOT_FOUND if isinstance(problem, FileNotFoundError) else NOT_EXECUTABLE)


def end_rest(group: int) -> None:
    """Ends the processes that a failed rank has left behind in its process group.

    Python's resource tracker ignores SIGTERM. As soon as all other processes have ended, it removes their semaphores
    and shared memory, and ends by itself.
    """
    os.killpg(group, signal.SIGTERM)
    os.killpg(group, signal.SIGCONT)
    ends_at = time.monotonic() + REST_SECONDS
    while processes_of(group) and time.monotonic() < ends_at:
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)


def processes_of(group: int) -> "dict[int, tuple[str, int]]":
    """The processes of this group that have not ended: the letter for its state in /proc, and the parent of each."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        state, parent, its_group = stat_of(int(name))
        if its_group == group and state not in "ZX":
            found[int(name)] = state, parent
    return found


def stat_of(pid: int) -> "tuple[str, int, int]":
    """The letter for the state of a process in /proc, its parent and its group. "X", 0 and 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, parent, group, *_ = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", 0, 0
    return state, int(parent), int(group)


def waits_for_a_child(pid: int) -> bool:
    """Whether the process does nothing but wait for the end of a child. False where the kernel does not say it."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
            return file.read() == "do_wait"
    except OSError:
        return False


def user_of(connection: socket.socket) -> int:
    """Who has the socket at the other end of a Unix connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    return int.from_bytes(credentials[4:8], sys.byteorder)


def make_private(folder: str, levels: int = 1) -> None:
    """Makes a folder that only this user can enter, or takes it if it is one already.

    Others may know its name, and where they can write, they may have made it before.

    Args:
        folder: the path.
        levels: how many folders at its end are private: they are made and looked at, one in the other.

    Raises:
        OSError: it cannot be made, or the existing one cannot be trusted. The text says why, and what to do.
    """
    around, *names = folder.rsplit("/", levels)
    for tries_left in reversed(range(MOST_TRIES)):
        at, places = around, []
        try:
            places.append(os.open(around, os.O_PATH | os.O_DIRECTORY))
            for name in names:
                at = f"{at}/{name}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=places[-1])
                places.append(open_private(name, at, places[-1]))
            return
        except OSError as problem:
            is_gone = isinstance(problem, FileNotFoundError) and places
            if not is_gone or not tries_left:
                raise OSError(f"{at}: {problem.strerror}" if problem.strerror else str(problem)) from None
        finally:
            for place in places:
                os.close(place)


def open_private(name: str, path: str, place: "int | None" = None) -> int:
    """Opens a folder that only this user can enter, for use as `dir_fd`. Follows no link.

    Args:
        name: of the folder.
        path: for messages.
        place: the folder around it, opened; None for the current one.

    Raises:
        FileNotFoundError: it is not there.
        PermissionError: the folder cannot be trusted. The text says why, and what to do.
    """
    folder = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=place)
    found = os.fstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & 0o077:
        return folder
    os.close(folder)
    kind = "a link" if stat.S_ISLNK(found.st_mode) else "no folder" if not stat.S_ISDIR(found.st_mode) else ""
    what = f"is {kind}" if kind else f"has mode {mode:04o}"
    who = f"belongs to user {found.st_uid}" if found.st_uid != os.geteuid() else what
    raise PermissionError(
        f"{path} {who}, and only a private folder of user {os.geteuid()} is used there: have it removed"
    )


def make_folder() -> str:
    """A folder for this rank alone. On the launcher's host, all ranks share the folder of the run."""
    parent = os.environ.get("TMPDIR", "/tmp")
    name = os.urandom(6).hex()
    # The owner of a link in TMPDIR could let it lead elsewhere later.
    folder = os.path.join(os.path.realpath(parent if os.access(parent, os.W_OK) else "/tmp"), f"horovodish-{name}")
    make_private(folder)
    if os.access(MEMORY, os.W_OK):
        in_memory = os.path.join(MEMORY, f"hvd-{name}")
        make_private(in_memory)
        os.symlink(in_memory, os.path.join(folder, SEGMENTS))
    return folder


def state_folder(is_near: bool) -> str:
    """Where ranks of an elastic job keep their state on this host. Empty if the job is none, or has no memory here.

    Args:
        is_near: whether this is the launcher's host, where the launcher has made the folder around it.
    """
    folder = os.environ.get(STATE_FOLDER_VARIABLE, "")
    parent = os.path.dirname(folder)
    if not folder or not (is_near or (parent == MEMORY and os.access(MEMORY, os.W_OK))):
        return ""
    return os.path.join(os.path.realpath(parent), os.path.basename(folder), socket.gethostname())


def remove_later(daemon: int, *folders: str, state: str = "") -> int:
    """Starts a shell that removes folders when this process has ended, even if it was killed.

    Args:
        daemon: the parent of this process. If it could not reach its mpirun, it would stay for ever.
        folders: to be removed.
        state: the folder of the state, which the word may say to remove.

    Returns:
        The shell's stdin, for the word that says what to do with the daemon: see `CLEANER`.
    """
    read_end, write_end = os.pipe()
    arguments = ["sh", "-c", CLEANER, "sh", str(daemon), os.environ.get(DAEMONS_FOLDER, ""), state, *folders]
    # Not posix_spawn(setsid=True): a Python that was built with a glibc before 2.26 does not have it.
    if os.fork():
        os.close(read_end)
        return write_end
    try:
        os.setsid()  # MPI's daemon kills the group of its processes
        null = os.open(os.devnull, os.O_RDWR)
        for target, file in enumerate((read_end, null, null)):
            os.dup2(file, target)
        os.execve("/bin/sh", arguments, os.environ)
    finally:
        os._exit(NOT_FOUND)


def connect(socket_path: str, host: str, launcher: str) -> "UnixSupervisorEnd | TcpSupervisorEnd":
    """Connects to the launcher, whose host has this name.

    Raises:
        OSError: it cannot be reached.
    """
    if not launcher or socket.gethostname() == host:
        try:
            return UnixSupervisorEnd(socket_path)
        except OSError:
            if not launcher:
                raise
            # Another host has the same name.
    from horovodish.launcher.supervisor.tcp_end import call  # the text of that module came along

    return call(launcher)


def main() -> int:
    allow_many_files()
    options = dict(option.split("=", 1) for option in sys.argv[1:])
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")  # not for the rank: the secret is in it
    try:
        link = connect(options["socket"], options["host"], launcher)
    except OSError as problem:
        print(f"horovodish: {socket.gethostname()} cannot reach the launcher: {problem}", file=sys.stderr)
        return 1
    is_near = isinstance(link, UnixSupervisorEnd)
    try:
        folder = os.path.dirname(options["socket"]) if is_near else make_folder()
    except OSError as problem:
        print(f"horovodish: {socket.gethostname()} has no place for temporary files: {problem}", file=sys.stderr)
        return 1
    folders = [os.path.realpath(os.path.join(folder, SEGMENTS)), folder]
    state = state_folder(is_near)
    cleaner = None if is_near else remove_later(os.getppid(), *folders, state=state)
    supervisor = Supervisor(link, os.environ[options["rank"]], folder, options["segments"], state)
    try:
        return supervisor.run()
    finally:
        if supervisor.is_orphan:
            cleaner = cleaner or remove_later(supervisor.daemon, *folders, state=state)
        is_abandoned = os.getppid() != supervisor.daemon
        word = "abandoned" if is_abandoned else "orphan" if supervisor.is_orphan else "ended"
        if cleaner is not None:
            with contextlib.suppress(OSError):  # the shell was killed
                os.write(cleaner, f"{word} {supervisor.fate}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
