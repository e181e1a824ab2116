"""The life of the engine in a process, and where this process stands among the ranks."""

import atexit
import functools
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from horovodish import _native, settings
from horovodish.errors import ForkedProcessError, NotInitializedError, RankLostError, StallError, from_native
from horovodish.launch import failures, run_folder
from horovodish.launch.environment import check_no_other_launcher, launcher_environment
from horovodish.mpi import communicators
from horovodish.runtime import starting
from horovodish.runtime.process import part
from horovodish.runtime.starting import Running
from horovodish.runtime.topology import Topology

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "shutdown",
    "size",
]


_SHUT_DOWN, _ENDED = "called shutdown()", "has ended its script"
_LEFT_REMEDY = (
    "\nRemedy: if the ranks have different numbers of batches, give every rank equally many, or call hvd.join() after "
    "the last one (in Keras: pass MetricAverageCallback() or another of hvd.callbacks to fit()). If a collective is "
    "under `if rank == 0:` or the like, call it on every rank."
)
"""For ranks that wait for one that has left in order."""


@dataclass
class _Life:
    """The life of the engine in this process.

    Attributes:
        running: between `init()` and `shutdown()`.
        forked: the parent's, in a forked child: unusable and never destroyed.
        last_loss, last_first_lost, last_failures: of the engine that was stopped, until the next `init()`.
        unread: the error of a program whose results nobody has read, likewise.
        loss_raised: the first error that is kept of that engine and says that a rank was lost or did not answer.
        goes_on_elsewhere: this process ends for other ones to go on, so that no result of it counts.
        cut_off_because: likewise.
        cutting_off: held while another thread stops the engine.
    """

    running: Running | None = None
    forked: Running | None = None
    last_loss: str = ""
    last_first_lost: int = 0
    last_failures: list[tuple[str, str, bool]] = field(default_factory=list)
    unread: Exception | None = None
    loss_raised: Exception | None = None
    goes_on_elsewhere: bool = False
    cut_off_because: str = ""
    cutting_off: threading.Lock = field(default_factory=threading.Lock)


_Finish = Callable[[], "Iterable[str] | None"]

_followers: list[tuple[Callable[[Any], None], Callable[[Any], None], _Finish, Callable[[], None]]] = []


def init(comm: "Intracomm | Iterable[int] | None" = None, process_sets: Any = None) -> None:
    """Start the engine. Every rank must call it; it blocks until all have. A second call does nothing.

    Without a launcher there is one rank, and no MPI is needed.

    Args:
        comm: the ranks that take part: None for all, ranks of MPI's world in the order of their new numbers, such as
            [0, 1] or range(4), or an `mpi4py` communicator.
        process_sets: a list of `ProcessSet` objects to add. You can add more later. Horovod's "dynamic" is accepted
            without effect.

    Raises:
        LaunchError: there is no MPI, the launcher belongs to another MPI than mpi4py's, the launcher is torchrun, or
            the ranks of a host cannot share memory.
        SettingError: a HOROVODISH_* variable has a bad value, or different values on the ranks.
        ForkedProcessError: in a child of a process that had called `init()`, however it was started.
        ValueError: the ranks of `comm` are not ranks, repeat a rank, or lack the calling rank.
        TypeError: `comm` is something else.

    Example:
        >>> import horovodish as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
    """
    life = part(_Life)
    if life.running is not None:
        return
    if life.forked is not None:
        raise _forked_error()
    life.last_loss, life.last_first_lost, life.cut_off_because = "", 0, ""
    life.last_failures, life.unread, life.loss_raised = [], None, None
    for check, *_ in _followers:
        check(process_sets)
    _install_hooks()
    notices: list[str] = []
    if comm is None and launcher_environment() is None:
        check_no_other_launcher()
        life.running = starting.alone(notices)
    else:
        starting.check_not_started_by_a_rank()
        run_folder.reached("init")
        run_folder.await_go()
        try:
            life.running = starting.on(communicators.of(comm), notices)
        except BaseException:  # the script may catch it and go on alone
            run_folder.reached("stopped")
            raise
    try:
        for notice in notices if rank() == 0 else ():
            warnings.warn(notice, RuntimeWarning, stacklevel=2)
        for _, started, *_ in _followers:
            started(process_sets)
    except BaseException as problem:  # of this rank alone, perhaps: the others are told, instead of waiting for it
        _stop(f"could not finish init(): {problem}")
        raise
    run_folder.reached("running")


