"""The collectives as scripts call them: the old API, process sets, uneven batches, sparse gradients, objects."""

import os

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import env, gpu_available, split_list
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object as broadcast_any
from horovod.torch.mpi_ops import Average, allreduce_async, poll, rank, size, synchronize
from torch import nn, optim

even, odd = ProcessSet([0]), ProcessSet([1])
hvd.init(process_sets=[even, odd])
assert (rank(), size()) == (hvd.rank(), hvd.size())
mine = even if hvd.rank() == 0 else odd
one = torch.full((3,), float(hvd.rank()))

# average= came before op=, and is the second positional argument.
assert hvd.allreduce(one, True, "mean").tolist() == [0.5] * 3
assert hvd.allreduce(one, average=False).tolist() == [1.0] * 3
assert hvd.allreduce(one, op=hvd.mpi_ops.Sum).tolist() == [1.0] * 3
handle = allreduce_async(one, op=Average, name="asynchronous")
poll(handle)
assert synchronize(handle).tolist() == [0.5] * 3
hvd.allreduce_(one)
assert one.tolist() == [0.5] * 3
assert hvd.allreduce(torch.ones(2), compression=Compression.fp16).tolist() == [1.0, 1.0]
assert [t.item() for t in hvd.grouped_allreduce([torch.ones(1), 2 * torch.ones(1)], op=hvd.Sum)] == [2, 4]
assert hvd.allgather(torch.full((hvd.rank() + 1, 2), 1)).shape == (3, 2)
assert hvd.alltoall(torch.arange(2)).tolist() == [hvd.rank()] * 2
received, splits = hvd.alltoall(torch.arange(3), splits=torch.tensor([1, 2]))
assert splits.tolist() == [hvd.rank() + 1] * 2
assert hvd.reducescatter(torch.ones(4), op=hvd.Sum).tolist() == [2.0, 2.0]
assert hvd.allreduce(torch.ones(4), op=hvd.Adasum).shape == (4,)
hvd.barrier()

# Objects.
config = hvd.broadcast_object({"lr": 0.1} if hvd.rank() == 0 else None, root_rank=0)
assert config == {"lr": 0.1} == broadcast_any(config, 0, name="config")
assert hvd.allgather_object([hvd.rank()] * hvd.rank()) == [[], [1]]

# Process sets.
assert mine.included() and mine.size() == 1 and mine.rank() == 0 and global_process_set.size() == 2
assert hvd.allreduce(torch.tensor([5.0]), op=hvd.Sum, process_set=mine).item() == 5
model = nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), process_set=mine)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()

# A sparse embedding, and ranks with different numbers of batches.
embedding = nn.Embedding(10, 4, sparse=True)
head = nn.Linear(4, 1)
parameters = [*embedding.named_parameters(prefix="embedding"), *head.named_parameters(prefix="head")]
optimizer = hvd.DistributedOptimizer(optim.SGD([p for _, p in parameters], lr=0.1), named_parameters=parameters)
hvd.broadcast_parameters(dict(parameters), root_rank=0)
for step in range(2 + hvd.rank()):
    optimizer.zero_grad()
    head(embedding(torch.tensor([step, 9]))).sum().backward()
    optimizer.step()
last = hvd.join()
assert last == 1, last
hvd.broadcast_parameters(dict(parameters), root_rank=last)
dense = hvd.DistributedOptimizer(optim.SGD(embedding.parameters(), lr=0.1), sparse_as_dense=True)
embedding(torch.tensor([hvd.rank()])).sum().backward()
dense.step()

# Helpers that scripts import from inside of Horovod.
assert split_list([1, 2, 3], 2) == [[1, 2], [3]]
assert gpu_available("torch") == torch.cuda.is_available()
with env(MASTER="here"):
    assert os.environ["MASTER"] == "here"
try:
    hvd.allreduce(torch.ones(hvd.rank() + 1), name="mismatch")
    raise AssertionError("ranks that disagree must see it")
except HorovodInternalError:
    pass
hvd.shutdown()
print("done")
