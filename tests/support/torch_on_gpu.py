"""What must hold for tensors of PyTorch on a GPU. Here or where there is none, on pretended GPUs: see `Place`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import horovodish.torch as hvd
from horovodish.collectives import devices
from horovodish.collectives.submission import Handle
from horovodish.collectives.transfers import receive, send
from horovodish.gradients.options import GradientOptions
from horovodish.torch import cuda
from horovodish.torch.adapter import TENSORS
from horovodish.torch.gradients.slot import Slot
from support.model import FLOATS, INTEGERS, OPS, adasum, difference, reduced, values
from support.pretended_gpu import Stream
from support.tensors import array_of, tensor_of


class _Marks(TorchDispatchMode):
    """Knows which tensors would be on the GPU: those that were put there, and what was computed from them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if not to_host and any(self.on_gpu(value) for value in tree_iter((args, kwargs))):
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self.mark(value)
        return result

    @staticmethod
    def on_gpu(value: object) -> bool:
        return getattr(value, "pretended_on_gpu", False)

    @staticmethod
    def mark(tensor: torch.Tensor) -> torch.Tensor:
        tensor.pretended_on_gpu = True  # type: ignore[attr-defined]
        return tensor


class Place:
    """Where tensors are: this rank's GPU, or host memory that counts as one. A context for everything that uses it.

    Without a GPU, tensors count as on the GPU if they come from `put` or `module`, or are computed from such a tensor.
    A tensor that the product makes without a device stays on the host, as it would beside a real GPU.

    Args:
        real: whether there is a GPU. All ranks of a host use its first one.
    """

    def __init__(self, real: bool) -> None:
        self.real = real
        self.device = torch.device("cuda:0" if real else "cpu")
        self._left = contextlib.ExitStack()
        if not real:
            self._streams = [Stream()]

    def __enter__(self) -> Place:
        if self.real:
            return self
        self._left.enter_context(_Marks())
        wait, ordinal = Handle.wait, hvd.local_rank()

        def wait_for_stream(handle: Handle[Any]) -> Any:
            """Torch computes at once, on values that a stream is yet to bring."""
            result = wait(handle)
            self.wait()
            return result

        def stream_getter(given: int) -> Any:
            return None if given == devices.HOST else lambda: self._streams[-1].handle

        def ordinal_of(tensor: torch.Tensor) -> int:
            return ordinal if _Marks.on_gpu(tensor) else devices.HOST

        def work_so_far(_: torch.Tensor) -> Any:
            """Torch writes at once, so the host waits. A stream that a test holds goes on only then."""
            stream = self._streams[-1]

            def wait() -> None:
                stream.hold(False)
                stream.wait()

            return wait

        for where, name, pretended in [
            (Handle, "wait", wait_for_stream),
            (cuda, "ordinal_of", ordinal_of),
            (cuda, "stream_getter", stream_getter),
            (cuda, "work_so_far", work_so_far),
        ]:
            self._left.enter_context(mock.patch.object(where, name, pretended))
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def put(self, array: Any) -> torch.Tensor:
        tensor = tensor_of(array).to(self.device)
        return tensor if self.real else _Marks.mark(tensor)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, with its parameters and buffers here."""
        module.to(self.device)
        for tensor in [] if self.real else [*module.parameters(), *module.buffers()]:
            _Marks.mark(tensor)
        return module

    def get(self, tensor: torch.Tensor) -> Any:
        """The values, once the current stream has come so far."""
        self.wait()
        return array_of(tensor.cpu())

    def wait(self) -> None:
        if self.real:
            torch.cuda.current_stream().synchronize()
        else:
            self._streams[-1].wait()

    def occupy(self, tensor: torch.Tensor) -> None:
        """Have the current stream write to a tensor of float32 later: where it is pretended, after `release`."""
        if self.real:
            torch.cuda._sleep(10**9)
            tensor.add_(1.0)
        else:
            self._streams[-1].hold(True)
            self._streams[-1].add(tensor.numpy(), 1.0)

    def release(self) -> None:
        """Have the current stream do its work."""
        if not self.real:
            self._streams[-1].hold(False)

    @contextlib.contextmanager
    def unordered_stream(self) -> Iterator[None]:
        """A stream of its own for what happens within, which waits for no other one."""
        if self.real:
            with torch.cuda.stream(torch.cuda.Stream()):
                yield
            return
        self._streams.append(Stream())
        try:
            yield
        finally:
            self._streams.pop()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """A stream of its own for what happens within."""
        if self.real:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                yield
            return
        self.wait()
        self._streams.append(Stream())
        try:
            yield
        finally:
            self.wait()
            self._streams.pop()


def every_collective(place: Place) -> None:
    reductions(place)
    moves(place)
    if hvd.size() > 1:
        sends(place)
        a_receive_beside_work_on_its_tensor(place)
    groups_and_modules(place)


def reductions(place: Place) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in INTEGERS + FLOATS:
        for op in [*OPS, "Adasum"]:
            if op == "Adasum" and dtype in INTEGERS:
                continue
            by_rank = [values(dtype, 1003, r, op) for r in range(size)]
            expected = adasum([each.astype(np.float64) for each in by_rank]) if op == "Adasum" else reduced(by_rank, op)
            result = hvd.allreduce(place.put(by_rank[rank]), op=getattr(hvd, op), name=f"{dtype} {op}")
            assert result.device == place.device
            bound = 2.0**size if op == "Product" else 4.0 * size
            assert not (wrong := difference(place.get(result), expected, bound)), f"{dtype} {op}: {wrong}"
            if op == "Adasum":
                continue
            rows = [values(dtype, (2 * size + 1, 3), r, op) for r in range(size)]
            parts = np.array_split(reduced(rows, op), size)
            part = hvd.reducescatter(place.put(rows[rank]), op=getattr(hvd, op), name=f"{dtype} {op} rows")
            assert not (wrong := difference(place.get(part), parts[rank], bound)), f"{dtype} {op} rows: {wrong}"
    scaled = hvd.allreduce(place.put(np.ones(5)), op=hvd.Average, prescale_factor=0.5, postscale_factor=3.0)
    np.testing.assert_allclose(place.get(scaled), np.full(5, 1.5))


def moves(place: Place) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in ["bool", *INTEGERS, *FLOATS]:
        parts = [values(dtype, (2 * r + 1, 2), r) for r in range(size)]
        np.testing.assert_array_equal(place.get(hvd.allgather(place.put(parts[rank]))), np.concatenate(parts))
        equal = [values(dtype, (3, 2), r) for r in range(size)]
        np.testing.assert_array_equal(place.get(hvd.allgather(place.put(equal[rank]))), np.concatenate(equal))
        sent = [values(dtype, (size * 2, 2), r) for r in range(size)]
        received = hvd.alltoall(place.put(sent[rank]), splits=[2] * size)[0]
        expected = np.concatenate([sent[r][2 * rank : 2 * rank + 2] for r in range(size)])
        np.testing.assert_array_equal(place.get(received), expected)
        same = hvd.broadcast(place.put(equal[rank]), root_rank=size - 1)
        np.testing.assert_array_equal(place.get(same), equal[size - 1])


def sends(place: Place) -> None:
    """Each rank sends to the next one: a value that its GPU is yet to compute."""
    rank, size = hvd.rank(), hvd.size()
    for length in (1, 70_000):
        sent = place.put(np.full(length, float(rank), np.float32)) + 1
        received = place.put(np.zeros((length, 1), np.float32))
        handles = [send(TENSORS, sent, (rank + 1) % size), receive(TENSORS, received, (rank - 1) % size)]
        assert [handle.wait() for handle in handles] == [(rank + 1) % size, (rank - 1) % size]
        np.testing.assert_array_equal(place.get(received), np.full((length, 1), (rank - 1) % size + 1.0))


def a_receive_beside_work_on_its_tensor(place: Place) -> None:
    """The stream that is current at the receive still writes to the tensor when another stream waits for it."""
    rank, size = hvd.rank(), hvd.size()
    send(TENSORS, place.put(np.full(9, float(rank), np.float32)), (rank + 1) % size).wait()
    received = place.put(np.zeros(9, np.float32))
    place.occupy(received)
    handle = receive(TENSORS, received, (rank - 1) % size)
    with place.unordered_stream():
        handle.wait()
    place.release()
    np.testing.assert_array_equal(place.get(received), np.full(9, float((rank - 1) % size)))


def groups_and_modules(place: Place) -> None:
    rank, size = hvd.rank(), hvd.size()
    group = [place.put(np.full(4 + i, float(rank + i), np.float32)) for i in range(5)]
    for i, result in enumerate(hvd.grouped_allreduce(group, op=hvd.Sum)):
        np.testing.assert_array_equal(place.get(result), np.full(4 + i, sum(r + i for r in range(size))))
    for dtype, lengths in [
        ("uint8", (1, 3, 4, 40_001)),
        ("bfloat16", (3, 1, 70_001)),
        ("float32", (5, *[1] * 200, 300_007)),
    ]:
        of_ranks = [[values(dtype, length, r) for length in lengths] for r in range(size)]
        for index, result in enumerate(hvd.grouped_allreduce([place.put(each) for each in of_ranks[rank]], op=hvd.Sum)):
            expected = reduced([each[index] for each in of_ranks], "Sum")
            assert not (wrong := difference(place.get(result), expected, 4.0 * size)), f"{dtype} {index}: {wrong}"
    linear = place.module(torch.nn.Linear(3, 2))
    hvd.broadcast_parameters(linear.state_dict(), root_rank=0)
    place.wait()
    hvd.check_consistency(linear)
    batch = [values("float32", (4, 3), r) for r in range(size)]
    whole = torch.nn.BatchNorm1d(3)(tensor_of(np.concatenate(batch)))
    own = place.module(hvd.SyncBatchNorm(3))(place.put(batch[rank]))
    np.testing.assert_allclose(
        place.get(own.detach()), whole.detach().numpy()[4 * rank : 4 * rank + 4], rtol=1e-4, atol=1e-5
    )


def gradients(place: Place) -> None:
    """The backward passes of the collectives: each rank's loss is its result times its rank plus 1."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    calls = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="reduce"), total),
        (lambda x: hvd.allgather(x, name="gather"), total),
        (lambda x: hvd.broadcast(x, 0, name="send"), total if rank == 0 else 0),
        (lambda x: torch.cat(hvd.grouped_allgather([x, x * 2], name="gather two")), 3 * total),
    ]
    for call, expected in calls:
        own = place.put(np.ones((2 * size, 3), np.float32)).requires_grad_()
        (call(own) * (rank + 1)).sum().backward()
        np.testing.assert_array_equal(place.get(own.grad), np.full((2 * size, 3), expected))
    by_receiver = np.repeat(np.arange(1.0, size + 1), 2)[:, None] * np.ones(3)  # two rows for each rank
    scatters = [
        (lambda x: hvd.alltoall(x, name="exchange"), 1),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum, name="scatter"), 1),
        (lambda x: torch.cat(hvd.grouped_reducescatter([x * 2, x], op=hvd.Sum, name="scatter two")), 3),
    ]
    for scatter, factor in scatters:
        own = place.put(np.ones((2 * size, 3), np.float32)).requires_grad_()
        (scatter(own) * (rank + 1)).sum().backward()
        np.testing.assert_array_equal(place.get(own.grad), factor * by_receiver)


