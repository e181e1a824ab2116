"""What each rank of benchmarks/recovery.py trains with DDP, started by torchrun."""

import os
import time

import recovery
import torch

restarts, rank, size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
# Each start has keys of its own: otherwise Gloo would connect to the addresses of the start before.
agents = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = torch.distributed.PrefixStore(f"start {restarts}", agents)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
model = torch.nn.Sequential(*(torch.nn.Linear(recovery.FEATURES, recovery.FEATURES) for _ in range(recovery.LAYERS)))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
inputs = torch.randn(4, recovery.FEATURES)
step, path = 0, os.environ["CHECKPOINT"]
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < int(os.environ["STEPS"]):
    optimizer.zero_grad()
    ddp(inputs).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.new")
        os.replace(f"{path}.new", path)
    print(f"step: {rank} {size} {restarts} {step} {time.time()} {os.getpid()}", flush=True)
