"""`RayExecutor` on a real Ray cluster of this machine."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from support.documents import python_blocks
from support.hosts import hosts
from support.orphans import mark_of_this_process, parent
from support.scripts import output_of
from support.sources import ROOT

if find_spec("ray") is None:
    pytest.skip("`make test-ecosystem` installs what this needs", allow_module_level=True)

import cloudpickle
import ray
from ecosystem import cluster_functions
from ecosystem.cluster_functions import (
    LEFT_WITHIN_SECONDS,
    left_behind,
    ours,
    raises_on_rank_1,
    runs_twenty_times,
    trains_until,
    wait_for_files,
    wait_until,
    waits,
    world,
)
from ray.cluster_utils import Cluster

from horovodish.launcher.function.ranks import RankTraceback
from horovodish.ray import RayExecutor

cloudpickle.register_pickle_by_value(cluster_functions)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, which are one machine."""
    mark_of_this_process()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=4)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def all_cpus_are_free() -> bool:
    """Ray's view of its nodes lags behind them."""
    ends_at = time.monotonic() + LEFT_WITHIN_SECONDS
    while ray.available_resources().get("CPU") != 8 and time.monotonic() < ends_at:
        time.sleep(0.05)
    return ray.available_resources().get("CPU") == 8


@pytest.fixture
def executors(cluster: Cluster) -> Iterator[Any]:
    """A function that starts an executor. Nothing is left after it."""
    made: list[RayExecutor] = []

    def start(**how: Any) -> RayExecutor:
        start_with = {name: how.pop(name) for name in ("executable_cls", "executable_args") if name in how}
        made.append(RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=60), **how))
        made[-1].start(**start_with)
        return made[-1]

    yield start
    for each in made:
        each.shutdown()
    assert left_behind() == {}
    assert all_cpus_are_free()


def test_digits() -> None:
    output = output_of(ROOT / "examples/ray_digits.py", np=0, with_errors=True)
    assert re.search(r"^rank 1 of 2 has learned: test accuracy", output, re.MULTILINE), output
    found = re.search(r"^2 ranks in Ray, test accuracy of each: (0\.\d+) (0\.\d+)$", output, re.MULTILINE)
    assert found, output
    assert found[1] == found[2]
    assert float(found[1]) > 0.9


