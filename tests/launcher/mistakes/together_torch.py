"""Mistakes with PyTorch after which the ranks can go on. A docstring has what must be said, a pattern in each line."""

import warnings

import torch
from each import make

import horovodish.torch as hvd

warnings.simplefilter("always")
hvd.init()
rank = hvd.rank()


def network(width=8):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))


def wrapped(model, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def forgotten_broadcast():
    r"""together_torch.py:\d+: RuntimeWarning: the ranks begin to train with different parameters:
    parameter 'weight' differs: rank 0
    Remedy: call hvd.broadcast_parameters\(model.state_dict\(\), root_rank=0\) before the first step"""
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    train(model, wrapped(model))


def checkpoint_on_rank_0_alone():
    r"""together_torch.py:\d+: RuntimeWarning: the ranks begin to train with different parameters:
    parameter '0.weight' differs
    Remedy: call hvd.broadcast_parameters"""
    model = network()
    optimizer = wrapped(model)
    if rank == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    train(model, optimizer)


def step_on_rank_0_alone():
    r"""together_torch.py:\d+: RuntimeWarning: the ranks train different parameters at step 4:
    parameter '0.weight' differs
    Remedy: every rank must take the same steps with the same learning rates"""
    model = network()
    optimizer = wrapped(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if rank == 0:
            optimizer.step()


def learning_rate_of_each_rank():
    r"""together_torch.py:\d+: RuntimeWarning: the ranks train different parameters at step 4:
    Remedy: every rank must take the same steps with the same learning rates"""
    model = network()
    optimizer = wrapped(model)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    train(model, optimizer, steps=4)


def other_order_of_parameters():
    r"""MismatchError: .* the ranks disagree about its tensors: rank 0 has '0.weight', rank 1 has '1.bias'
    Remedy: every rank must build the same model and pass its parameters in the same order"""
    model = network()
    parameters = list(model.named_parameters())
    if rank == 1:
        parameters.reverse()
    train(model, hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in parameters], lr=0.1), parameters))


def other_layers():
    r"""MismatchError: the ranks' models differ: rank 0 trains 4 parameters, rank 1 trains 6:
    only rank 1 has 2.weight, 2.bias
    Remedy: build the same model on every rank"""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2 + rank)])
    train(model, wrapped(model))


def wider_layer():
    r"""MismatchError: .*: 0.bias is of shape \(8,\) on rank 0 and of shape \(9,\) on rank 1, and 2 more differ
    build the same model on every rank"""
    hvd.broadcast_parameters(network(8 + rank).state_dict(), root_rank=0)


def other_layers_broadcast():
    r"""MismatchError: .*: 1.bias is of shape \(1,\) on rank 0 and of shape \(4,\) on rank 1, and 1 more differ
    ; only rank 1 has 2.bias of shape \(1,\), 2.weight of shape \(1, 4\); build the same model on every rank"""
    layers = [torch.nn.Linear(4, 4) for _ in range(1 + rank)]
    hvd.broadcast_parameters(torch.nn.Sequential(*layers, torch.nn.Linear(4, 1)).state_dict(), root_rank=0)


def wider_layer_trained():
    r"""together_torch.py:\d+: RuntimeWarning: the ranks' models differ: parameter '0.weight' is torch.float32 of
    \(8, 4\) on rank 0 and torch.float32 of shape \(9, 4\) on rank 1, and 2 more differ. Remedy: build the same model
    MismatchError: .*'0.weight': the ranks disagree about its shape: rank 0 has \(8, 4\), rank 1 has \(9, 4\)
    Remedy: build the same model on every rank"""
    model = network(8 + rank)
    train(model, wrapped(model))


def other_dtype():
    r"""MismatchError: .*'0.weight': the ranks disagree about its dtype: rank 0 has float32, rank 1 has float64
    Remedy: convert the tensor to one dtype on every rank"""
    model = network().to([torch.float32, torch.float64][rank])
    optimizer = wrapped(model)
    model(torch.ones(2, 4, dtype=model[0].weight.dtype)).sum().backward()
    optimizer.step()


def wrapped_twice():
    r"""ValueError: this DistributedSGD is wrapped already; wrap an optimizer once"""
    model = network()
    hvd.DistributedOptimizer(wrapped(model), model.named_parameters())


def model_wrapped():
    r"""TypeError: DistributedOptimizer wraps a torch.optim.Optimizer, not Sequential"""
    hvd.DistributedOptimizer(network())


def names_that_are_equal():
    r"""ValueError: named_parameters has these names more than once: weight; give each a prefix of its own"""
    model = network()
    names = [("weight", parameter) for parameter in model.parameters()]
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names)


def names_of_a_part():
    r"""ValueError: named_parameters does not name parameter 2 of group 0, of shape \(1, 8\)
    Pass the parameters of every module that the optimizer trains, or leave named_parameters out"""
    model = network()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model[0].named_parameters())


def model_broadcast():
    r"""TypeError: broadcast_parameters takes names and tensors; pass model.state_dict\(\) .*, not Sequential"""
    hvd.broadcast_parameters(network(), root_rank=0)


def op_as_text():
    r"""ValueError: op='sum' is not a reduce op; use one of Average, Sum"""
    hvd.allreduce(torch.ones(3), op="sum")


def average_and_op():
    r"""ValueError: average= and op= were both given; .* leave out average="""
    hvd.allreduce(torch.ones(3), average=True, op=hvd.Sum)


def compression_as_text():
    r"""ValueError: compression='fp16' is not a compression; use Compression.none, .fp16"""
    wrapped(network(), compression="fp16")


def numpy_array():
    r"""UnsupportedTensorError: loss: expected a torch.Tensor, got ndarray; pass torch.as_tensor\(value\)"""
    hvd.allreduce(torch.ones(3).numpy(), name="loss")


make(globals())
