"""For benchmarks that compare with PyTorch's own process groups where mpirun starts the ranks."""

import os
import socket

import psutil

import horovodish as hvd


def set_torchrun_variables() -> None:
    """Set what `torch.distributed` reads, unless the launcher has. Every rank must call it, after `init()`."""
    if "RANK" in os.environ:
        return
    interface = psutil.net_if_addrs()[os.environ.get("GLOO_SOCKET_IFNAME", "lo")]
    address = next(its.address for its in interface if its.family == socket.AF_INET)
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    address, port = hvd.broadcast_object((address, port))
    os.environ |= {"RANK": str(hvd.rank()), "WORLD_SIZE": str(hvd.size())}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