def test_the_program_of_the_guide(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(python_blocks("docs/ray.md")[0])
    losses = output_of(program, np=0).splitlines()[-1]
    assert re.fullmatch(r"\[[\d.e-]+, [\d.e-]+\]", losses), losses


def test_functions_one_after_the_other(executors: Any, capsys: pytest.CaptureFixture[str]) -> None:
    executor = executors(num_workers=3)
    assert executor.run(world, args=(2,)) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    assert executor.run(lambda: "ray" in sys.modules) == [False] * 3  # its import takes long
    assert executor.run(world, kwargs={"factor": 3}) == [(0, 3, 9.0), (1, 3, 9.0), (2, 3, 9.0)]
    out, err = "", ""

    def all_is_told() -> bool:  # output and results do not travel together
        nonlocal out, err
        told = capsys.readouterr()
        out, err = out + told.out, err + told.err
        return out.count("\n") == err.count("and complains\n") == 6

    wait_until(all_is_told)
    assert sorted(out.splitlines()) == [f"rank {rank} prints" for rank in (0, 0, 1, 1, 2, 2)]
    assert ray.get(executor.run_remote(world, args=(4,))) == [(rank, 3, 12.0) for rank in range(3)]


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def count(self) -> int:
        self.value += 1
        return self.value


def test_objects_of_a_class(executors: Any) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        executor = executors(num_hosts=2, num_workers_per_host=1, executable_cls=Counter, executable_args=(5,))
        assert executor.execute(lambda counter: counter.count()) == [6, 6]
        assert executor.execute_single(lambda counter: counter.count()) == 7
        assert executor.execute(lambda counter: counter.count()) == [8, 7]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_an_exception_of_a_rank(executors: Any) -> None:
    executor = executors(num_workers=2)
    with pytest.raises(KeyError, match="no such key") as raised:
        executor.run(raises_on_rank_1)
    assert isinstance(raised.value.__cause__, RankTraceback)
    assert "in raises_on_rank_1" in str(raised.value.__cause__)
    with pytest.raises(hvd.LaunchError, match=r"the ranks have ended: call shutdown\(\) and start\(\)"):
        executor.run(world, args=(1,))
    with pytest.raises(KeyError):
        ray.get(executors(num_workers=2).run_remote(raises_on_rank_1))
    executor.shutdown()
    executor.start()
    assert executor.run(world, args=(1,)) == [(0, 2, 2.0), (1, 2, 2.0)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_actor(executors: Any, tmp_path: Path, number: int) -> None:
    executor = executors(num_workers=2)
    worker = executor._actors._handles[number]

    def kill() -> None:
        wait_for_files(tmp_path, 2)
        ray.kill(worker)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(hvd.RankLostError, match=rf"the agent on .* has gone: its process was .*; {killed(number)}"):
        executor.run(waits, args=(str(tmp_path),))
    thread.join()


def killed(number: int) -> str:
    return (
        rf"actor {number} \(process \d+ on [0-9.]+\) has failed: The actor is dead because it was killed by `ray\.kill`"
    )


def test_what_dies_between_two_runs(executors: Any) -> None:
    def kill_actor(executor: RayExecutor) -> None:
        ray.kill(executor._actors._handles[1])

    def kill_process_of_actor(executor: RayExecutor) -> None:
        agent = next(pid for pid, command in ours().items() if "horovodish.launcher.agents.agent" in command)
        os.kill(int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)

    def kill_agent(executor: RayExecutor) -> None:
        agent = next(pid for pid, command in ours().items() if "horovodish.launcher.agents.agent" in command)
        os.kill(agent, signal.SIGKILL)

    def kill_rank(executor: RayExecutor) -> None:
        os.kill(executor.run(os.getpid)[1], signal.SIGKILL)

    gone = "the agent on .* has gone: its process was "
    for kill, message in (
        (kill_actor, f"{gone}.*; {killed(1)}"),
        (kill_process_of_actor, rf"{gone}.*; actor \d \(process \d+ on .*\) has failed: .*its worker process has died"),
        (kill_agent, rf"{gone}.*; the agent of actor \d has ended: it was killed by signal 9 \(SIGKILL\)"),
        (kill_rank, r"rank 1 on .* was killed by signal 9 \(SIGKILL\)"),
    ):
        executor = executors(num_workers=2)
        kill(executor)
        wait_until(lambda executor=executor: executor._ranks.is_over)
        with pytest.raises(hvd.RankLostError, match=message):
            executor.run(world, args=(1,))
        with pytest.raises(hvd.LaunchError, match=r"the ranks have ended: call shutdown\(\) and start\(\)"):
            executor.run(world, args=(1,))
        executor.shutdown()
        assert left_behind() == {}


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"min_workers": 2}])
def test_shutdown_ends_a_function_that_another_thread_waits_for(executors: Any, tmp_path: Path, how: Any) -> None:
    executor = executors(**how)
    results = executor.run_remote(waits, args=(str(tmp_path),))
    wait_for_files(tmp_path, 2)
    executor.shutdown()
    with pytest.raises(hvd.LaunchError, match=r"shutdown\(\) was called before the function had returned"):
        ray.get(results)
    assert left_behind() == {}
    executor.shutdown()
    executor.start()
    assert executor.run(world, args=(1,)) == [(0, 2, 2.0), (1, 2, 2.0)]


def alone(folder: str) -> None:
    """Raises if two functions run at once."""
    import horovodish as hvd

    hvd.init()
    if hvd.rank() == 0:
        Path(folder, "busy").mkdir()
        time.sleep(2)
        Path(folder, "busy").rmdir()
    hvd.barrier()


def test_two_threads(executors: Any, tmp_path: Path) -> None:
    executor = executors(min_workers=2)
    problems: list[str] = []

    def starts() -> None:
        try:
            executor.start()
        except hvd.LaunchError as problem:
            problems.append(str(problem))

    executor.shutdown()
    threads = [threading.Thread(target=starts) for _ in range(2)]
    for call in (threading.Thread.start, threading.Thread.join):
        for each in threads:
            call(each)
    assert problems == ["this RayExecutor was started already: call shutdown() first"]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ray.get([reference for _ in range(2) for reference in executor.run_remote(alone, args=(str(tmp_path),))])
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


OF_THE_DRIVER = """
class Made:
    pass

class OwnError(Exception):
    pass

def make():
    return Made()

def fail():
    raise OwnError("burnt")
"""


