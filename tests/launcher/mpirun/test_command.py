"""The families of mpirun: recognised by what they say, started with the right arguments, quoted where it helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from horovodish.launcher.hosts.allocation import Host, allocation, from_hosts_flag
from horovodish.launcher.mpirun.command import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI,
    Mpirun,
    arguments,
    family,
    variables,
)
from horovodish.launcher.mpirun.messages import worth_reading
from horovodish.launcher.options import LaunchOptions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", OPEN_MPI),
        ("mpirun.real (OpenRTE) 4.1.4", OPEN_MPI),
        ("Open MPI v5.0.11, package: Open MPI user@localhost", OPEN_MPI),
        ("HYDRA build details:\n    Version:                                 5.0.2", MPICH),
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", INTEL_MPI),
        ("slurm 23.11", None),
        ("", None),
    ],
)
def test_family(text: str, expected: str | None) -> None:
    assert family(text) == expected


OMPI = Mpirun("/env/bin/mpirun", OPEN_MPI, "5.0.11")
HYDRA = Mpirun("/env/bin/mpiexec", MPICH, "5.0.2")
INTEL = Mpirun("/env/bin/mpiexec", INTEL_MPI, "2021.18")
PROGRAM = ["python", "train.py", "--lr", "0.1"]
ELSEWHERE = "^slurm,pbs,tm,lsf,gridengine,flux,pals"
NO_SCHEDULER = ["--mca", "ras", ELSEWHERE, "--mca", "plm", ELSEWHERE]
UNBOUND = ["--oversubscribe", "--bind-to", "none", "--map-by", "slot"]
BATCH = "-o BatchMode=yes -o ConnectTimeout=10"
HERE = LaunchOptions(np=4)
FAR = LaunchOptions(np=4, allocation=from_hosts_flag("a:1,b:3"))
BY_SCHEDULER = LaunchOptions(np=4, allocation=allocation([Host("a", 1), Host("b", 3)], "test", by_scheduler=True))
EVERYTHING = replace(
    FAR,
    ssh_port=2222,
    ssh_identity_file="/home/me/key",
    network_interfaces=("eth0", "ib0"),
    tcp=True,
    binding_args=("--bind-to", "core"),
    mpi_args=("--report-bindings", "-q"),
)


def command(mpirun: Mpirun, options: LaunchOptions, environ: dict[str, str]) -> list[str]:
    return arguments(mpirun, options, PROGRAM, environ, exported=["PATH", "X"])


def test_open_mpi_on_this_host() -> None:
    flags = [*NO_SCHEDULER, *UNBOUND, "-np", "4", *PROGRAM]
    assert arguments(OMPI, HERE, PROGRAM, {}) == [OMPI.path, *flags]
    assert arguments(OMPI, HERE, PROGRAM, {}, as_root=True) == [OMPI.path, "--allow-run-as-root", *flags]


def test_open_mpi_on_several_hosts() -> None:
    ssh = ["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "plm_rsh_args", BATCH]
    rest = ["--host", "a:1,b:3", "-x", "PATH", "-x", "X", *UNBOUND, "-np", "4", *PROGRAM]
    assert command(OMPI, FAR, {}) == [OMPI.path, *NO_SCHEDULER, *ssh, *rest]
    assert command(OMPI, BY_SCHEDULER, {}) == [OMPI.path, *rest]


def test_open_mpi_and_all_that_a_user_can_want() -> None:
    ssh = ["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "plm_rsh_args", f"{BATCH} -p 2222 -i /home/me/key"]
    hosts = ["--host", "a:1,b:3", "-x", "PATH", "-x", "X", "--mca", "btl_tcp_if_include", "eth0,ib0"]
    tcp = ["--mca", "pml", "ob1", "--mca", "btl", "^openib,uct,ofi,usnic"]
    rest = ["--oversubscribe", "--bind-to", "core", "--report-bindings", "-q", "-np", "4", *PROGRAM]
    daemons = ["--prtemca", "prte_if_include", "eth0,ib0"]
    assert command(OMPI, EVERYTHING, {}) == [
        OMPI.path,
        *NO_SCHEDULER,
        *ssh,
        *hosts,
        *daemons,
        *tcp,
        *rest,
    ]
    old = Mpirun(OMPI.path, OPEN_MPI, "4.1.4")
    daemons = ["--mca", "oob_tcp_if_include", "eth0,ib0"]
    assert command(old, EVERYTHING, {}) == [
        OMPI.path,
        *NO_SCHEDULER,
        *ssh,
        *hosts,
        *daemons,
        *tcp,
        *rest,
    ]


@pytest.mark.parametrize("mpirun", [HYDRA, INTEL])
@pytest.mark.parametrize("as_root", [False, True])
def test_hydra_on_this_host(mpirun: Mpirun, as_root: bool) -> None:
    unbound = ["-bind-to", "none"] if mpirun is HYDRA else ["-genv", "I_MPI_PIN", "0"]
    flags = ["-launcher", "fork", "-rmk", "user", *unbound, "-np", "4", *PROGRAM]
    assert arguments(mpirun, HERE, PROGRAM, {}, as_root=as_root) == [mpirun.path, *flags]
    assert variables(mpirun, HERE, {}, Path("/tmp/run")) == {}


def test_mpich_on_several_hosts() -> None:
    rest = ["-hosts", "a:1,b:3", "-genvlist", "PATH,X", "-bind-to", "none", "-np", "4", *PROGRAM]
    assert command(HYDRA, FAR, {}) == [
        HYDRA.path,
        "-launcher",
        "ssh",
        "-rmk",
        "user",
        *rest,
    ]
    assert command(HYDRA, BY_SCHEDULER, {}) == [HYDRA.path, *rest]
    assert variables(HYDRA, FAR, {}, Path("/tmp/run")) == {"HYDRA_LAUNCHER_EXTRA_ARGS": BATCH}
    assert variables(HYDRA, BY_SCHEDULER, {}, Path("/tmp/run")) == {}


def test_intel_mpi_on_several_hosts() -> None:
    rest = ["-hosts", "a:1,b:3", "-genvlist", "PATH,X", "-genv", "I_MPI_PIN", "0", "-np", "4", *PROGRAM]
    assert command(INTEL, FAR, {}) == [
        INTEL.path,
        "-launcher",
        "ssh",
        "-rmk",
        "user",
        *rest,
    ]
    assert variables(INTEL, FAR, {}, Path("/tmp/run")) == {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": BATCH}


@pytest.mark.parametrize("mpirun", [HYDRA, INTEL])
def test_hydra_and_all_that_a_user_can_want(mpirun: Mpirun) -> None:
    wanted = replace(EVERYTHING, binding_args=("-bind-to", "core"))
    flags = ["-hosts", "a:1,b:3", "-genvlist", "PATH,X", "-iface", "eth0", "-bind-to", "core"]
    rest = ["--report-bindings", "-q", "-np", "4", *PROGRAM]
    assert command(mpirun, wanted, {}) == [
        mpirun.path,
        "-launcher",
        "ssh",
        "-rmk",
        "user",
        *flags,
        *rest,
    ]
    intel, hydra = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "HYDRA_LAUNCHER_EXTRA_ARGS"
    assert variables(mpirun, wanted, {"FI_PROVIDER": "verbs"}, Path("/tmp/run")) == {
        (hydra if mpirun is HYDRA else intel): f"{BATCH} -p 2222 -i /home/me/key",
        "FI_TCP_IFACE": "eth0",
        "UCX_NET_DEVICES": "eth0,ib0",
        "UCX_TLS": "tcp,self,sm",
    }


def test_another_agent_than_ssh_is_told_only_what_the_user_says() -> None:
    agent = replace(FAR, launch_agent="/bin/agent")
    assert command(OMPI, agent, {})[7:13] == [
        *("--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "plm_rsh_agent", "/bin/agent")
    ]
    assert "plm_rsh_args" not in command(OMPI, agent, {})
    assert command(HYDRA, agent, {})[5:7] == ["-launcher-exec", "/bin/agent"]
    assert variables(HYDRA, agent, {}, Path("/tmp/run")) == {}
    kubernetes = {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh", "HYDRA_LAUNCHER_EXEC": "/etc/mpi/kubexec.sh"}
    assert "plm_rsh_args" not in command(OMPI, FAR, kubernetes)
    assert variables(HYDRA, FAR, kubernetes, Path("/tmp/run")) == {}
    with_port = replace(FAR, launch_agent="/bin/agent", ssh_port=22)
    assert "-p 22" in command(OMPI, with_port, {})
    assert variables(HYDRA, with_port, {}, Path("/tmp/run")) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22"}


def test_open_mpi_keeps_its_files_in_folders_of_the_run() -> None:
    ours = {"PRTE_MCA_prte_local_tmpdir_base": "/tmp/run"}
    assert variables(OMPI, HERE, {}, Path("/tmp/run")) == ours
    assert variables(OMPI, FAR, {}, Path("/tmp/run")) == ours
    assert variables(OMPI, FAR, {"PRTE_MCA_prte_local_tmpdir_base": "/users"}, Path("/tmp/run")) == {}
    assert OMPI.segments_variable == "OMPI_MCA_btl_sm_backing_directory"
    assert HYDRA.segments_variable == INTEL.segments_variable == ""


def test_rank_variable() -> None:
    assert Mpirun("mpirun", OPEN_MPI, "5.0.11").rank_variable == "OMPI_COMM_WORLD_RANK"
    assert Mpirun("mpirun", MPICH, "5.0.2").rank_variable == "PMI_RANK"


def test_an_mpirun_in_words() -> None:
    assert str(Mpirun("/usr/bin/mpirun", MPICH, "5.0.2")) == "/usr/bin/mpirun (MPICH 5.0.2)"
    assert str(Mpirun("/usr/bin/mpirun", None, "")) == "/usr/bin/mpirun (unknown)"


DASHES = "-" * 74 + "\n"
EQUALS = "=" * 83 + "\n"
NOISE = [
    f"{DASHES}prterun detected that one or more processes exited with non-zero status,\nthus ...\n{DASHES}",
    f"{DASHES}prterun noticed that process rank 1 with PID 4762 on node n exited on\nsignal 9 (Killed).\n{DASHES}",
    f'{DASHES}prterun has exited due to process rank 1 with PID 0 on node n calling\n"abort". ...\n{DASHES}',
    f"\n{EQUALS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 4890 RUNNING AT n\n{EQUALS}"
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    "This typically refers to a problem with your application.\nPlease see the FAQ page for debugging suggestions\n",
    f"{EQUALS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 0 PID 31496 RUNNING AT n\n"
    f"=   KILLED BY SIGNAL: 9 (Killed)\n{EQUALS}",
    f"{DASHES}PRTE has lost communication with a remote daemon.\n\n  HNP daemon ...\n{DASHES}",
    "[n:00000] *** An error occurred in Socket closed\n[n:00000] *** on a NULL communicator\n",
    "[n:02342] plm:ssh: Warning: setpgid(2345,2345) failed in parent with errno=Permission denied(13)\n",
    "[proxy:0@n] HYD_pmcd_pmip_control_cmd_cb (proxy/pmip_cb.c:480): assert (!closed) failed\n"
    "[mpiexec@n] main (mpiexec/mpiexec.c:252): process manager error waiting for completion\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_what_mpirun_says_about_failed_ranks_is_left_out(noise: str) -> None:
    assert worth_reading(noise) == ""


def test_all_else_that_mpirun_says_is_kept() -> None:
    warning = f"{DASHES}WARNING: There was an error initializing a network device.\n{DASHES}"
    assert worth_reading("".join([*NOISE, warning, *NOISE])) == warning
