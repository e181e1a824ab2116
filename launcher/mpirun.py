"""The two families of mpirun: how they are recognised, their argument lists, and what of their output to pass on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MPICH", "OPEN_MPI", "Mpirun", "arguments", "family", "folders", "rank_variable", "worth_reading"]

OPEN_MPI = "Open MPI"
MPICH = "MPICH"

_OTHER_HOSTS = "^slurm,pbs,tm,lsf,gridengine,flux,pals"
# What they say about a rank that failed. The launcher says it better, and it knows first.
_RANK_FAILED = re.compile(
    r"^-{60,}\n(?:prterun|mpirun|mpiexec) (?:detected|noticed|has exited) .*?^-{60,}$\n?"
    r"|^={60,}\n=   BAD TERMINATION OF .*?^Please see the FAQ page for debugging suggestions$\n?"
    r"|^\[(?:mpiexec|proxy:[^\]\n]*)@[^\]\n]*\] .*?$\n?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Mpirun:
    """An mpirun or mpiexec that was found.

    Attributes:
        path: absolute.
        family: OPEN_MPI or MPICH; None if it is neither.
        version: its number; empty if it tells none.
    """

    path: str
    family: str | None
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.family or 'unknown'} {self.version}".rstrip() + ")"


def family(version: str) -> str | None:
    """OPEN_MPI or MPICH: where the version text of an MPI library or of an mpirun comes from; None if unknown.

    Libraries and launchers of one family understand each other. Intel MPI and MVAPICH are of MPICH's.

    Example:
        >>> family("mpirun (Open MPI) 5.0.11")
        'Open MPI'
    """
    if "Open MPI" in version or "OpenRTE" in version:
        return OPEN_MPI
    if any(sign in version for sign in ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")):
        return MPICH
    return None


def arguments(mpirun: Mpirun, np: int, program: Sequence[str], *, as_root: bool) -> list[str]:
    """The whole command that starts `np` processes of `program` on this host.

    They stay on this host inside an allocation of Slurm and the like, too. There may be more of them than cores, and
    none is bound to a core, because a bound rank believes that the machine has only one.

    Args:
        mpirun: its family is known.
        np: number of ranks.
        program: a command and its arguments.
        as_root: Open MPI refuses to run as root unless it is told.
    """
    if mpirun.family == OPEN_MPI:
        here = ["--mca", "ras", _OTHER_HOSTS, "--mca", "plm", _OTHER_HOSTS]
        flags = ["--allow-run-as-root"] * as_root + [*here, "--oversubscribe", "--bind-to", "none"]
    else:
        flags = ["-launcher", "fork", "-rmk", "user", "-bind-to", "none"]
    return [mpirun.path, *flags, "-np", str(np), *program]


def folders(mpirun: Mpirun, files: Path, segments: Path | None) -> dict[str, str]:
    """The variables that make MPI keep what it has on this host in folders of the run, and what they are set to.

    Open MPI leaves files behind when mpirun or a rank is killed. The ranks' own TMPDIR stays what it is. Ranks on other
    hosts would look for the folder in memory in vain.

    Args:
        mpirun: its family is known.
        files: the folder for its session.
        segments: a folder in memory, through which ranks exchange data; None if there is none.
    """
    if mpirun.family != OPEN_MPI:
        return {}
    variables = {"PRTE_MCA_prte_local_tmpdir_base": str(files)}
    if segments:
        variables["OMPI_MCA_btl_sm_backing_directory"] = str(segments)
    return variables


def rank_variable(mpirun: Mpirun) -> str:
    """The environment variable in which this mpirun tells a process its rank."""
    return "OMPI_COMM_WORLD_RANK" if mpirun.family == OPEN_MPI else "PMI_RANK"


def worth_reading(log: str) -> str:
    """What an mpirun has written, without what it says about ranks that failed or were ended."""
    rest = _RANK_FAILED.sub("", log).strip()
    return rest + "\n" if rest else ""