def test_run_remote_with_a_module_of_the_driver_alone(
    executors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_driver.py").write_text(OF_THE_DRIVER)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_the_driver")
    executor = executors(num_workers=1)
    assert isinstance(*ray.get(executor.run_remote(module.make), timeout=60), module.Made)
    with pytest.raises(hvd.LaunchError, match=r"of_the_driver\.OwnError: burnt"):
        ray.get(executor.run_remote(module.fail), timeout=60)
    wait_until(lambda: not processes_below(os.getpid(), "ray::Promise"))


def processes_below(top: int, words: str) -> list[int]:
    """The processes of these words that `top`, or a process of its, has started."""

    def is_below(pid: int) -> bool:
        return pid == top or (pid > 1 and is_below(parent(pid)))

    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if words in command_of(path)]
    return [pid for pid in found if is_below(pid)]


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_ray_is_shut_down_first(cluster: Cluster) -> None:
    program = (
        "import ray; from horovodish.ray import RayExecutor\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False)\n"
        "executor = RayExecutor(num_workers=1)\nexecutor.start()\nray.shutdown()\n"
        "try: executor.run(__import__('time').sleep, args=(60,))\n"
        "except Exception as problem: print(problem)\n"
        "executor.shutdown()\nprint(ray.is_initialized())"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=100)
    assert re.fullmatch(r"the agent on .* has gone: .*; ray\.shutdown\(\) has ended the actors\nFalse\n", output)


def test_two_executors_at_once(executors: Any) -> None:
    one, other = executors(num_workers=2), executors(num_workers=2)
    calls = [each.run_remote(world, args=(factor,)) for factor, each in ((1, one), (2, other))]
    assert [ray.get(each) for each in calls] == [[(0, 2, 2.0), (1, 2, 2.0)], [(0, 2, 4.0), (1, 2, 4.0)]]


def test_no_room(cluster: Cluster) -> None:
    assert all_cpus_are_free()
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=9)
    with pytest.raises(hvd.LaunchError, match=r"not placed 9 bundles of CPU 1 within 1 s; the cluster has CPU 8"):
        executor.start()
    assert all_cpus_are_free()


def test_a_package_that_is_missing_on_a_worker(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "horovodish"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'horovodish'\")")
    program = (
        "import ray; from horovodish.ray import RayExecutor\n"
        f"ray.init(address={cluster.address!r}, runtime_env={{'env_vars': {{'PYTHONPATH': {str(tmp_path)!r}}}}})\n"
        "RayExecutor(num_workers=1).start()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert re.search(
        r"LaunchError: only 0 of 1 agent joined: (the agent of )?actor 0 .*has .*: .*No module named 'horovodish'\n",
        ended.stderr,
    ), ended.stderr


DRIVER = """
import ray, sys
sys.path.insert(0, {tests!r})
import cloudpickle
from ecosystem import cluster_functions
cloudpickle.register_pickle_by_value(cluster_functions)
from horovodish.ray import RayExecutor
ray.init(address={address!r})
executor = RayExecutor(num_workers=2)
executor.start()
executor.run(cluster_functions.waits, args=({folder!r},))
"""


