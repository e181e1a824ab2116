"""The example for Kubernetes' MPI Operator: against its CRD kubeflow.org/v2beta1, and with what its pods get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.flags import run_parser
from horovodish.launcher.hosts.schedulers import given_allocation
from support.sources import ROOT

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "examples" / "kubernetes"

# As in the CRD: types, words to choose from, and fields that must be there (marked with !). A pod's specification has
# far more fields than those that are listed here.
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "ports": [{"containerPort!": int}],
    "resources": {"limits": {"cpu": str, "memory": str, "nvidia.com/gpu": int}},
}
REPLICA = {
    "replicas": int,
    "restartPolicy": ("Never", "OnFailure"),
    "template!": {"metadata": dict, "spec!": {"containers!": [CONTAINER], "hostNetwork": bool, "volumes": list}},
}
MPIJOB = {
    "apiVersion!": ("kubeflow.org/v2beta1",),
    "kind!": ("MPIJob",),
    "metadata!": {"name!": str, "namespace": str, "labels": dict},
    "spec!": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "sshAuthMountPath": str,
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        "runPolicy": {
            "cleanPodPolicy": ("None", "Running", "All"),
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
            "schedulingPolicy": dict,
        },
        "mpiReplicaSpecs!": {"Launcher!": REPLICA, "Worker": REPLICA},
    },
}


def faults(value: Any, schema: Any, path: str = "") -> list[str]:
    """Where the value is not what the schema asks for."""
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{path}: {value!r} is none of {schema}"]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [fault for index, item in enumerate(value) for fault in faults(item, schema[0], f"{path}[{index}]")]
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{path}: {value!r} is no {schema.__name__}"]
    if not isinstance(value, dict):
        return [f"{path}: no mapping"]
    fields = {name.rstrip("!"): inner for name, inner in schema.items()}
    needed = [name.rstrip("!") for name in schema if name.endswith("!")]
    missing = [f"{path}.{name} is missing" for name in needed if name not in value]
    unknown = [f"{path}.{name} is unknown" for name in value if name not in fields]
    inner = [fault for name in fields if name in value for fault in faults(value[name], fields[name], f"{path}.{name}")]
    return missing + unknown + inner


@pytest.fixture
def job() -> Any:
    return yaml.safe_load((FOLDER / "mpijob.yaml").read_text())


def test_the_manifest_is_what_the_crd_accepts(job: Any) -> None:
    assert faults(job, MPIJOB) == []
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas["Launcher"]["replicas"] == 1
    assert len(f"{job['metadata']['name']}-worker-{replicas['Worker']['replicas'] - 1}") <= 63, "it is a hostname"


def test_this_test_sees_faults(job: Any) -> None:
    del job["kind"]
    job["spec"]["slotsPerWorker"] = "4"
    job["spec"]["runPolicy"]["cleanPodPolicy"] = "Sometimes"
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]
    worker["template"]["spec"]["containers"][0] = {"name": "worker", "images": "x"}
    assert faults(job, MPIJOB) == [
        ".kind is missing",
        ".spec.slotsPerWorker: '4' is no int",
        ".spec.runPolicy.cleanPodPolicy: 'Sometimes' is none of ('None', 'Running', 'All')",
        ".spec.mpiReplicaSpecs.Worker.template.spec.containers[0].image is missing",
        ".spec.mpiReplicaSpecs.Worker.template.spec.containers[0].images is unknown",
    ]


def test_the_launcher_finds_its_hosts_in_what_the_operator_sets(job: Any, tmp_path: Path) -> None:
    spec = job["spec"]
    containers = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    program, subcommand, *arguments = containers[0]["command"]
    assert (program, subcommand) == ("horovodish", "run")
    options = run_parser().parse(arguments)
    assert options.command == ["python", "/app/torch_digits.py"]
    assert not options.np, "it follows from the slots"

    name, workers, slots = (
        job["metadata"]["name"],
        spec["mpiReplicaSpecs"]["Worker"]["replicas"],
        spec["slotsPerWorker"],
    )
    hostfile = tmp_path / "hostfile"
    pods = [f"{name}-worker-{index}.{name}.default.svc" for index in range(workers)]
    hostfile.write_text("".join(f"{pod} slots={slots}\n" for pod in pods))
    given = given_allocation({"OMPI_MCA_orte_default_hostfile": str(hostfile), "KUBERNETES_SERVICE_PORT": "443"})
    assert given is not None
    assert {host.name: host.slots for host in given.hosts} == dict.fromkeys(pods, slots)
    assert not given.by_scheduler, "mpirun reaches the workers by ssh"


def test_a_launcher_starts_a_rank_for_each_slot_of_that_hostfile(launch: Callable[..., Any], tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=3\n")
    job = launch("run", "echo", "here", env={"OMPI_MCA_orte_default_hostfile": str(hostfile)})
    assert job.finish() == 0
    assert job.stdout.lines == ["here"] * 3


def test_the_image_has_what_the_manifest_runs(job: Any) -> None:
    recipe = (FOLDER / "Dockerfile").read_text()
    assert "openssh-server" in recipe
    assert "COPY examples/torch_digits.py /app/" in recipe
    assert (ROOT / "examples" / "torch_digits.py").exists()
