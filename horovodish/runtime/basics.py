"""The life of the engine in a process, and where this process stands among the ranks."""

import atexit
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from horovodish import _native, settings
from horovodish.errors import ForkedProcessError, NotInitializedError, RankLostError, SettingError
from horovodish.launch import failures, run_folder
from horovodish.launch.environment import check_no_other_launcher, launcher_environment
from horovodish.mpi import binding, communicators, late_ranks, local_peers
from horovodish.runtime import affinity, nccl_library
from horovodish.runtime.process import part
from horovodish.runtime.topology import Topology
from horovodish.version import __version__

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


_SHUT_DOWN, _ENDED = "called shutdown()", "has ended its script"


@dataclass
class Running:
    """What there is between `init()` and `shutdown()`.

    Attributes:
        topology: as the user sees it.
        engine_topology: as the engine sees it, which may be told that every rank is a host of its own.
        communicator: of all ranks, not used by the engine; None in a world of one rank without a launcher.
        settings: those of `init()`: all ranks have the same ones, except for those that may differ by rank.
        begun_ns: rank 0's time of day when it had called `init()`, the same number on every rank.
        some_timeline: whether the settings of any rank name a file for a timeline.
    """

    topology: Topology
    engine_topology: Topology
    engine: _native.Engine
    communicator: "Intracomm | None"
    peers: local_peers.LocalPeers | None
    settings: settings.Settings
    begun_ns: int
    some_timeline: bool

    def add_process_set(
        self, id: int, ranks: list[int], region: int, comm: "Intracomm | None", generation: int
    ) -> None:
        """Tell the engine of a process set that contains this rank. Every one of its ranks must do so.

        Args:
            id: of the process set.
            ranks: of the world, in ascending order.
            region: of shared memory; no other set that is alive uses it.
            comm: a communicator of exactly these ranks; needed where they are on several hosts.
            generation: how often an engine has used `comm` before.
        """
        hosts = [[ranks.index(rank) for rank in host if rank in ranks] for host in self.engine_topology.hosts]
        hosts = sorted(filter(None, hosts))
        local = [rank for rank in self.engine_topology.local_ranks if rank in ranks]
        self.engine.add_process_set(
            id,
            ranks=ranks,
            hosts=hosts,
            local=[self.engine_topology.local_ranks.index(rank) for rank in local],
            region=region,
            mpi=binding.native_table(comm) if comm is not None and len(hosts) > 1 else None,
            generation=generation,
        )


@dataclass
class _Life:
    """Of the engine in this process.

    Attributes:
        running: between `init()` and `shutdown()`.
        forked: the parent's, in a forked child: unusable and never destroyed.
        last_loss, last_first_lost: of the engine that was stopped, until the next `init()`.
        cut_off_because: likewise.
        cutting_off: held while another thread stops the engine.
    """

    running: Running | None = None
    forked: Running | None = None
    last_loss: str = ""
    last_first_lost: int = 0
    cut_off_because: str = ""
    cutting_off: threading.Lock = field(default_factory=threading.Lock)


_followers: list[tuple[Callable[[Any], None], Callable[[Any], None], Callable[[], None], Callable[[], None]]] = []


