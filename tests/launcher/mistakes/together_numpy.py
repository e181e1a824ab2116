"""Mistakes after which the ranks can go on. A docstring has what must be said, a pattern in each line."""

import numpy as np
from each import make

import horovodish as hvd

hvd.init()
rank = hvd.rank()


def other_shape():
    r"""'loss' failed on rank 0: the ranks disagree about its shape: rank 0 has \(4,\), rank 1 has \(5,\)
    Remedy: pass a tensor of the same shape on every rank"""
    hvd.allreduce(np.ones(4 + rank), name="loss")


def other_shape_without_a_name():
    r"""MismatchError: call \d+ of allreduce failed on rank 0: the ranks disagree about its shape: rank 0 has \(4,\)
    Remedy: pass a tensor of the same shape on every rank"""
    hvd.allreduce(np.ones(4 + rank))


def other_shape_in_a_group():
    r"""MismatchError: call \d+ of allreduce failed on rank 0: tensor \[1\]: the ranks disagree about its shape"""
    hvd.grouped_allreduce([np.ones(4), np.ones(4 + rank)])


def other_dtype():
    r"""'loss' failed on rank 0: the ranks disagree about its dtype: rank 0 has float32, rank 1 has float64
    Remedy: convert the tensor to one dtype on every rank"""
    hvd.allreduce(np.ones(4, ["f4", "f8"][rank]), name="loss")


def other_op():
    r"""'loss' failed on rank 0: the ranks disagree about its reduction op: rank 0 has sum, rank 1 has average
    Remedy: pass the same op on every rank"""
    hvd.allreduce(np.ones(4), name="loss", op=[hvd.Sum, hvd.Average][rank])


def other_collective():
    r"""'loss' failed on rank 0: the ranks disagree about its collective: rank 0 has allgather, rank 1 has allreduce
    Remedy: every rank must call the same collective for a name"""
    (hvd.allreduce if rank else hvd.allgather)(np.ones(4), name="loss")


def other_root():
    r"""'weights' failed on rank 0: the ranks disagree about its root rank: rank 0 has 0, rank 1 has 1
    Remedy: pass the same root_rank on every rank"""
    hvd.broadcast(np.ones(4), root_rank=rank, name="weights")


def no_such_root():
    r"""ValueError: root_rank=2 does not exist: the ranks are 0 to 1"""
    hvd.broadcast(np.ones(4), root_rank=2, name="weights")


def other_columns():
    r"""'predictions' failed on rank 0: the ranks disagree about its shape: rank 0 has \(any, 3\), rank 1 has \(any, 4\)
    Remedy: all dimensions but the first must be equal on every rank"""
    hvd.allgather(np.ones((2, 3 + rank)), name="predictions")


def splits_that_do_not_add_up():
    r"""ValueError: tokens: splits \[1, 2\] must be 2 .* that add up to the 4 rows of the array; they add up to 3"""
    hvd.alltoall(np.ones(4), splits=[1, 2], name="tokens")


def numbers_that_are_complex():
    r"""UnsupportedTensorError: spectrum: dtype complex128 is not supported; .*; pass the real and the imaginary part"""
    hvd.allreduce(np.ones(4, complex), name="spectrum")


def text():
    r"""UnsupportedTensorError: labels: dtype <U1 is not supported;
    .* allgather_object\(\) and broadcast_object\(\) take"""
    hvd.allgather(np.array(["a", "b"]), name="labels")


def text_without_a_name():
    r"""UnsupportedTensorError: call \d+ of allgather: dtype <U1 is not supported"""
    hvd.allgather(np.array(["a", "b"]))


def list_of_numbers():
    r"""UnsupportedTensorError: loss: expected a NumPy array .*, got list; pass numpy.asarray\(value\)"""
    hvd.allreduce([1.0, 2.0], name="loss")


def optimizer_of_no_framework():
    r"""AttributeError: .* has no attribute 'DistributedOptimizer': write `import horovodish.torch as hvd` to train"""
    hvd.DistributedOptimizer(None)


def no_elastic_state():
    r"""TypeError: hvd.elastic.run and attempt need a state, such as hvd.elastic.\w+\(.*, not a dict"""
    hvd.elastic.run(lambda state: None)({"epoch": 1})


make(globals())
