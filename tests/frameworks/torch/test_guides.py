"""The code of the guides "PyTorch", "From Horovod" and "From DDP" runs as it stands; the last two train to the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore, destroy_process_group
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import horovodish.torch as hvd
from support.documents import python_blocks, sides
from support.on_ranks import on_ranks

HOROVOD, DDP, TORCH = "docs/from-horovod.md", "docs/from-ddp.md", "docs/torch.md"

ONE_EPOCH = """
def train_one_epoch(epoch):
    optimizer.zero_grad()
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    seen.append(epoch)
"""


def run(code: str, samples: int = 128, **names: Any) -> dict[str, Any]:
    """Executes code of a guide with the names that it takes for granted, and gives all names that there are then."""
    torch.manual_seed(hvd.rank())
    inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))[:samples]
    scope: dict[str, Any] = {
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "SGD": SGD,
        "clip_grad_norm_": clip_grad_norm_,
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "epochs": 3,
        "hvd": hvd,
        "loss": nn.functional.mse_loss,
        "model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        "torch": torch,
        **names,
    }
    exec(code, scope)
    return scope


@on_ranks(2)
def test_from_horovod() -> None:
    before, after = sides(HOROVOD)
    assert before.startswith("import horovod.torch as hvd\n") and "import horovod." not in after
    changed = before.replace("import horovod.torch", "import horovodish.torch")
    generator = torch.Generator().manual_seed(hvd.rank())
    pairs = [[(x, x.sum(1, keepdim=True)) for x in torch.randn(2, 4, 6, generator=generator)] for _ in range(5)]
    models = [run(code, pairs_of_batches=pairs)["model"] for code in (changed, after)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    hvd.check_consistency(models[0])


@on_ranks(2)
def test_from_one_process(tmp_path: Path) -> None:
    for name, code in zip(("one", "ours"), sides(TORCH), strict=True):
        path = tmp_path / f"{name}-{hvd.rank()}"
        scope = run(code, path=path, epochs=500, loss_of=nn.functional.mse_loss)
        with torch.no_grad():
            inputs, labels = scope["dataset"].tensors
            assert nn.functional.mse_loss(scope["model"](inputs), labels) < 1  # of 6 at first
        assert path.exists() == (name == "one" or hvd.rank() == 0)
    hvd.check_consistency(scope["model"], scope["optimizer"])


@on_ranks(2)
def test_mixed_precision() -> None:
    model = nn.Linear(6, 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    dataset = TensorDataset(*(torch.rand(8, width) for width in (6, 1)))
    before = model.weight.clone()
    code = python_blocks(TORCH)[0]
    loader = DataLoader(dataset, batch_size=4)
    run(code, device="cpu", loader=loader, model=model, optimizer=optimizer, loss_of=nn.functional.mse_loss)
    assert not torch.equal(before, model.weight)
    hvd.check_consistency(model, optimizer)


@on_ranks(2)
def test_rank_0_saves_and_all_load(tmp_path: Path) -> None:
    code, path = python_blocks(TORCH)[1], str(tmp_path / f"{hvd.rank()}.pt")  # as on hosts without a common folder
    for epochs, trained in ((2, [0, 1]), (4, [2, 3])):
        model = nn.Linear(6, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        seen: list[int] = []
        names = {"model": model, "optimizer": optimizer, "seen": seen}
        run(ONE_EPOCH + code, path=path, os=os, epochs=epochs, **names)
        assert seen == trained
        assert optimizer.state[model.weight]["step"] == epochs
        hvd.check_consistency(model, optimizer)
    assert [file.name for file in tmp_path.iterdir()] == ["0.pt"]


@on_ranks(2)
def test_from_ddp(tmp_path: Path) -> None:
    ddp, ours = sides(DDP)
    store = as_under_torchrun()
    for code, file in ((ddp, "ddp.pt"), (ours, "ours.pt")):
        run(code, path=tmp_path / file)
    destroy_process_group()
    hvd.barrier()  # rank 0 has written both files, and nobody needs its store any more
    del store
    weights = [torch.load(tmp_path / file, weights_only=True) for file in ("ours.pt", "ddp.pt")]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def as_under_torchrun() -> TCPStore | None:
    """Sets the variables that torchrun sets, and gives the store at which the ranks meet to the first of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    port = hvd.broadcast_object(store.port if store else None)
    os.environ.update(RANK=str(hvd.rank()), WORLD_SIZE=str(hvd.size()), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    return store


@on_ranks(2)
def test_data_that_ends_unevenly() -> None:
    model = nn.Linear(6, 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    left = run(python_blocks(DDP)[0], samples=129, model=model, optimizer=optimizer)
    assert len(left["loader"]) == (3 if hvd.rank() == 0 else 2)
    hvd.check_consistency(model, optimizer)


@on_ranks(2)
def test_seeds_and_evaluation() -> None:
    """Each rank draws its own numbers, and the metric is that of all samples, which the ranks do not divide."""
    *_, seeds, evaluation = python_blocks(DDP)
    run(seeds, seed=5)
    own = torch.rand(1)
    assert len(hvd.allgather(own).unique()) == hvd.size()
    model = nn.Linear(6, 1)
    hvd.broadcast_parameters(model.state_dict())
    scope = run(evaluation, samples=129, model=model, Subset=Subset)
    inputs, labels = scope["dataset"].tensors
    with torch.no_grad():
        expected = nn.functional.mse_loss(model(inputs), labels).item()
    assert scope["evaluate"](model, scope["dataset"]) == pytest.approx(expected, rel=1e-6)
    (logging,) = python_blocks("docs/faq.md")
    assert run(logging, loss=torch.tensor(float(hvd.rank())))["average"] == (hvd.size() - 1) / 2


def test_large_batches() -> None:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    hvd.init()
    try:
        optimizer = run(python_blocks(DDP)[2], pytorch_optimizer=pytorch_optimizer)["optimizer"]
        assert isinstance(optimizer, pytorch_optimizer.Lamb)
    finally:
        hvd.shutdown()
