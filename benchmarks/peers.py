"""What the benchmarks beside torch.distributed share: the peers in the same ranks, and `rounds`."""

import os
import socket
from collections.abc import Callable, Mapping

import machine
import psutil
import torch
import torch.distributed
from mpi4py import MPI
from rounds import alternate, percentile, say, timed

import horovodish.torch as hvd

__all__ = ["alternate", "calls_within", "percentile", "say", "setup", "start", "stop", "timed"]


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


def setup() -> str:
    """How this was started, the machine and the versions, in two lines."""
    hosts = f" on {hvd.cross_size()} hosts" if hvd.cross_size() > 1 else ""
    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    start = f"horovodish run -np {hvd.size()} python" if hvd.cross_size() == 1 else "python"
    return f"{machine.command(start)}\n{machine.machine(['numpy', 'torch'])}, {library}; {hvd.size()} ranks{hosts}"


def calls_within(contenders: Mapping[str, Callable[[], float]], seconds: float, most: int) -> dict[str, int]:
    """How many calls of each contender take about that time: 2 to `most`, the same on all ranks. Warms them up."""
    calls = {}
    for name, work in contenders.items():
        work()
        hvd.barrier()
        slowest = hvd.allreduce(torch.tensor([min(work() for _ in range(3))], dtype=torch.float64), op=hvd.Max).item()
        calls[name] = max(2, min(most, int(seconds / slowest)))
    return calls
