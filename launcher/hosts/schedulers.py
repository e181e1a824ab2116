"""The hosts and slots that somebody else has chosen: Slurm, PBS, LSF, or whoever set the variable of a hostfile.

Everything follows from variables, and from the files that they name. A shell on a login node has none of them.
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import Allocation, Host, allocation, from_hostfile

HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
"""Where Open MPI, Intel MPI and MPICH look for a hostfile. Kubernetes' MPI Operator sets them in a launcher's pod."""

REMEDY = "name the hosts with --hosts or --hostfile"


def given_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The hosts of the scheduler's job that this process runs in, or of a hostfile that a variable names.

    Args:
        environ: the user's environment.

    Returns:
        The hosts in the scheduler's order; None if nobody has chosen any.

    Raises:
        SettingError: the variables contradict each other, a file that they name cannot be read, or srun has started
            several of this launcher.
    """
    for variable in HOSTFILE_VARIABLES:
        if environ.get(variable):
            return from_hostfile(environ[variable])
    for scheduler, hosts in (("Slurm", _slurm(environ)), ("PBS", _pbs(environ)), ("LSF", _lsf(environ))):
        if hosts:
            return allocation(hosts, f"the {scheduler} allocation", by_scheduler=True)
    return None


def _slurm(environ: Mapping[str, str]) -> list[Host]:
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return []
    _check_that_there_is_one_launcher(environ)
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    names, slots = _names(nodes), _counts(tasks)
    if len(names) != len(slots):
        raise SettingError(
            f"SLURM_JOB_NODELIST={nodes} has {len(names)} nodes, but SLURM_TASKS_PER_NODE={tasks} "
            f"is about {len(slots)}; {REMEDY}"
        )
    return [Host(name, count) for name, count in zip(names, slots, strict=True) if count]


def _check_that_there_is_one_launcher(environ: Mapping[str, str]) -> None:
    launchers = environ.get("SLURM_STEP_NUM_TASKS", "1")
    # In an interactive shell of `srun --pty` the other tasks have ended.
    if launchers != "1" and "SLURM_PTY_PORT" not in environ:
        raise SettingError(
            f"srun has started this launcher {launchers} times. Start it once, without srun, or the ranks without it: "
            "srun --mpi=pmix python train.py"
        )


def _names(nodes: str) -> list[str]:
    """The hosts of Slurm's short form, such as n[08-10],login: n08, n09, n10, login."""
    names = []
    for part in re.split(r",(?![^\[]*\])", nodes):  # at the commas outside of brackets
        pieces = re.split(r"\[(.*?)\]", part)  # in turns what stands outside of brackets and inside
        choices = [_numbers(piece, nodes) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    if "[" in "".join(names):
        raise SettingError(f"SLURM_JOB_NODELIST={nodes} is not understood; {REMEDY}")
    return names


def _numbers(ranges: str, nodes: str) -> list[str]:
    numbers = []
    for entry in ranges.split(","):
        first, dash, last = entry.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise SettingError(f"SLURM_JOB_NODELIST={nodes} is not understood at {entry}; {REMEDY}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def _counts(tasks: str) -> list[int]:
    """The numbers of Slurm's short form, such as 2(x3),1: 2, 2, 2, 1."""
    counts = []
    for entry in filter(None, tasks.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if not match:
            raise SettingError(f"SLURM_TASKS_PER_NODE={tasks} is not understood at {entry}; {REMEDY}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _pbs(environ: Mapping[str, str]) -> list[Host]:
    return _lines_of("PBS_NODEFILE", environ)


def _lsf(environ: Mapping[str, str]) -> list[Host]:
    hosts = _lines_of("LSB_DJOB_HOSTFILE", environ)
    if hosts:
        return hosts
    text = environ.get("LSB_MCPU_HOSTS", "")
    names, slots = text.split()[::2], text.split()[1::2]
    if len(names) != len(slots) or not all(count.isdecimal() for count in slots):
        raise SettingError(f"LSB_MCPU_HOSTS={text} is not understood; {REMEDY}")
    return [Host(name, int(count)) for name, count in zip(names, slots, strict=True)]


def _lines_of(variable: str, environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the file that a variable names, which has a line for each slot."""
    if not environ.get(variable):
        return []
    try:
        lines = Path(environ[variable]).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as problem:
        raise SettingError(f"{variable}={environ[variable]} cannot be read: {problem.strerror}; {REMEDY}") from problem
    return [Host(line.strip(), 1) for line in lines if line.strip()]
