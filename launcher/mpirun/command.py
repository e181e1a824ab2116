"""The families of mpirun: how to recognise them, and with which arguments and variables each starts the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovodish.launcher.options import LaunchOptions

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
INTEL_MPI = "Intel MPI"

_SCHEDULERS = "^slurm,pbs,tm,lsf,gridengine,flux,pals"
_SSH_TIMEOUT_SECONDS = 10
# Where a user, or Kubernetes, may have named the program that starts MPI's daemons on other hosts.
_AGENT_VARIABLES = (
    *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"),
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC"),
    *("I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


@dataclass(frozen=True)
class Mpirun:
    """An mpirun or mpiexec that was found.

    Attributes:
        path: absolute.
        family: OPEN_MPI, MPICH or INTEL_MPI; None if it is none of them.
        version: its number; empty if it tells none.
        problem: why it does not run, if its family is not known for that reason.
    """

    path: str
    family: str | None
    version: str
    problem: str = ""

    def __str__(self) -> str:
        what = f"does not run: {self.problem}" if self.problem else f"{self.family or 'unknown'} {self.version}"
        return f"{self.path} ({what.rstrip()})"

    @property
    def rank_variable(self) -> str:
        """The environment variable that tells a process its rank."""
        return "OMPI_COMM_WORLD_RANK" if self.family == OPEN_MPI else "PMI_RANK"

    @property
    def tolerates_losses(self) -> bool:
        """Whether ranks can go on in the same processes when another one is lost: Open MPI with its ULFM can."""
        return self.family == OPEN_MPI and not self.version.startswith(("1.", "2.", "3.", "4."))

    @property
    def segments_variable(self) -> str:
        """The variable that tells MPI where the ranks of a host exchange data in memory. Empty if MPI cleans up there.

        Each host has a folder for this data, which is removed when the ranks have ended, however they end.
        """
        return "OMPI_MCA_btl_sm_backing_directory" if self.family == OPEN_MPI else ""


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


def arguments(
    mpirun: Mpirun,
    options: LaunchOptions,
    program: Sequence[str],
    environ: Mapping[str, str],
    *,
    exported: Sequence[str] = (),
    as_root: bool = False,
) -> list[str]:
    """The command that starts the ranks. If only this host takes part, that holds within an allocation of Slurm, too.

    Args:
        mpirun: its family is known.
        options: of the user. Those about other hosts have no effect if there are none.
        program: a command and its arguments, which mpirun starts once for each rank.
        environ: the user's environment.
        exported: the variables of mpirun's environment that the ranks get on all hosts.
        as_root: Open MPI refuses to run as root unless it is told.
    """
    if mpirun.family == OPEN_MPI:
        flags = ["--allow-run-as-root"] * as_root + _open_mpis(mpirun, options, environ, exported)
    else:
        flags = _hydras(mpirun, options, exported)
    return [mpirun.path, *flags, *options.mpi_args, "-np", str(options.np), *program]


def variables(mpirun: Mpirun, options: LaunchOptions, environ: Mapping[str, str], files: Path) -> dict[str, str]:
    """The variables that mpirun and the ranks need besides the user's.

    Args:
        mpirun: its family is known.
        options: of the user. Those about other hosts have no effect if there are none.
        environ: the user's environment. What the user has set there stays.
        files: a folder for what mpirun leaves behind on this host when it or a rank is killed. The ranks' own TMPDIR
            stays what it is.
    """
    ours = {}
    if mpirun.family == OPEN_MPI:
        ours["PRTE_MCA_prte_local_tmpdir_base"] = str(files)
    else:
        if options.is_far and not options.by_scheduler:
            intel, hydra = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "HYDRA_LAUNCHER_EXTRA_ARGS"
            extra = " ".join(_ssh_flags(options, environ))
            ours.update({intel if mpirun.family == INTEL_MPI else hydra: extra} if extra else {})
        if interfaces := _interfaces(options):
            ours["FI_TCP_IFACE"] = interfaces[0]
            ours["UCX_NET_DEVICES"] = ",".join(interfaces)
        if options.tcp:
            ours.update({"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self,sm"})
    return {name: value for name, value in ours.items() if name not in environ}


def agent(options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    """The program that starts MPI's daemons on other hosts, with its flags. Empty if MPI or a scheduler chooses it."""
    if not options.is_far or options.by_scheduler or _is_chosen(options, environ):
        return []
    return [options.launch_agent or "ssh", *_ssh_flags(options, environ)]


