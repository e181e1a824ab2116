"""The code of the page "Recipes" for PyTorch, and what is in no tab of it, does what the page says."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import horovodish.torch as hvd
from support.documents import recipes
from support.on_ranks import on_ranks
from support.process_groups import begin

PAGE = "docs/recipes.md"
GLOBAL = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def scope(wraps: bool = True, **more: Any) -> dict[str, Any]:
    """The names that the page takes for granted. Each rank has its own samples, and rank 0 has one batch more."""
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = GLOBAL[hvd.rank() :: hvd.size()]
    return {
        "hvd": hvd,
        "torch": torch,
        "model": model,
        "layers": [model[0], model[2]],
        "optimizer": hvd.DistributedOptimizer(plain, model.named_parameters()) if wraps else plain,
        "loss_of": nn.functional.cross_entropy,
        "inputs": own,
        "labels": own[:, :3].argmax(1),
        "loader": DataLoader(TensorDataset(own, own[:, :3].argmax(1)), batch_size=2),
        **more,
    }


def weights(names: dict[str, Any]) -> Tensor:
    return nn.utils.parameters_to_vector(names["model"].parameters()).detach()


@on_ranks(2)
def test_recipes(tmp_path: Path) -> None:
    code = recipes(PAGE, "PyTorch")
    check_resuming(code.pop("Checkpoint: save and resume"), tmp_path / f"{hvd.rank()}.pt")
    check_clipping(code.pop("Clipping"))

    names = scope(device="cpu")
    before = weights(names)
    exec(code.pop("Mixed precision"), names)
    assert not torch.equal(weights(names), before)
    hvd.check_consistency(names["model"], names["optimizer"])

    names = scope()
    rows = GLOBAL[: 4 if hvd.rank() == 0 else 2]
    names["loader"] = DataLoader(TensorDataset(rows, rows[:, :3].argmax(1)), batch_size=2)
    exec(code.pop("Uneven data"), names)
    assert names["last"] == 0
    hvd.check_consistency(names["model"], names["optimizer"])

    names = scope(test_inputs=GLOBAL[:7], test_labels=GLOBAL[:7, :3].argmax(1))
    exec(code.pop("Evaluation on all ranks"), names)
    right = names["model"](GLOBAL[:7]).argmax(1) == names["test_labels"]
    assert names["accuracy"] == right.sum().item() / 7

    with redirect_stdout(io.StringIO()) as output:
        exec(code.pop("Logging once"), scope(loss=torch.tensor(float(hvd.rank()))))
    assert output.getvalue() == ("loss 0.5000\n" if hvd.rank() == 0 else "")

    names = scope(rate=0.1, warmup_steps=2)
    exec(code.pop("Learning rate and batch size"), names)
    rates = []
    for _ in range(3):
        rates.append(names["optimizer"].param_groups[0]["lr"])
        names["optimizer"].step()
        names["warmup"].step()
    assert rates == pytest.approx([0.1, 0.15, 0.2])

    exec(code.pop("Seeds"), {"torch": torch, "hvd": hvd, "seed": 5})
    assert len(hvd.allgather(torch.rand(1)).unique()) == hvd.size()

    encoded, meeting = code.pop("Slow links").split("# or\n")
    for block, are_equal in ((encoded, True), (meeting, False)):
        names = scope(wraps=False)
        exec(block, names)
        train(names)
        assert torch.equal(weights(names), hvd.broadcast(weights(names), 0)) == (are_equal or hvd.rank() == 0)

    names = scope(wraps=False)
    exec(code.pop("Models that do not fit"), names)
    train(names)
    assert names["optimizer"].full_state_dict(root=0) is None or hvd.rank() == 0
    assert not code


def train(names: dict[str, Any], steps: int = 1) -> None:
    for _ in range(steps):
        names["optimizer"].zero_grad()
        nn.functional.cross_entropy(names["model"](names["inputs"]), names["labels"]).backward()
        names["optimizer"].step()


def check_resuming(code: str, path: Path) -> None:
    """Only rank 0 has the file, and the others begin with other weights."""
    saved = scope(path=path, epoch=3)
    train(saved)
    saving, resuming = code.split("# when the job starts again\n")
    exec(saving, saved)
    names = scope(path=path)
    with torch.no_grad():
        names["model"][0].weight.add_(hvd.rank() + 1)
    exec(resuming, names)
    assert names["epoch"] == 3
    for each in (saved, names):
        train(each)
    assert torch.equal(weights(names), weights(saved))
    assert path.exists() == (hvd.rank() == 0)


def check_clipping(code: str) -> None:
    """The step equals the step of one process with the samples of all ranks."""
    names = scope(loss_of=lambda outputs, labels: 100 * nn.functional.cross_entropy(outputs, labels))
    exec(code, names)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (100 * nn.functional.cross_entropy(model(GLOBAL), GLOBAL[:, :3].argmax(1))).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
    optimizer.step()
    torch.testing.assert_close(weights(names), weights({"model": model}))


@on_ranks(2)
def test_recipes_in_no_tab(tmp_path: Path) -> None:
    code = recipes(PAGE)
    names = scope(wraps=False, steps=5)
    rows = names["inputs"], names["labels"]
    names |= {"batches": iter(lambda: rows, None), "loss_of": lambda inputs, labels: names["model"](inputs).sum()}
    exec(code.pop("A slow or lost machine"), names)
    assert names["optimizer"].steps == 5
    hvd.join()
    hvd.check_consistency(names["model"])

    group = 'dist.init_process_group("horovodish")\n'
    assert group in code["Models that do not fit"]
    begin(tmp_path)  # without a launcher's variables
    names = scope(wraps=False)
    exec(code.pop("Models that do not fit").replace(group, ""), names)
    train(names)
    assert names["model"][0].weight.to_local().shape == (4, 4)  # half of it
    names["dist"].destroy_process_group()
    assert list(code) == ["Notebook"]


def test_a_function_in_a_notebook() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(recipes(PAGE)["Notebook"], names)
    assert len(names["losses"]) == 2 and max(names["losses"]) < 1e-3
