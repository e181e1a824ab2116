"""What the benchmarks of several ranks share: the peers in the same ranks, figures, alternating blocks."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import machine
import psutil
import torch
import torch.distributed
from mpi4py import MPI

import horovodish.torch as hvd


def start() -> None:
    """Starts our engine, and torch.distributed with gloo, in every rank; one thread each.

    gloo uses the network interface that GLOO_SOCKET_IFNAME names; the loopback device when that is not set.
    """
    hvd.init()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    addresses = psutil.net_if_addrs()[interface]
    address = next(entry.address for entry in addresses if entry.family == socket.AF_INET)
    root = hvd.rank() == 0
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False) if root else None
    address, port = hvd.broadcast_object((address, store.port if store else 0))
    store = store or torch.distributed.TCPStore(address, port)
    torch.distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def stop() -> None:
    """Ends both."""
    torch.distributed.destroy_process_group()
    hvd.shutdown()


def say(text: str = "") -> None:
    """Prints on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def setup() -> str:
    """How this was started, the machine and the versions, in two lines."""
    hosts = f" on {hvd.cross_size()} hosts" if hvd.cross_size() > 1 else ""
    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    start = f"horovodish run -np {hvd.size()} python" if hvd.cross_size() == 1 else "python"
    return f"{machine.command(start)}\n{machine.machine(['numpy', 'torch'])}, {library}; {hvd.size()} ranks{hosts}"


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """`call` as a contender for `alternate`."""

    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def calls_within(contenders: Mapping[str, Callable[[], float]], seconds: float, most: int) -> dict[str, int]:
    """How many calls of each contender take about that time: 2 to `most`, the same on all ranks. Warms them up."""
    calls = {}
    for name, work in contenders.items():
        work()
        hvd.barrier()
        slowest = hvd.allreduce(torch.tensor([min(work() for _ in range(3))], dtype=torch.float64), op=hvd.Max).item()
        calls[name] = max(2, min(most, int(seconds / slowest)))
    return calls


def alternate(
    contenders: Mapping[str, Callable[[], float]], rounds: int, calls: Mapping[str, int]
) -> dict[str, list[float]]:
    """Times the contenders in turns, so that a slow moment of the machine meets all of them.

    Args:
        contenders: by name, something that does one unit of work and returns the seconds that it took.
        rounds: how many blocks each contender has.
        calls: by name, how many units a block has, after one that does not count.

    Returns:
        The seconds of all units of all blocks, of all ranks, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            hvd.barrier()
            contenders[name]()
            seconds[name] += [contenders[name]() for _ in range(calls[name])]
    return {name: hvd.allgather(torch.tensor(values, dtype=torch.float64)).tolist() for name, values in seconds.items()}


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