def init(comm: "Intracomm | Iterable[int] | None" = None, process_sets: Any = None) -> None:
    """Start the engine. Every rank of the world must call it; it blocks until all have. A second call does nothing.

    Without a launcher the world is one rank, and no MPI is needed.

    Args:
        comm: who takes part: None for all ranks, ranks of MPI's world in the order of their new numbers, such as [0, 1]
            or range(4), or an `mpi4py` communicator.
        process_sets: a list of `ProcessSet` objects to add at once. More can be added later; Horovod's "dynamic" is
            accepted and changes nothing.

    Raises:
        LaunchError: no MPI, or a launcher of another MPI than mpi4py's, or torchrun, or the ranks of a host cannot
            share memory.
        SettingError: a HOROVODISH_* variable has a bad value, or not the same one on every rank.
        ForkedProcessError: in a child of a process that had called `init()`, however it was started.
        ValueError: the ranks of `comm` are none, repeat a rank, or lack the calling rank.
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
    for check, *_ in _followers:
        check(process_sets)
    _install_hooks()
    notices: list[str] = []
    if comm is None and launcher_environment() is None:
        check_no_other_launcher()
        knobs = settings.load(warn=notices.append)
        life.running = _start(Topology(0, ((0,),)), knobs, bool(knobs.timeline_filename))
    else:
        _check_not_started_by_a_rank()
        run_folder.reached("init")
        run_folder.await_go()
        try:
            life.running = _start_on(communicators.of(comm), notices)
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
    """Stop the engine of this rank. `init()` may be called again on all ranks.

    It first waits for the programs that JAX, or TensorFlow's asynchronous execution, has dispatched on this rank. They
    may need other ranks. After that it does not wait for other ranks: handles that are pending on this rank fail with
    `EngineStoppedError`, and operations of ranks that still need this one fail with `RankLostError`. Does nothing
    before `init()` and in a forked child.
    """
    try:
        _finish_programs()
    finally:
        _stop(_SHUT_DOWN)


def follow(
    *,
    check: Callable[[Any], None] = lambda _: None,
    started: Callable[[Any], None] = lambda _: None,
    finish: Callable[[], None] = lambda: None,
    stopped: Callable[[], None] = lambda: None,
) -> None:
    """Tell a module that builds on this one when the engine starts and stops.

    Args:
        check: called before each start, with the `process_sets` of `init`; raises what is wrong with them.
        started: called after each start, with the same. What it raises ends the engine. It waits for other ranks by
            means of the engine only, since one of them may have raised.
        finish: called before the engine stops, unless the script has failed. It waits for the programs of a framework
            that runs ahead of the script, and does not raise their errors.
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
    """How many ranks there are."""
    return _topology().size


def local_rank() -> int:
    """The number of this rank among those of its host, from 0."""
    return _topology().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return len(_topology().local_ranks)


def cross_rank() -> int:
    """The number of this host among those that have a rank of this local rank, from 0."""
    topology = _topology()
    return topology.peers_across.index(topology.host)


