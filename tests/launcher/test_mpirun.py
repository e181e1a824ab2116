"""The two families of mpirun: recognised by what they say, started with the right arguments, quoted where it helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovodish.launcher.mpirun import MPICH, OPEN_MPI, Mpirun, arguments, family, folders, rank_variable, worth_reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", OPEN_MPI),
        ("mpirun.real (OpenRTE) 4.1.4", OPEN_MPI),
        ("Open MPI v5.0.11, package: Open MPI user@localhost", OPEN_MPI),
        ("HYDRA build details:\n    Version:                                 5.0.2", MPICH),
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", MPICH),
        ("slurm 23.11", None),
        ("", None),
    ],
)
def test_family(text: str, expected: str | None) -> None:
    assert family(text) == expected


def test_arguments_for_open_mpi() -> None:
    mpirun = Mpirun("/env/bin/mpirun", OPEN_MPI, "5.0.11")
    elsewhere = "^slurm,pbs,tm,lsf,gridengine,flux,pals"
    flags = ["--mca", "ras", elsewhere, "--mca", "plm", elsewhere, "--oversubscribe", "--bind-to", "none", "-np", "4"]
    program = ["python", "train.py", "--lr", "0.1"]
    assert arguments(mpirun, 4, program, as_root=False) == ["/env/bin/mpirun", *flags, *program]
    assert arguments(mpirun, 4, program, as_root=True) == ["/env/bin/mpirun", "--allow-run-as-root", *flags, *program]


@pytest.mark.parametrize("as_root", [False, True])
def test_arguments_for_mpich(as_root: bool) -> None:
    mpirun = Mpirun("/env/bin/mpiexec", MPICH, "5.0.2")
    flags = ["-launcher", "fork", "-rmk", "user", "-bind-to", "none", "-np", "2"]
    assert arguments(mpirun, 2, ["python", "train.py"], as_root=as_root) == [mpirun.path, *flags, "python", "train.py"]


def test_open_mpi_keeps_its_files_in_folders_of_the_run() -> None:
    open_mpi, files = Mpirun("/env/bin/mpirun", OPEN_MPI, "5.0.11"), Path("/tmp/run")
    session = {"PRTE_MCA_prte_local_tmpdir_base": "/tmp/run"}
    assert folders(open_mpi, files, None) == session
    both = {**session, "OMPI_MCA_btl_sm_backing_directory": "/tmp/run/segments"}
    assert folders(open_mpi, files, files / "segments") == both
    assert folders(Mpirun("/env/bin/mpiexec", MPICH, "5.0.2"), files, None) == {}


def test_rank_variable() -> None:
    assert rank_variable(Mpirun("mpirun", OPEN_MPI, "5.0.11")) == "OMPI_COMM_WORLD_RANK"
    assert rank_variable(Mpirun("mpirun", MPICH, "5.0.2")) == "PMI_RANK"


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
    "[proxy:0@n] HYD_pmcd_pmip_control_cmd_cb (proxy/pmip_cb.c:480): assert (!closed) failed\n"
    "[mpiexec@n] main (mpiexec/mpiexec.c:252): process manager error waiting for completion\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_what_mpirun_says_about_failed_ranks_is_left_out(noise: str) -> None:
    assert worth_reading(noise) == ""


def test_all_else_that_mpirun_says_is_kept() -> None:
    warning = f"{DASHES}WARNING: There was an error initializing a network device.\n{DASHES}"
    assert worth_reading("".join([*NOISE, warning, *NOISE])) == warning