def side_streams(place: Place) -> None:
    """Values that a side stream computes, reduced there or handed over there and awaited elsewhere."""
    for step in range(20):
        with place.side_stream():
            tensor = place.put(np.full(100_000, float(step + hvd.rank()), np.float32))
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="side")
            again = hvd.allreduce(tensor * 0 + 1, op=hvd.Sum, name="side too")
            np.testing.assert_array_equal(place.get(again), np.full(100_000, hvd.size()))
            hvd.synchronize(handle)
            place.wait()
        np.testing.assert_array_equal(place.get(tensor), np.full(100_000, sum(step + r for r in range(hvd.size()))))


def training(place: Place, **options: Any) -> None:
    """N ranks with batches of B train to the weights of one process with batches of N x B."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(1)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
    model.load_state_dict(alone.state_dict())
    place.module(model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    for step in range(10):
        batches = [values("float64", (4, 6), r + step * size) for r in range(size)]
        reference.zero_grad()
        alone(tensor_of(np.concatenate(batches))).square().mean().backward()
        reference.step()
        optimizer.zero_grad()
        model(place.put(batches[rank])).square().mean().backward()
        place.wait()
        optimizer.step()
    for expected, parameter in zip(alone.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(place.get(parameter.detach()), expected.detach().numpy(), rtol=1e-9, atol=1e-12)


def where_codecs_are_made(place: Place) -> None:
    def is_on_gpu(compression: Any) -> bool:
        parameter = place.put(np.ones((300, 300), np.float32)).requires_grad_()
        slot = Slot("weight", parameter, GradientOptions.checked(compression=compression))
        return slot.device != devices.HOST

    assert is_on_gpu(hvd.Compression.auto)
    assert not is_on_gpu(hvd.Compression.int8)


def what_is_refused(place: Place) -> None:
    with pytest.raises(hvd.UnsupportedTensorError, match="make it a group for each device"):
        hvd.grouped_allreduce([torch.ones(2), place.put(np.ones(2, np.float32))])
    if not place.real:
        return
    graph = torch.cuda.CUDAGraph()
    tensor = torch.ones(3, device=place.device)
    with pytest.raises(ValueError, match="a CUDA graph is being captured"), torch.cuda.graph(graph):
        hvd.allreduce(tensor, name="captured")
    tensors = [torch.full((50_000,), float(i), device=place.device) for i in range(8)]
    handles = [hvd.allreduce_async(tensor + 1, op=hvd.Sum) for tensor in tensors]
    for i, handle in enumerate(handles):  # whose inputs nobody else holds
        np.testing.assert_array_equal(hvd.synchronize(handle).cpu().numpy(), np.full(50_000, (i + 1.0) * hvd.size()))