def cross_size() -> int:
    """How many hosts have a rank of this local rank."""
    return len(_topology().peers_across)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len({len(ranks) for ranks in _topology().hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether threads may call MPI. `init()` refuses an MPI in which they may not.

    Raises:
        NotInitializedError: before `init()`.
    """
    running()
    return True


def mpi_enabled() -> bool:
    """Whether the ranks are connected by MPI. A world of one rank without a launcher is not."""
    now = part(_Life).running
    return now is not None and now.communicator is not None


def mpi_built() -> bool:
    """True: the engine looks MPI's functions up at run time and needs no build of its own for it."""
    return True


def nccl_built() -> int:
    """The version of the NCCL library that is found, such as 22900 for 2.29.0; 0 if there is none that can be used."""
    found = nccl_library.find()
    if found is None or found.version is None or found.too_old:
        return 0
    major, minor, patch = found.version
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """True: the engine looks the functions of CUDA's driver up at run time and needs no build of its own for it."""
    return True


def rocm_built() -> bool:
    """False: there is no ROCm support."""
    return False


def gloo_built() -> bool:
    """False: shared memory and MPI take the place of gloo."""
    return False


def gloo_enabled() -> bool:
    """False: shared memory and MPI take the place of gloo."""
    return False


def ddl_built() -> bool:
    """False: there is no IBM DDL support."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL support."""
    return False


def running() -> Running:
    """What `init()` has started, for the other modules.

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
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "horovodish":
        name = frame.f_code.co_name
        called = called if name.startswith(("_", "<")) or name == "by_names" else name
        frame = frame.f_back
    return f"before {called}()" if called else "first"


def _topology() -> Topology:
    return (part(_Life).forked or running()).topology


def loss() -> str:
    """The message about a lost rank, from the engine or else from the launcher; empty if none was lost.

    Errors quote the message of the engine. They do not quote that of the launcher.
    """
    life = part(_Life)
    return (life.running.engine.loss() if life.running else life.last_loss) or life.cut_off_because


def left_in_order() -> bool:
    """Whether the rank that `loss()` is about has raised nothing: only the ranks that wait for it can say where."""
    return re.match(rf"rank \d+ ({re.escape(_SHUT_DOWN)}|{_ENDED})", loss()) is not None


def check_no_loss() -> None:
    """Raise if a rank was lost and the script goes on.

    Raises:
        RankLostError: that is so.
    """
    if has_engine() and (lost := loss()):
        caught = " The script has caught the error that said so. Let it pass: hvd.elastic then goes back to a commit"
        raise RankLostError(f"{lost.rstrip('.')}.{caught if has_failed() else ''}")


def has_failed() -> bool:
    """Whether an operation of this rank has failed because a rank was lost, or will, since the last `init()`."""
    now = part(_Life).running
    return now is not None and (bool(now.engine.loss()) or now.engine.refused())


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
    """Wait until the GPU has done all that was launched on it, so that what it has computed can be kept.

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


def _check_not_started_by_a_rank() -> None:
    # A worker that is spawned runs the script up to its main part. To MPI it would be the rank that started it.
    process, _, job = os.environ.get(settings.RANK_PROCESS_VARIABLE, "").partition(" ")
    if process not in ("", str(os.getpid())) and _job() in ("", job):
        raise ForkedProcessError(
            f"process {os.getpid()} was started by process {process}, which is a rank, and is none itself. Keep what "
            "only ranks do, init() among it, behind: if __name__ == '__main__':"
        )


def _job() -> str:
    """The MPI job that started this process; empty if unknown. A rank may start another job.

    Open MPI has a name for it. MPICH's launcher shares a socket with each rank, which a rank's workers do not inherit.
    """
    if "PMIX_NAMESPACE" in os.environ:
        return os.environ["PMIX_NAMESPACE"]
    try:
        end = os.readlink(f"/proc/self/fd/{os.environ['PMI_FD']}")
    except (KeyError, OSError):
        return ""
    return end if end.startswith("socket:") else ""


def _start_on(communicator: communicators.Communicator, notices: list[str]) -> Running:
    comm = communicator.control
    late_ranks.roll_call(comm)
    with late_ranks.reported("an answer: every rank has called init(), but one has failed since or is stopped"):
        return _start_together(communicator, notices)


def _start_together(communicator: communicators.Communicator, notices: list[str]) -> Running:
    comm = communicator.control
    local_comm = comm.Split_type(binding.load().COMM_TYPE_SHARED)
    own = comm.Get_rank()
    knobs = settings.load(warn=notices.append)
    communicator.start_timeout_seconds = knobs.start_timeout_seconds
    leader = local_comm.bcast(own, root=0)
    seen: list[tuple[int, settings.Settings, str]] = comm.allgather((leader, knobs, __version__))
    binding.unname_shared_memory(comm)
    _check_agreement(seen)
    if knobs.ring_segment_kb == 0:
        knobs = replace(knobs, ring_segment_kb=min(comm.allgather(binding.segment_kb())))
    if knobs.join_average == "auto":
        serves_horovod = any(comm.allgather("horovodish.as_horovod" in sys.modules))
        knobs = replace(knobs, join_average="size" if serves_horovod else "present")
    leaders = sorted({entry[0] for entry in seen})
    hosts = tuple(tuple(rank for rank, entry in enumerate(seen) if entry[0] == leader) for leader in leaders)
    topology = Topology(own, hosts)
    peers = None
    if topology.size > 1 and knobs.plane != "mpi_ring":
        memory_bytes = _native.arena_bytes(len(topology.local_ranks), knobs.chunk_kb * 1024)
        peers = local_peers.connect(local_comm, memory_bytes, knobs.start_timeout_seconds)
    local_comm.Free()
    some_timeline = any(entry[1].timeline_filename for entry in seen)
    started = _start(topology, knobs, some_timeline, communicator, peers)
    comm.Barrier()
    if launcher_environment() is not None:
        os.environ[settings.RANK_PROCESS_VARIABLE] = f"{os.getpid()} {_job()}"
    return started


def _check_agreement(seen: list[tuple[int, settings.Settings, str]]) -> None:
    for index, (_, knobs, version) in enumerate(seen):
        if version != seen[0][2]:
            raise SettingError(
                f"rank 0 runs horovodish {seen[0][2]} but rank {index} runs {version}: install one version everywhere"
            )
        for row in settings.table():
            ours, theirs = getattr(seen[0][1], row.name), getattr(knobs, row.name)
            if ours != theirs and not row.by_rank:
                flag = row.flag if row.is_switch else f"{row.flag} VALUE"
                raise SettingError(
                    f"{row.variable} is {ours!r} on rank 0 but {theirs!r} on rank {index}: set it alike on every rank, "
                    f"for example with `horovodish run {flag}`"
                )


def _start(
    topology: Topology,
    knobs: settings.Settings,
    some_timeline: bool,
    communicator: communicators.Communicator | None = None,
    peers: local_peers.LocalPeers | None = None,
) -> Running:
    # With more ranks than cores a thread that spins keeps the one from running that it waits for.
    spin_us = knobs.spin_us if len(topology.local_ranks) <= len(os.sched_getaffinity(0)) else 0
    with affinity.new_threads_on(affinity.core_of(topology, knobs.thread_affinity)):
        native = _native.Engine(
            rank=topology.rank,
            size=topology.size,
            local_rank=topology.local_rank,
            local_size=len(topology.local_ranks),
            arena_descriptors=peers.descriptors if peers else [],
            peer_sockets=peers.sockets if peers else [],
            chunk_bytes=knobs.chunk_kb * 1024,
            ring_segment_bytes=knobs.ring_segment_kb * 1024,
            cache_capacity=knobs.cache_capacity,
            spin_us=spin_us,
            stall_warning_seconds=knobs.stall_check_warning_time_seconds if knobs.stall_check else 0.0,
            stall_shutdown_seconds=knobs.stall_check_shutdown_time_seconds if knobs.stall_check else 0.0,
            stack_signal=_stack_signal(knobs),
            plane=knobs.plane,
            shared_gpu=nccl_library.ranks_share_gpus(),
            horovods_gradients=knobs.collective_gradients == "horovod",
            averages_over_size=knobs.join_average == "size",
        )
    if peers:
        peers.close_memory()
    every_rank_alone = tuple((rank,) for rank in range(topology.size))
    engine_topology = Topology(topology.rank, every_rank_alone) if knobs.plane == "mpi_ring" else topology
    control = communicator.control if communicator else None
    begun_ns = control.bcast(time.time_ns()) if control else time.time_ns()
    started = Running(topology, engine_topology, native, control, peers, knobs, begun_ns, some_timeline)
    generation = communicator.generation if communicator else 0
    comm = communicator.engine if communicator else None
    started.add_process_set(0, list(range(topology.size)), 0, comm, generation)
    return started


def _stack_signal(knobs: settings.Settings) -> int:
    """The signal at which this process prints its Python stacks, 0 for none."""
    if not knobs.stall_check_stacks:
        return 0
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    return int(signal.SIGUSR2)


def _stop(reason: str) -> None:
    life = part(_Life)
    if life.running is None:
        return
    stopped, life.running = life.running, None
    os.environ.pop(settings.RANK_PROCESS_VARIABLE, None)
    steps = stopped.engine.steps()
    why = failures.reason or (f"{reason} after {steps} step{'s' if steps > 1 else ''}" if steps else reason)
    run_folder.reached("shutdown")
    stopped.engine.stop(failures.reason is not None, f"rank {stopped.topology.rank} {why}")
    run_folder.reached("stopped")
    life.last_loss, life.last_first_lost = stopped.engine.loss(), stopped.engine.first_lost()
    for *_, forget in _followers:
        forget()


def _finish_programs() -> None:
    now = part(_Life).running
    if now is None or failures.reason is not None:
        return
    engine = now.engine
    seen = engine.last_failure()
    waiting = threading.get_native_id()
    _native.add_background_thread(waiting)  # it submits nothing until the programs have ended
    try:
        for _, _, finish, _ in _followers:
            finish()
    finally:
        _native.remove_background_thread(waiting)
    if (failure := engine.last_failure()) != seen:
        warning = f"horovodish: warning: an operation that the script did not wait for: {failure}"
        print(warning, file=sys.stderr, flush=True)


def _at_exit() -> None:
    try:
        _finish_programs()
    finally:
        _leave_at_exit()


def _leave_at_exit() -> None:
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
    run_folder.reached("exit")


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
    failures.watch(_own_rank, loss, left_in_order)
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork_in_child)


if os.environ.get(settings.SUPERVISOR_PROCESS_VARIABLE) == str(os.getppid()):
    failures.watch(_own_rank, loss, left_in_order)  # a rank that fails before init() has a reason, too
