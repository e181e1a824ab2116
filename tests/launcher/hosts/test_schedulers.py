"""Hosts and slots of a scheduler's job, from the variables that jobs of Slurm, PBS, LSF and Kubernetes have."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.hosts.schedulers import given_allocation

# A batch script with `--nodes=4 --ntasks=7`.
SLURM = {
    "SLURM_CLUSTER_NAME": "alps",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURM_JOBID": "81723",
    "SLURM_JOB_CPUS_PER_NODE": "16(x4)",
    "SLURM_JOB_ID": "81723",
    "SLURM_JOB_NODELIST": "nid[0007-0009],login2",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_PARTITION": "normal",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "nid[0007-0009],login2",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURMD_NODENAME": "nid0007",
}
# What `srun --ntasks=4 --pty bash` adds to it: the shell is the first of four tasks, and the only one that is left.
INTERACTIVE_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "nid[0007-0008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PTY_PORT": "37001",
}


def found(environ: dict[str, str]) -> tuple[dict[str, int], str, bool]:
    """The slots by the names of the hosts, who chose them, and whether that was a scheduler."""
    given = given_allocation(environ)
    assert given is not None
    return {host.name: host.slots for host in given.hosts}, given.source, given.by_scheduler


def test_without_a_scheduler() -> None:
    assert given_allocation({"HOME": "/root", "PATH": "/usr/bin", "PBS_NODEFILE": "", "LSB_MCPU_HOSTS": ""}) is None


def test_slurm() -> None:
    assert found(SLURM) == ({"nid0007": 2, "nid0008": 2, "nid0009": 2, "login2": 1}, "the Slurm allocation", True)


@pytest.mark.parametrize(
    ("nodes", "tasks", "slots"),
    [
        ("node1", "8", {"node1": 8}),
        ("a,b", "1,2", {"a": 1, "b": 2}),
        ("n[1,3,5-6]", "4(x4)", {"n1": 4, "n3": 4, "n5": 4, "n6": 4}),
        ("n[98-101]", "1(x4)", {"n98": 1, "n99": 1, "n100": 1, "n101": 1}),
        ("gpu[1-2]-ib[0-1],cpu-x", "1(x5)", {"gpu1-ib0": 1, "gpu1-ib1": 1, "gpu2-ib0": 1, "gpu2-ib1": 1, "cpu-x": 1}),
        ("rack[1-2].example.org", "3,2", {"rack1.example.org": 3, "rack2.example.org": 2}),
        ("a,b,c", "2,0,1", {"a": 2, "c": 1}),
    ],
)
def test_slurms_short_forms(nodes: str, tasks: str, slots: dict[str, int]) -> None:
    assert found({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})[0] == slots


def test_an_interactive_shell_of_srun_may_launch() -> None:
    assert found({**SLURM, **INTERACTIVE_STEP})[0] == {"nid0007": 2, "nid0008": 2, "nid0009": 2, "login2": 1}


def test_a_launcher_that_srun_has_started_several_times_refuses() -> None:
    step = {key: value for key, value in INTERACTIVE_STEP.items() if key != "SLURM_PTY_PORT"}
    with pytest.raises(SettingError, match=r"srun has started this launcher 4 times\. Start it once, without srun"):
        given_allocation({**SLURM, **step})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "has 4 nodes, but SLURM_TASKS_PER_NODE=2(x3) is about 3; name the hosts"),
        ({"SLURM_TASKS_PER_NODE": ""}, "has 4 nodes, but SLURM_TASKS_PER_NODE= is about 0; name the hosts"),
        ({"SLURM_TASKS_PER_NODE": "2*4"}, "SLURM_TASKS_PER_NODE=2*4 is not understood at 2*4"),
        ({"SLURM_JOB_NODELIST": "n[1-x]"}, "SLURM_JOB_NODELIST=n[1-x] is not understood at 1-x"),
        ({"SLURM_JOB_NODELIST": "n[1-3"}, "SLURM_JOB_NODELIST=n[1-3 is not understood"),
    ],
)
def test_variables_of_slurm_that_make_no_sense(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        given_allocation({**SLURM, **variables})
    assert message in str(refusal.value)
    assert str(refusal.value).endswith("name the hosts with --hosts or --hostfile")


def test_pbs_has_a_line_for_every_slot(tmp_path: Path) -> None:
    nodefile = tmp_path / "4711.pbs01"
    nodefile.write_text("r1i0n3.ib0\nr1i0n3.ib0\nr1i0n4.ib0\nr1i0n4.ib0\nr1i0n7.ib0\n")
    environ = {"PBS_JOBID": "4711.pbs01", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(nodefile)}
    assert found(environ) == ({"r1i0n3.ib0": 2, "r1i0n4.ib0": 2, "r1i0n7.ib0": 1}, "the PBS allocation", True)


def test_a_nodefile_of_torque_with_hosts_in_turns(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n2\nn1\nn2\nn1\n\n")
    assert found({"PBS_NODEFILE": str(nodefile), "PBS_NUM_NODES": "2", "PBS_NUM_PPN": "2"})[0] == {"n2": 2, "n1": 2}


def test_a_nodefile_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    with pytest.raises(SettingError, match=f"PBS_NODEFILE={path} cannot be read: No such file or directory; name the"):
        given_allocation({"PBS_NODEFILE": str(path)})


def test_lsf(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("batch1\nhost07\nhost07\n")
    variables = {"LSB_JOBID": "5", "LSB_HOSTS": "batch1 host07 host07", "LSB_MCPU_HOSTS": "batch1 1 host07 2"}
    expected = ({"batch1": 1, "host07": 2}, "the LSF allocation", True)
    assert found(variables) == expected
    assert found({**variables, "LSB_MCPU_HOSTS": "x 9", "LSB_DJOB_HOSTFILE": str(hostfile)}) == expected


@pytest.mark.parametrize("text", ["batch1", "batch1 one", "batch1 1 host07"])
def test_a_variable_of_lsf_that_makes_no_sense(text: str) -> None:
    with pytest.raises(SettingError, match=f"LSB_MCPU_HOSTS={text} is not understood"):
        given_allocation({"LSB_MCPU_HOSTS": text})


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("OMPI_MCA_orte_default_hostfile", "digits-worker-0.digits.default.svc slots=2"),
        ("I_MPI_HYDRA_HOST_FILE", "digits-worker-0.digits.default.svc:2"),
        ("HYDRA_HOST_FILE", "digits-worker-0.digits.default.svc:2"),
    ],
)
def test_the_hostfile_of_kubernetes_mpi_operator(variable: str, line: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{line}\n{line.replace('worker-0', 'worker-1')}\n")
    slots = {f"digits-worker-{pod}.digits.default.svc": 2 for pod in (0, 1)}
    assert found({variable: str(hostfile)}) == (slots, f"hostfile {hostfile}", False)