def test_a_killed_driver_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    program = DRIVER.format(tests=str(ROOT / "tests"), address=cluster.address, folder=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", program])
    wait_for_files(tmp_path, 2)
    assert len(ours()) > 4
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    assert left_behind() == {}
    for file in tmp_path.glob("*.ready"):
        assert not Path("/proc", file.read_text()).exists()


def test_an_elastic_executor_goes_on_without_a_node_and_with_a_new_one(
    cluster: Cluster, executors: Any, tmp_path: Path
) -> None:
    """An actor takes a whole node, so a lost one cannot come back before there is a new node."""
    executor = executors(min_workers=1, max_workers=2, cpus_per_worker=4)
    folder, done = tmp_path / "sizes", tmp_path / "done"
    folder.mkdir()
    results = executor.run_remote(trains_until, args=(str(folder), str(done)))
    wait_until((folder / "2.size").exists)
    changes: list[tuple[Callable[[], Any], int]] = [
        (lambda: cluster.remove_node(*cluster.worker_nodes), 1),
        (lambda: cluster.add_node(num_cpus=4), 2),
    ]
    for change, size in changes:
        for earlier in folder.iterdir():
            earlier.unlink()
        change()
        wait_until((folder / f"{size}.size").exists)
    done.touch()
    assert ray.get(results) == [(0, 2), (1, 2)]
    with pytest.raises(hvd.LaunchError, match=r"an elastic RayExecutor has run\(\) alone"):
        executor.execute(world)


def test_an_elastic_executor_ends_with_fewer_ranks(executors: Any, tmp_path: Path) -> None:
    executor = executors(min_workers=1, max_workers=3)
    folder, done = tmp_path / "sizes", tmp_path / "done"
    folder.mkdir()
    results = executor.run_remote(trains_until, args=(str(folder), str(done)))
    wait_until((folder / "3.size").exists)
    ray.kill(executor._actors._handles[1])
    wait_until((folder / "2.size").exists)
    done.touch()
    assert ray.get(results, timeout=60) == [(0, 2), (1, 2), None]


def test_an_elastic_executor_waits_for_an_actor_that_has_died_between_two_runs(executors: Any) -> None:
    executor = executors(min_workers=1)
    assert executor.run(world, args=(1,)) == [(0, 1, 1.0)]
    ray.kill(executor._actors._handles[0], no_restart=False)
    wait_until(lambda: executor._meeting.lost)
    assert executor.run(world, args=(2,)) == [(0, 1, 2.0)]


def test_an_elastic_executor_gets_back_an_agent_that_was_killed(
    executors: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = executors(min_workers=1, elastic_timeout=60)
    assert executor.run(world, args=(1,)) == [(0, 1, 1.0)]
    agent = next(pid for pid, command in ours().items() if "horovodish.launcher.agents.agent" in command)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: executor._meeting.lost)
    assert executor.run(world, args=(2,)) == [(0, 1, 2.0)]
    assert re.search(r"^horovodish: the agent on .* has gone: its process was killed", capfd.readouterr().err, re.M)


ON_TWO_NODES = """
import socket, sys
import ray
from horovodish.ray import RayExecutor

def where():
    import numpy as np
    import horovodish as hvd
    hvd.init()
    return hvd.rank(), hvd.local_rank(), socket.gethostname(), float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])

ray.init(address=sys.argv[1], log_to_driver=False)
while len(ray.nodes()) < 2:
    pass
executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_hosts=2, num_workers_per_host=2)
executor.start()
print(executor.run(where))
executor.shutdown()
"""


def test_nodes_on_two_hosts(tmp_path: Path) -> None:
    mark_of_this_process()
    with hosts(2) as on:
        address = f"{on.address(0)}:6379"
        ray_start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "2"]
        of_node = (["--head", "--port", "6379", "--include-dashboard", "false"], ["--address", address])
        environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for host, flags in enumerate(of_node):
                command = [*on.inside(host), *ray_start, "--node-ip-address", on.address(host), *flags]
                nodes.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
                is_up = f"until (exec 3<>/dev/tcp/{on.address(0)}/6379) 2>/dev/null; do sleep 0.2; done"
                subprocess.run([*on.inside(host), "bash", "-c", is_up], check=True, timeout=60)
            driver = [*on.inside(0), sys.executable, "-c", ON_TWO_NODES, address]
            ended = subprocess.run(driver, env=environ, capture_output=True, text=True, timeout=200)
            names = [on.name(host) for host in (0, 1)]
            expected = [(0, 0, names[0], 4.0), (1, 1, names[0], 4.0), (2, 0, names[1], 4.0), (3, 1, names[1], 4.0)]
            swapped = [(rank, local, names[1 - names.index(name)], four) for rank, local, name, four in expected]
            assert ended.stdout in (f"{expected}\n", f"{swapped}\n"), ended.stdout + ended.stderr
            assert left_behind() == {}
        finally:
            for node in reversed(nodes):
                node.terminate()
                node.wait(30)


@pytest.mark.slow
def test_twenty_jobs(executors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(factor: float) -> Any:
        executor = executors(num_workers=2)
        found = executor.run(world, args=(factor,))
        assert list(tmp_path.iterdir())
        executor.shutdown()
        return found

    runs_twenty_times(run, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs num_workers or num_hosts, and not both"),
        ({"num_workers": 2, "num_hosts": 2}, "needs num_workers or num_hosts, and not both"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker needs use_gpu=True"),
        ({"num_workers": 0}, "at least 1"),
        ({"max_workers": 2}, "max_workers needs min_workers"),
        ({"min_workers": 2, "num_workers": 2}, "min_workers replaces num_workers"),
        ({"min_workers": 2, "max_workers": 1}, "max_workers=1 is less than min_workers=2"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayExecutor(**arguments)


def test_horovods_name() -> None:
    program = (
        "from horovod.ray import RayExecutor; import horovodish.ray as ours; print(RayExecutor is ours.RayExecutor)"
    )
    path = str(ROOT / "horovodish/as_horovod/on_path")
    found = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, text=True)
    assert found == "True\n"
