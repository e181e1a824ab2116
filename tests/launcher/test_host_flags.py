"""The flags that say where ranks run: what follows from them, and what is said about values that make no sense."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.cli import main
from horovodish.launcher.flags import run_parser
from horovodish.launcher.hosts.allocation import Allocation, Host
from horovodish.launcher.options import LaunchOptions, launch_options

SLURM = {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "3"}


def allocation(arguments: list[str], environ: dict[str, str]) -> Allocation | None:
    return launch_options(run_parser().parse(["-np", "1", *arguments, "true"]), environ).allocation


def test_what_the_user_wants_of_mpirun(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    flags = [
        "-p",
        "2222",
        "-i",
        str(key),
        "--launch-agent",
        sys.executable,
        "--network-interfaces",
        "eth0, ib0",
        "--tcp",
    ]
    arguments = ["--binding-args=--bind-to core", "--mpi-args=-x 'A=b c'"]
    np = ["-np", "1"]
    assert launch_options(run_parser().parse([*np, *flags, *arguments, "true"]), {}) == LaunchOptions(
        ["true"],
        np=1,
        launch_agent=sys.executable,
        ssh_port=2222,
        ssh_identity_file=str(key),
        network_interfaces=("eth0", "ib0"),
        tcp=True,
        binding_args=("--bind-to", "core"),
        mpi_args=("-x", "A=b c"),
    )
    assert launch_options(run_parser().parse([*np, "true"]), {}) == LaunchOptions(["true"], np=1)


def test_flags_count_more_than_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b slots=2\n")
    for arguments, expected in ((["-H", "a:1"], "a"), (["--hostfile", str(tmp_path / "hosts")], "b"), ([], "n1")):
        found = allocation(arguments, SLURM)
        assert found is not None
        assert [host.name for host in found.hosts] == [expected]
    assert allocation([], {}) is None
    slurms = allocation([], SLURM)
    assert slurms is not None and slurms.by_scheduler and slurms.hosts == (Host("n1", 3),)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-H", "a", "--hostfile", "b"], "--hosts and --hostfile both name the hosts: use one of them"),
        (
            ["-H", "localhost:1"],
            "2 ranks do not fit: --hosts has 1 slot on 1 host. Name more hosts or slots, use -np 1",
        ),
        (["-H", "a:b"], "--hosts a:b: slots must be a whole number from 1, not 'b'"),
        (["--hostfile", "no/such"], "hostfile no/such cannot be read: No such file or directory"),
        (["-p", "70000"], "70000 is not a port"),
        (["-p", "ssh"], "'ssh' is not a whole number from 1"),
        (["-i", "no/such"], "no/such cannot be read"),
        (["--launch-agent", "no-such-agent"], "there is no program no-such-agent"),
        (["--network-interfaces", "eth0,,"], "'eth0,,' is not a list of names"),
        (["--gpus-per-rank", "0"], "'0' is not a whole number from 1"),
        (["--mpi-args=--x 'y"], "No closing quotation"),
    ],
)
def test_what_makes_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", *flags, "true"]) == 2
    said = capsys.readouterr().err
    assert re.search(re.escape(message), said), said
    assert said.count("\n") == 1


def test_a_key_with_a_space_in_its_name(tmp_path: Path) -> None:
    key = tmp_path / "my key"
    key.touch()
    with pytest.raises(SettingError, match="has a space in it, and MPI would cut it there"):
        run_parser().parse(["-i", str(key), "true"])
