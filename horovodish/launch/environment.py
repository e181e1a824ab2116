"""Reads from the environment how a launcher has started this process. MPI is not touched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from horovodish.errors import LaunchError

__all__ = ["OPEN_MPIS_LAUNCHER", "SLURMS_LAUNCHER", "LaunchedAs", "check_no_other_launcher", "launcher_environment"]

OPEN_MPIS_LAUNCHER = "Open MPI's mpirun"
SLURMS_LAUNCHER = "Slurm's srun"
# Launchers by the variables that they set for a rank: its rank, the world's size. Slurm comes last, because an MPI's
# own launcher may run inside its allocations. SLURM_STEP_NUM_TASKS is set by srun but not in a batch script.
_LAUNCHERS = (
    (OPEN_MPIS_LAUNCHER, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE"),
    (SLURMS_LAUNCHER, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class LaunchedAs:
    """The launcher's facts about this process, without asking MPI.

    Attributes:
        launcher: in words, for messages.
        rank: the rank of this process.
        size: how many ranks were started.
    """

    launcher: str
    rank: int
    size: int


def launcher_environment(environ: Mapping[str, str] | None = None) -> LaunchedAs | None:
    """Was this process started by an MPI launcher? Any process can ask; MPI is not touched.

    Args:
        environ: the variables; None takes this process's.

    Returns:
        What the launcher says, or None: then this process is a world of one rank and needs no MPI.

    Example:
        >>> launcher_environment({"PMI_RANK": "1", "PMI_SIZE": "4"})
        LaunchedAs(launcher="MPICH's mpiexec", rank=1, size=4)
    """
    environ = os.environ if environ is None else environ
    for launcher, rank, size in _LAUNCHERS:
        if rank in environ and size in environ:
            launched = LaunchedAs(launcher, int(environ[rank]), int(environ[size]))
            # A Slurm step of one task is often an interactive shell (srun --pty) and not a rank.
            return None if launched.launcher == SLURMS_LAUNCHER and launched.size == 1 else launched
    return None


def check_no_other_launcher(environ: Mapping[str, str] | None = None) -> None:
    """Raises if torchrun has started this process and others: MPI would take each for a world of one rank.

    Args:
        environ: the variables; None takes this process's.

    Raises:
        LaunchError: that is so.
    """
    environ = os.environ if environ is None else environ
    processes = environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environ and processes != "1":
        raise LaunchError(
            f"torchrun has started {processes} processes, but not as ranks of MPI, so each would train alone. "
            f"Start them with: horovodish run -np {processes} python ..."
        )
