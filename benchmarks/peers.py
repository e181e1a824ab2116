"""What the benchmarks share: the peers in the same ranks, the machine in one line, figures, alternating blocks."""

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed

import horovodish.torch as hvd


def start() -> None:
    """Starts our engine, and torch.distributed with gloo over the loopback device, in every rank; one thread each."""
    hvd.init()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    root = hvd.rank() == 0
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if root else None
    port = hvd.broadcast_object(store.port if store else None)
    store = store or torch.distributed.TCPStore("127.0.0.1", port)
    torch.distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def stop() -> None:
    """Ends both."""
    torch.distributed.destroy_process_group()
    hvd.shutdown()


def say(text: str = "") -> None:
    """Prints on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def machine() -> str:
    """The machine and the versions, in one line."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {hvd.size()} ranks; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {library}"
    )


def command() -> str:
    """The command that started this."""
    arguments = " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return f"horovodish run -np {hvd.size()} python {arguments}"


def alternate(
    contenders: dict[str, Callable[[], float]], rounds: int, calls: int, warmup: int
) -> dict[str, list[float]]:
    """Times the contenders in turns, so that a slow moment of the machine meets all of them.

    Args:
        contenders: by name, something that does one unit of work and returns the seconds that it took.
        rounds: how many blocks each contender has.
        calls: how many units a block has.
        warmup: how many units come first and do not count.

    Returns:
        The seconds of all units of all blocks, of all ranks, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        for _ in range(warmup):
            work()
    for turn in range(rounds):
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            hvd.barrier()
            contenders[name]()
            seconds[name] += [contenders[name]() for _ in range(calls)]
    gathered = hvd.allgather(torch.tensor(list(seconds.values()), dtype=torch.float64).T)
    return dict(zip(contenders, gathered.T.tolist(), strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