def _is_chosen(options: LaunchOptions, environ: Mapping[str, str]) -> bool:
    """Whether a variable of MPI's names the agent."""
    return not options.launch_agent and any(name in environ for name in _AGENT_VARIABLES)


def _open_mpis(
    mpirun: Mpirun, options: LaunchOptions, environ: Mapping[str, str], exported: Sequence[str]
) -> list[str]:
    flags = ["--with-ft", "ulfm"] if options.is_elastic and mpirun.tolerates_losses else []
    if not options.by_scheduler:
        flags += ["--mca", "ras", _SCHEDULERS, "--mca", "plm", _SCHEDULERS]
    if options.is_far:
        if not options.by_scheduler:
            # Only this host needs to reach the others, and only here are the user's keys.
            flags += ["--mca", "plm_rsh_no_tree_spawn", "1"]
            flags += ["--mca", "plm_rsh_agent", options.launch_agent] if options.launch_agent else []
            ssh_flags = " ".join(_ssh_flags(options, environ))
            flags += ["--mca", "plm_rsh_args", ssh_flags] if ssh_flags else []
        flags += ["--host", _hosts(options)]
        flags += [word for name in exported for word in ("-x", name)]
    if interfaces := ",".join(_interfaces(options)):
        flags += ["--mca", "btl_tcp_if_include", interfaces]
        is_old = mpirun.version.startswith(("3.", "4."))
        flags += ["--mca", "oob_tcp_if_include", interfaces] if is_old else ["--prtemca", "prte_if_include", interfaces]
    if options.tcp:
        flags += ["--mca", "pml", "ob1", "--mca", "btl", "^openib,uct,ofi,usnic"]
    binding = ("--bind-to", "none", "--map-by", "slot") if options.binding_args is None else options.binding_args
    return [*flags, "--oversubscribe", *binding]


def _hydras(mpirun: Mpirun, options: LaunchOptions, exported: Sequence[str]) -> list[str]:
    flags = []
    if not options.is_far:
        flags += ["-launcher", "fork", "-rmk", "user"]
    else:
        if not options.by_scheduler:
            flags += ["-launcher", "ssh", "-rmk", "user"]
            flags += ["-launcher-exec", options.launch_agent] if options.launch_agent else []
        flags += ["-hosts", _hosts(options), "-genvlist", ",".join(exported)]
    flags += [word for name in _interfaces(options)[:1] for word in ("-iface", name)]
    if options.binding_args is not None:
        return [*flags, *options.binding_args]
    return flags + (["-genv", "I_MPI_PIN", "0"] if mpirun.family == INTEL_MPI else ["-bind-to", "none"])


def _hosts(options: LaunchOptions) -> str:
    """Hosts and numbers of ranks, in the form of all families."""
    return ",".join(f"{each.host}:{len(each.ranks)}" for each in options.host_ranks)


def _interfaces(options: LaunchOptions) -> Sequence[str]:
    return options.network_interfaces if options.is_far else ()


def _ssh_flags(options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    """The arguments of ssh. Another agent gets only those that the user asks for."""
    flags = []
    if not options.launch_agent and not _is_chosen(options, environ):
        # Nobody could type a password, and a host that does not answer keeps TCP waiting for two minutes.
        flags += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_TIMEOUT_SECONDS}"]
    flags += ["-p", str(options.ssh_port)] if options.ssh_port else []
    flags += ["-i", options.ssh_identity_file] if options.ssh_identity_file else []
    return flags
