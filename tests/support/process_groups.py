"""Process groups of torch.distributed over our engine, for tests on ranks that have called `init()`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import horovodish.torch as hvd
import horovodish.torch.backend  # noqa: F401


def begin(folder: Path, timeout: float = 60) -> None:
    store = dist.FileStore(str(folder / "store"), hvd.size())
    dist.init_process_group(
        "horovodish", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=timedelta(seconds=timeout)
    )


def begin_over_tcp(timeout: float = 60) -> None:
    """As `begin`, but rank 0 has the store in its process, as in most jobs. It lives as long as the groups."""
    limit, is_host = timedelta(seconds=timeout), hvd.rank() == 0
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit) if is_host else None
    port = hvd.broadcast_object(store.port if store else None)
    store = store or dist.TCPStore("localhost", port, is_master=False, timeout=limit)
    dist.init_process_group("horovodish", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=limit)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)
