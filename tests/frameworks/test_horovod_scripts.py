"""Scripts as Horovod's users have them run unchanged with `--as-horovod` on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovodish.launcher.job.environment import HOROVOD_FOLDER
from support.scripts import output_of
from support.sources import ROOT

SCRIPTS = ROOT / "tests" / "horovod_scripts"


def run(name: str, *arguments: object, np: int = 2) -> str:
    output = output_of(SCRIPTS / name, *arguments, np=np, flags=["--as-horovod"])
    assert "done\n" in output
    return output


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch_mnist.py", ["--use-adasum"]),
        pytest.param(
            "torch_synthetic_benchmark.py",
            ["--fp16-allreduce", "--gradient-predivide-factor", "2"],
            marks=pytest.mark.soak,
        ),
        pytest.param("torch_collectives.py", [], marks=pytest.mark.soak),
        pytest.param("two_frameworks.py", [], marks=pytest.mark.soak),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_script(name: str, arguments: list[str]) -> None:
    run(name, *arguments)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tensorflow_training.py", "tensorflow_sessions.py"])
def test_a_script_that_saves_checkpoints(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)
    assert list(tmp_path.glob("*.index"))


@pytest.mark.soak
def test_imagenet_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = ["--checkpoint-format", tmp_path / "checkpoint-{epoch}.pt"]
    assert "epoch 1 from 0: " in run("torch_imagenet.py", *checkpoints, "--epochs", 1, np=1)
    assert "epoch 2 from 1: " in run("torch_imagenet.py", *checkpoints, "--epochs", 2)


@pytest.mark.soak
def test_keras_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    assert "from epoch 0: 1 more" in run("keras_training.py", tmp_path, 1, np=1)
    assert "from epoch 1: 4 more" in run("keras_training.py", tmp_path, 5)


@pytest.mark.soak
def test_horovod_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HOROVOD_FOLDER)
    assert output_of(SCRIPTS / "torch_run_function.py", np=0) == "done\n"
