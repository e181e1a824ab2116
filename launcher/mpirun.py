"""The families of mpirun: how they are recognised, and what they are told so that they start the ranks.

Every command line is built from a `Start` by a pure function.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horovodish.launcher.hosts import Share

__all__ = [
    "INTEL_MPI",
    "MPICH",
    "OPEN_MPI",
    "Mpirun",
    "Start",
    "Wishes",
    "arguments",
    "family",
    "rank_variable",
    "segments_variable",
    "variables",
    "worth_reading",
]

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
INTEL_MPI = "Intel MPI"

_SCHEDULERS = "^slurm,pbs,tm,lsf,gridengine,flux,pals"
_SSH_TIMEOUT_SECONDS = 10
_RANK_VARIABLES = {OPEN_MPI: "OMPI_COMM_WORLD_RANK", MPICH: "PMI_RANK", INTEL_MPI: "PMI_RANK"}
# Where a user, or Kubernetes, may have named the program that starts MPI's daemons on other hosts.
_AGENT_VARIABLES = (
    *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"),
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC"),
    *("I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)
# What they say about a rank that failed. The launcher says it better, and it knows first.
_RANK_FAILED = re.compile(
    r"^-{60,}\n(?:(?:prterun|mpirun|mpiexec) (?:detected|noticed|has exited)|A daemon failed to report|PRTE has lost) "
    r".*?^-{60,}$\n?"
    r"|^={60,}\n=   BAD TERMINATION OF [^\n]*\n=   RANK [^\n]*\n=   KILLED BY SIGNAL[^\n]*\n={60,}$\n?"
    r"|^={60,}\n=   BAD TERMINATION OF .*?^Please see the FAQ page for debugging suggestions$\n?"
    r"|^\[(?:mpiexec|proxy:[^\]\n]*)@[^\]\n]*\] .*?$\n?"
    r"|^\[[^\]\n]+\] \*\*\* An error occurred in Socket closed$\n(?:^\[[^\]\n]+\] \*\*\* .*?$\n?)*"
    r"|^\[[^\]\n]+\] plm:ssh: Warning: setpgid.*?$\n?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Mpirun:
    """An mpirun or mpiexec that was found.

    Attributes:
        path: absolute.
        family: OPEN_MPI, MPICH or INTEL_MPI; None if it is none of them.
        version: its number; empty if it tells none.
    """

    path: str
    family: str | None
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.family or 'unknown'} {self.version}".rstrip() + ")"


@dataclass(frozen=True)
class Wishes:
    """What the user may want of mpirun.

    Attributes:
        launch_agent: the program that takes the place of ssh, called as `launch_agent HOST COMMAND...`; empty for ssh.
        ssh_port: on which ssh servers listen; None for ssh's own choice.
        ssh_identity_file: the key for ssh; empty for ssh's own choice.
        network_interfaces: those that MPI's daemons and ranks use between hosts; none lets MPI choose.
        tcp: whether ranks of different hosts use TCP, whatever faster network there is.
        binding_args: what takes the place of the arguments by which ranks are bound and mapped; None for our choice,
            which binds none, because a bound rank believes that the machine has only one core.
        mpi_args: passed to mpirun after all other arguments.
    """

    launch_agent: str = ""
    ssh_port: int | None = None
    ssh_identity_file: str = ""
    network_interfaces: tuple[str, ...] = ()
    tcp: bool = False
    binding_args: tuple[str, ...] | None = None
    mpi_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """What mpirun shall start.

    Attributes:
        program: a command and its arguments.
        shares: which ranks run where.
        is_far: whether another host than this one takes part.
        by_scheduler: whether daemons are started by the means of the scheduler in whose allocation we are.
        exported: the variables of mpirun's environment that the ranks get on all hosts.
        as_root: Open MPI refuses to run as root unless it is told.
        wishes: of the user.
    """

    program: Sequence[str]
    shares: Sequence[Share]
    is_far: bool = False
    by_scheduler: bool = False
    exported: Sequence[str] = ()
    as_root: bool = False
    wishes: Wishes = field(default_factory=Wishes)

    @property
    def np(self) -> int:
        """The number of ranks."""
        return sum(len(share.ranks) for share in self.shares)

    @property
    def places(self) -> str:
        """Hosts and numbers of ranks, as all families take them."""
        return ",".join(f"{share.host}:{len(share.ranks)}" for share in self.shares)


def family(version: str) -> str | None:
    """Where the version text of an MPI library or of an mpirun comes from; None if unknown.

    Libraries and launchers of one family understand each other. MVAPICH is of MPICH's.

    Example:
        >>> family("mpirun (Open MPI) 5.0.11")
        'Open MPI'
    """
    if "Open MPI" in version or "OpenRTE" in version:
        return OPEN_MPI
    if "Intel(R) MPI" in version:
        return INTEL_MPI
    if any(sign in version for sign in ("MPICH", "HYDRA", "MVAPICH")):
        return MPICH
    return None


def arguments(mpirun: Mpirun, start: Start, environ: Mapping[str, str]) -> list[str]:
    """The whole command. Where only this host takes part, ranks stay here inside an allocation of Slurm, too.

    Args:
        mpirun: its family is known.
        start: what it shall start.
        environ: the user's.
    """
    flags = _open_mpis(mpirun, start, environ) if mpirun.family == OPEN_MPI else _hydras(mpirun, start)
    return [mpirun.path, *flags, *start.wishes.mpi_args, "-np", str(start.np), *start.program]


def variables(mpirun: Mpirun, start: Start, environ: Mapping[str, str], files: Path) -> dict[str, str]:
    """The variables that mpirun and the ranks need besides the user's.

    Args:
        mpirun: its family is known.
        start: what it shall start.
        environ: the user's; what they set stays.
        files: a folder for what mpirun leaves behind on this host when it or a rank is killed. The ranks' own TMPDIR
            stays what it is.
    """
    wishes = start.wishes
    ours = {}
    if mpirun.family == OPEN_MPI:
        ours["PRTE_MCA_prte_local_tmpdir_base"] = str(files)
    else:
        if start.is_far and not start.by_scheduler:
            intel, hydra = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "HYDRA_LAUNCHER_EXTRA_ARGS"
            extra = " ".join(_ssh_flags(wishes, environ))
            ours.update({intel if mpirun.family == INTEL_MPI else hydra: extra} if extra else {})
        if wishes.network_interfaces:
            ours["FI_TCP_IFACE"] = wishes.network_interfaces[0]
            ours["UCX_NET_DEVICES"] = ",".join(wishes.network_interfaces)
        if wishes.tcp:
            ours.update({"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self,sm"})
    return {name: value for name, value in ours.items() if name not in environ}


def segments_variable(mpirun: Mpirun) -> str:
    """The variable in which MPI is told where ranks exchange data in memory; empty if it leaves nothing behind there.

    Each host has a folder for it, which goes when the ranks have gone, however they have.
    """
    return "OMPI_MCA_btl_sm_backing_directory" if mpirun.family == OPEN_MPI else ""


def rank_variable(mpirun: Mpirun) -> str:
    """The environment variable in which this mpirun tells a process its rank."""
    return _RANK_VARIABLES[mpirun.family or MPICH]


def worth_reading(log: str) -> str:
    """What an mpirun has written, without what it says about ranks that failed or were ended."""
    rest = _RANK_FAILED.sub("", log).strip()
    return rest + "\n" if rest else ""


def _open_mpis(mpirun: Mpirun, start: Start, environ: Mapping[str, str]) -> list[str]:
    wishes = start.wishes
    flags = ["--allow-run-as-root"] * start.as_root
    if not start.by_scheduler:
        flags += ["--mca", "ras", _SCHEDULERS, "--mca", "plm", _SCHEDULERS]
    if start.is_far:
        if not start.by_scheduler:
            # Only this host needs to reach the others, and only here are the user's keys.
            flags += ["--mca", "plm_rsh_no_tree_spawn", "1"]
            flags += ["--mca", "plm_rsh_agent", wishes.launch_agent] if wishes.launch_agent else []
            ssh_flags = " ".join(_ssh_flags(wishes, environ))
            flags += ["--mca", "plm_rsh_args", ssh_flags] if ssh_flags else []
        flags += ["--host", start.places]
        flags += [word for name in start.exported for word in ("-x", name)]
    if wishes.network_interfaces:
        interfaces = ",".join(wishes.network_interfaces)
        flags += ["--mca", "btl_tcp_if_include", interfaces]
        is_old = mpirun.version.startswith(("3.", "4."))
        flags += ["--mca", "oob_tcp_if_include", interfaces] if is_old else ["--prtemca", "prte_if_include", interfaces]
    if wishes.tcp:
        flags += ["--mca", "pml", "ob1", "--mca", "btl", "^openib,uct,ofi,usnic"]
    binding = ("--bind-to", "none", "--map-by", "slot") if wishes.binding_args is None else wishes.binding_args
    return [*flags, "--oversubscribe", *binding]


def _hydras(mpirun: Mpirun, start: Start) -> list[str]:
    wishes = start.wishes
    flags = []
    if not start.is_far:
        flags += ["-launcher", "fork", "-rmk", "user"]
    else:
        if not start.by_scheduler:
            flags += ["-launcher", "ssh", "-rmk", "user"]
            flags += ["-launcher-exec", wishes.launch_agent] if wishes.launch_agent else []
        flags += ["-hosts", start.places, "-genvlist", ",".join(start.exported)]
    flags += ["-iface", wishes.network_interfaces[0]] if wishes.network_interfaces else []
    if wishes.binding_args is not None:
        return [*flags, *wishes.binding_args]
    return flags + (["-genv", "I_MPI_PIN", "0"] if mpirun.family == INTEL_MPI else ["-bind-to", "none"])


def _ssh_flags(wishes: Wishes, environ: Mapping[str, str]) -> list[str]:
    """What ssh is told; another agent is told only what the user has said."""
    flags = []
    if not wishes.launch_agent and not any(name in environ for name in _AGENT_VARIABLES):
        # A password would be asked for in vain, and a host that does not answer keeps TCP waiting for two minutes.
        flags += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_TIMEOUT_SECONDS}"]
    flags += ["-p", str(wishes.ssh_port)] if wishes.ssh_port else []
    flags += ["-i", wishes.ssh_identity_file] if wishes.ssh_identity_file else []
    return flags
