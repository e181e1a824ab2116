"""`horovod.run` starts the ranks from Python; each rank reads its batches with `horovod.data`."""

import horovod
import horovod.torch as hvd
import torch
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Batches(BaseDataLoader):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def _iterate(self):
        yield from (torch.full((2,), float(i)) for i in range(self.count))

    def _process_batch(self, batch):
        return batch + 1


class AsyncBatches(AsyncDataLoaderMixin, Batches):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def train(count, scale=1.0):
    hvd.init()
    loader = AsyncBatches(count=count, async_loader_queue_size=2)
    total = torch.zeros(2)
    for epoch in range(2):
        for batch in loader:
            total += hvd.allreduce(batch * scale, name="batch", op=hvd.Sum)
    loader.close_async_loader()
    return hvd.rank(), total.tolist()


if __name__ == "__main__":
    results = horovod.run(train, args=(3,), kwargs={"scale": 0.5}, np=2, use_mpi=True, verbose=0)
    assert results == [(0, [12.0, 12.0]), (1, [12.0, 12.0])], results
    print("done")