def shutdown() -> None:
    """Stop the engine of this rank. All ranks may call `init()` again.

    It first waits for the programs that JAX, or TensorFlow's asynchronous execution, has dispatched on this rank. These
    programs may wait for other ranks. Otherwise it does not wait for other ranks: handles that are pending on this rank
    fail with `EngineStoppedError`, and operations of ranks that still need this rank fail with `RankLostError`. Does
    nothing before `init()` and in a forked child.

    If one of these programs has failed, it warns, and the process ends with status 1 unless `init()` is called again.
    """
    try:
        _finish_programs()
        if (unread := part(_Life).unread) is not None:
            _warn_of_unread(unread)
    finally:
        _stop(_SHUT_DOWN)


def follow(
    *,
    check: Callable[[Any], None] = lambda _: None,
    started: Callable[[Any], None] = lambda _: None,
    finish: _Finish = lambda: None,
    stopped: Callable[[], None] = lambda: None,
) -> None:
    """Tell a module that builds on this one when the engine starts and stops.

    Args:
        check: called before each start, with the `process_sets` of `init`; raises if they are wrong.
        started: called after each start, with the same. An exception that it raises ends the engine. It waits for other
            ranks by means of the engine only, since one of them may have raised.
        finish: called before the engine stops, unless the script has failed. It waits for the programs of a framework
            that runs ahead of the script, and returns the errors of those whose results the script still holds.
        stopped: called when the engine has stopped, also where `started` was not reached.
    """
    _followers.append((check, started, finish, stopped))
    if _install_hooks.cache_info().currsize:
        # Hooks run in reverse order, and programs must end before a framework that was imported later cleans up.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def is_initialized() -> bool:
    """Whether `init()` was called and `shutdown()` was not since; in a forked child, when it was forked."""
    life = part(_Life)
    return life.running is not None or life.forked is not None


def has_engine() -> bool:
    """Whether this process can run operations, which a forked child cannot."""
    return part(_Life).running is not None


def engine() -> _native.Engine:
    """The running engine, for the framework modules.

    Raises:
        NotInitializedError: before `init()` or after `shutdown()`.
        ForkedProcessError: in a forked child.
    """
    return running().engine


def rank() -> int:
    """The number of this rank, from 0 to `size() - 1`. A forked child, such as a data-loader worker, has its parent's.

    Raises:
        NotInitializedError: a ValueError; before `init()`. So do all queries below.
    """
    return _topology().rank


def size() -> int:
    """The number of ranks."""
    return _topology().size


def local_rank() -> int:
    """The number of this rank among the ranks of its host, from 0."""
    return _topology().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return len(_topology().local_ranks)


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank with this local rank, from 0."""
    topology = _topology()
    return topology.peers_across.index(topology.host)


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return len(_topology().peers_across)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len({len(ranks) for ranks in _topology().hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether threads may call MPI. `init()` refuses an MPI that does not allow it.

    Raises:
        NotInitializedError: before `init()`.
    """
    running()
    return True


def mpi_enabled() -> bool:
    """Whether MPI connects the ranks. It does not in a job of one rank without a launcher."""
    now = part(_Life).running
    return now is not None and now.communicator is not None


def running() -> Running:
    """The engine that `init()` has started, for the other modules.

    Raises:
        NotInitializedError: before `init()` or after `shutdown()`.
        ForkedProcessError: in a forked child.
    """
    life = part(_Life)
    if life.running is None:
        if life.forked is not None:
            raise _forked_error()
        raise NotInitializedError(f"horovodish is not running in this process: call hvd.init() {_before_what()}")
    return life.running


def _before_what() -> str:
    """Such as "before DistributedOptimizer()": the function of ours that the script has called."""
    frame: FrameType | None = sys._getframe(1)
    called = ""
    ours = ("horovodish", "contextlib")  # contextlib calls our code where a `with` begins
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        name = frame.f_code.co_name
        called = called if name.startswith(("_", "<")) or name == "by_names" else name
        frame = frame.f_back
    return f"before {called}()" if called else "first"


def _topology() -> Topology:
    return (part(_Life).forked or running()).topology


