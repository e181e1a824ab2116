"""How the engine of a process starts."""

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from horovodish import _native, settings
from horovodish.errors import ForkedProcessError, SettingError
from horovodish.launch.environment import launcher_environment
from horovodish.mpi import binding, communicators, late_ranks, local_peers
from horovodish.runtime import affinity, nccl_library, status_door
from horovodish.runtime.topology import Topology
from horovodish.version import __version__

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass
class Running:
    """The objects that exist between `init()` and `shutdown()`.

    Attributes:
        topology: as the user sees it.
        engine_topology: as the engine sees it: a setting can make every rank its own host.
        communicator: of all ranks, not used by the engine; None in a world of one rank without a launcher.
        settings: of `init()`, the same on all ranks, except for settings that may differ by rank.
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
        self,
        id: int,
        ranks: list[int],
        region: int,
        comm: "Intracomm | None",
        generation: int = 0,
        longest_wait_seconds: float = 0.0,
    ) -> None:
        """Tell the engine of a process set that contains this rank. Every one of its ranks must do so.

        Args:
            id: of the process set.
            ranks: of the world, in ascending order.
            region: of shared memory; no other set that is alive uses it.
            comm: a communicator of exactly these ranks; needed where they are on several hosts.
            generation: how often an engine has used `comm` before.
            longest_wait_seconds: its ranks wait for each other no longer; 0: as the settings of stalls say.
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
            mpi=binding.native_table(comm, generation) if comm is not None and len(hosts) > 1 else None,
            longest_wait_seconds=longest_wait_seconds,
        )


def check_not_started_by_a_rank() -> None:
    """Raise in a process that a rank has started.

    Raises:
        ForkedProcessError: that is so.
    """
    # A worker that is spawned runs the script up to its main part. To MPI it would be the rank that started it.
    process, _, job = os.environ.get(settings.RANK_PROCESS_VARIABLE, "").partition(" ")
    if process not in ("", str(os.getpid())) and _job() in ("", job):
        raise ForkedProcessError(
            f"process {os.getpid()} is not a rank: it was started by process {process}, which is a rank. Put the code "
            "for ranks, init() included, behind: if __name__ == '__main__':"
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


def alone(notices: list[str]) -> Running:
    """A world of one rank, without MPI. `notices` gets what the user should know, as below."""
    knobs = settings.load(warn=notices.append)
    return _start(Topology(0, ((0,),)), knobs, bool(knobs.timeline_filename))


def on(communicator: communicators.Communicator, notices: list[str]) -> Running:
    """The ranks of a communicator; all of them must call it.

    Raises:
        LaunchError: the ranks of a host cannot share memory.
        SettingError: a HOROVODISH_* variable has a bad value, or not the same one on every rank.
    """
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
                ours, theirs = (f"unset ({row.usual})" if each is None else repr(each) for each in (ours, theirs))
                raise SettingError(
                    f"{row.variable} is {ours} on rank 0 but {theirs} on rank {index}: set it alike on every rank, "
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
    status_door.open_for(native)
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
