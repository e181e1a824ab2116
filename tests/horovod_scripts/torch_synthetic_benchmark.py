"""Throughput on random data, a GAN with two optimizers, and what the installation was built with."""

import argparse
import timeit

import horovod
import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
assert horovod.__version__.startswith("0.28.1"), horovod.__version__
assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_built() and not hvd.ddl_built() and not hvd.ccl_built()
assert hvd.is_homogeneous() and hvd.mpi_threads_supported() in (True, False)
assert (hvd.cross_rank(), hvd.cross_size(), hvd.local_size()) == (0, 1, 2)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = optim.SGD(model.parameters(), lr=0.01 * (hvd.size() if not hvd.nccl_built() else hvd.local_size()))
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(32, 64), torch.randint(0, 10, (32,))


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text)


timeit.timeit(benchmark_step, number=2)
img_secs = [32 * 5 / timeit.timeit(benchmark_step, number=5) for _ in range(2)]
log(f"Img/sec per process: {np.mean(img_secs):.1f}")
log(f"Total img/sec on {hvd.size()} process(es): {hvd.size() * np.mean(img_secs):.1f}")

# A GAN: two models, two optimizers, and gradients of one that pass through the other.
netG, netD = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())
optimizerD = optim.Adam(netD.parameters(), lr=0.0002 * hvd.size(), betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002 * hvd.size(), betas=(0.5, 0.999))
optimizerD = hvd.DistributedOptimizer(optimizerD, named_parameters=netD.named_parameters(prefix="D"))
optimizerG = hvd.DistributedOptimizer(optimizerG, named_parameters=netG.named_parameters(prefix="G"))
for net, opt in ((netD, optimizerD), (netG, optimizerG)):
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
criterion = nn.BCELoss()
for step in range(3):
    netD.zero_grad()
    real = torch.randn(4, 16)
    fake = netG(torch.randn(4, 8))
    criterion(netD(real), torch.ones(4, 1)).backward()
    optimizerD.synchronize()
    criterion(netD(fake.detach()), torch.zeros(4, 1)).backward()
    optimizerD.step()
    netG.zero_grad()
    criterion(netD(fake), torch.ones(4, 1)).backward()
    optimizerG.step()
for net in (netD, netG):
    for parameter in net.parameters():
        assert torch.equal(hvd.broadcast(parameter.detach(), 0), parameter)
log("done")
