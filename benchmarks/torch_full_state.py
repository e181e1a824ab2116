"""Memory of a rank that gathers a sharded Adam's state:  horovodish run -np 3 python benchmarks/torch_full_state.py

For each way to shard it prints the bytes of the full state, and by how much the peak of the root and of the other ranks
rises during `full_state_dict()`.
"""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import horovodish.torch as hvd

WAYS = [("states", "element"), ("states", "parameter"), ("gradients", "element"), ("gradients", "parameter")]
PROCESS = Path("/proc/self")


def resident_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", (PROCESS / "status").read_text())
    assert found is not None
    return int(found[1]) << 10


def rise_of_peak(optimizer: Any) -> tuple[int, int]:
    """The bytes of the full state on the root, and by how many the peak of this process has risen."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that glibc keeps would hide new memory
    (PROCESS / "clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    full = optimizer.full_state_dict()
    rise = resident_bytes("VmHWM") - before
    return sum(value.nbytes for its in full["state"].values() for value in its.values()) if full else 0, rise


def main() -> None:
    hvd.init()
    for shard, shard_by in WAYS:
        torch.manual_seed(0)
        # With whole parameters the root owns the last weight, the largest. Its elements lie column by column.
        model = nn.Sequential(nn.Linear(1024, 16000), nn.Linear(16000, 1500))
        model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard, shard_by=shard_by)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
        (state, root), *others = hvd.allgather_object(rise_of_peak(optimizer))
        if hvd.rank() == 0:
            other = max(rise for _, rise in others)
            print(
                f"{shard} by {shard_by}: a state of {state / 1e6:.0f} MB; the peak of the root rises by "
                f"{root / 1e6:.0f} MB, the peak of another rank by {other / 1e6:.0f} MB",
                flush=True,
            )


main()