def loss() -> str:
    """The message about a lost rank, from the engine or else from the launcher; empty if none was lost.

    Errors quote the engine's message, not the launcher's.
    """
    life = part(_Life)
    return (life.running.engine.loss() if life.running else life.last_loss) or life.cut_off_because


def quoted_failure(text: str) -> Exception | None:
    """The error of the engine that a framework has passed on within a text of its own, if there is one."""
    life = part(_Life)
    for kind, message, _ in life.running.engine.failures() if life.running else life.last_failures:
        error = from_native(kind, message)
        if message in text:
            return error
        _, failed, rest = message.partition(" failed on rank ")  # a process group calls the operation otherwise
        whole = rf"{type(error).__name__}: (.*{re.escape(failed + rest)})"
        if failed and (found := re.search(whole, text)):
            return from_native(kind, found[1])
    return None


def ends_in_order() -> bool:
    """At the end of the process: whether the engine runs, no rank was lost or has failed, and nobody else goes on."""
    life = part(_Life)
    return has_engine() and failures.reason is None and not loss() and not life.goes_on_elsewhere


def left_in_order() -> bool:
    """Whether the rank that `loss()` is about has raised nothing: only the ranks that wait for it can say where."""
    return re.match(rf"rank \d+ (called|{_ENDED})\b", loss()) is not None


def check_no_loss() -> None:
    """Raise if a rank was lost or did not answer, this rank has needed it, and the script goes on.

    Raises:
        RankLostError: a rank was lost.
        StallError: the ranks have waited for each other for too long.
    """
    if not has_engine() or not (has_failed() or is_cut_off()):
        return
    caught = " The script has caught the error that said so. Let it pass: hvd.elastic then goes back to a commit"
    if lost := loss():
        raise RankLostError(f"{lost.rstrip('.')}.{caught if has_failed() else ''}")
    for kind, message, _ in running().engine.failures():
        if isinstance(error := from_native(kind, message), StallError):
            raise StallError(f"{error}\n{caught.strip()}")


def has_failed() -> bool:
    """Whether an operation of this rank has failed because a rank was lost, or will, since the last `init()`."""
    now = part(_Life).running
    return now is not None and now.engine.has_failed()


def launched() -> int:
    """The number of the operation that this rank has launched on a GPU last, since the last `init()`."""
    now = part(_Life).running
    return now.engine.launched() if now else 0


def came_to_its_end(number: int) -> bool:
    """Whether no operation up to this number was launched on a GPU and lost; also after the engine was stopped."""
    life = part(_Life)
    first_lost = life.running.engine.first_lost() if life.running else life.last_first_lost
    return first_lost == 0 or number < first_lost


def check_settled() -> None:
    """Wait until the GPU has finished all launched work, so that its results can be saved.

    Raises:
        RankLostError: an operation has failed because a rank was lost, and results may be wrong.
        StallError: the GPU has not done it within the shutdown time of stalls.
    """
    if has_failed():
        check_no_loss()
    if (now := part(_Life).running) is not None:
        now.engine.settle_launched()


def cut_off(reason: str) -> None:
    """Make every operation of this rank fail from now on, from another thread than the one that waits.

    Args:
        reason: what has happened, such as "rank 2 was lost".
    """
    life = part(_Life)
    with life.cutting_off:
        if (now := life.running) is not None:
            life.cut_off_because = reason
            now.engine.stop(True, f"rank {now.topology.rank} was told that {reason}")


def is_cut_off() -> bool:
    """Whether `cut_off()` was called since the last `init()`."""
    return bool(part(_Life).cut_off_because)


def _forked_error() -> ForkedProcessError:
    return ForkedProcessError(
        f"a process that was forked from rank {rank()} cannot use its engine. Call horovodish only in the process that "
        "called init(), not in a worker"
    )


def _stop(reason: str) -> None:
    life = part(_Life)
    if life.running is None:
        return
    stopped, life.running = life.running, None
    os.environ.pop(settings.RANK_PROCESS_VARIABLE, None)
    steps = stopped.engine.steps()
    exited = f"{_ENDED} by" if failures.exit_status == 0 else "called"
    left = f"{exited} {failures.exited}" if failures.exited else reason
    left += f" after {steps} step{'s' if steps > 1 else ''}" if steps else ""
    left += _LEFT_REMEDY if left.startswith((_SHUT_DOWN, _ENDED)) else ""
    why = failures.reason or left
    run_folder.reached("shutdown")
    stopped.engine.stop(failures.reason is not None, f"rank {stopped.topology.rank} {why}")
    run_folder.reached("stopped")
    life.last_loss, life.last_first_lost = stopped.engine.loss(), stopped.engine.first_lost()
    life.last_failures = stopped.engine.failures()
    errors = [from_native(kind, message) for kind, message, _ in life.last_failures]
    life.loss_raised = next((each for each in errors if isinstance(each, RankLostError | StallError)), None)
    for *_, forget in _followers:
        forget()


def _finish_programs() -> None:
    """Wait for the programs that the script has not waited for. What fails of them is `unread`."""
    life = part(_Life)
    now = life.running
    if now is None or failures.reason is not None:
        return
    engine = now.engine
    seen = engine.failures()
    held: list[str] = []
    waiting = threading.get_native_id()
    _native.add_background_thread(waiting)  # it submits nothing until the programs have ended
    try:
        for _, _, finish, _ in _followers:
            held += finish() or []
    finally:
        _native.remove_background_thread(waiting)
    new = [
        from_native(kind, message)
        for kind, message, in_program in engine.failures()
        if in_program and (kind, message, in_program) not in seen
    ]
    life.unread = next(filter(None, [*map(quoted_failure, held), *new]), None)


def end_for_others() -> None:
    """This process is about to end, and other processes go on from the last commit."""
    part(_Life).goes_on_elsewhere = True


def _warn_of_unread(error: Exception) -> None:
    print(f"horovodish: warning: an operation failed without a wait for it: {error}", file=sys.stderr, flush=True)


def _warn_of_caught() -> None:
    """The script ends in order although a rank was lost: it has caught the errors that said so."""
    life = part(_Life)
    if life.loss_raised is not None and failures.reason is None and failures.exit_status == 0:
        if not life.goes_on_elsewhere:
            caught = "this rank ends as if all were well, because its script has caught"
            error, *_ = str(life.loss_raised).splitlines()
            print(f"horovodish: warning: {caught}: {error}", file=sys.stderr, flush=True)


def _at_exit() -> None:
    try:
        _finish_programs()
        unread = part(_Life).unread
        if unread is not None and failures.reason is None and not part(_Life).goes_on_elsewhere:
            _native.fail_at_exit()
            if not failures.unread(unread, loss()):
                _warn_of_unread(unread)
    finally:
        _leave_at_exit()
        if part(_Life).unread is None:
            _warn_of_caught()


def _leave_at_exit() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Other ranks may have had it already, and Python's end would give it back its default, which kills the process.
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    if failures.reason is None and run_folder.is_followed():
        # The launcher may end the job because this rank has left. The exit status of this rank says more than SIGTERM.
        # SIGKILL follows, and before MPI_Finalize SIGTERM works again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    life = part(_Life)
    # For ever: a thread that comes back from native code after Python's end crashes the process.
    life.cutting_off.acquire()
    if life.running is not None:
        life.running.engine.hold_other_threads()
    _stop(_ENDED)
    run_folder.reached("exit", failures.exit_status)


def _after_fork_in_child() -> None:
    life = part(_Life)
    life.cutting_off = threading.Lock()  # a thread of the parent may hold its own
    if life.running is not None:
        life.forked, life.running = life.running, None
        if life.forked.peers:
            life.forked.peers.close_sockets()


def _own_rank() -> int | None:
    """The rank of this process, also while `init()` has not succeeded."""
    if (now := part(_Life).running) is not None:
        return now.topology.rank
    launched = launcher_environment()
    is_child_of_a_rank = settings.RANK_PROCESS_VARIABLE in os.environ
    return launched.rank if launched and not is_child_of_a_rank else None


@functools.cache
def _install_hooks() -> None:
    failures.watch(_own_rank, loss, left_in_order, quoted_failure)
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork_in_child)


if os.environ.get(settings.SUPERVISOR_PROCESS_VARIABLE) == str(os.getppid()):
    # A rank that fails before init() has a reason, too.
    failures.watch(_own_rank, loss, left_in_order, quoted_failure)
