"""`horovodish.spark.run()` on a real Spark of this machine."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from support.documents import python_blocks
from support.hosts import hosts
from support.orphans import mark_of_this_process
from support.scripts import output_of
from support.sources import ROOT

if find_spec("pyspark") is None:
    pytest.skip("`make test-ecosystem` installs what this needs", allow_module_level=True)

import cloudpickle
import pyspark
from ecosystem import cluster_functions
from ecosystem.cluster_functions import (
    left_behind,
    ours,
    raises_on_rank_1,
    runs_twenty_times,
    wait_for_files,
    waits,
    world,
)
from pyspark.sql import SparkSession

import horovodish.spark
from horovodish.launcher.function.ranks import RankTraceback
from horovodish.spark import run_function

cloudpickle.register_pickle_by_value(cluster_functions)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    mark_of_this_process()
    made = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


@pytest.fixture
def context(session: Any) -> Iterator[Any]:
    """Nothing is left after it."""
    yield session.sparkContext
    assert left_behind() == {}
    assert list(session.sparkContext.statusTracker().getActiveJobsIds()) == []


def test_digits() -> None:
    output = output_of(ROOT / "examples/spark_digits.py", np=0, with_errors=True)
    assert re.search(r"rank 1 of 2 has learned: test accuracy", output), output
    found = re.search(r"2 ranks in Spark, test accuracy of each: (0\.\d+) (0\.\d+)$", output, re.MULTILINE)
    assert found, output
    assert found[1] == found[2]
    assert float(found[1]) > 0.9


def test_the_program_of_the_guide(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(python_blocks("docs/spark.md")[0])
    losses = output_of(program, np=0).splitlines()[-1]
    assert re.fullmatch(r"\[[\d.e-]+, [\d.e-]+\]", losses), losses


def test_results_come_by_rank(context: Any) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    found = horovodish.spark.run(world, args=(2,), stdout=stdout, stderr=stderr)
    assert found == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    assert sorted(stdout.getvalue().splitlines()) == [f"rank {rank} prints" for rank in range(3)]
    assert stderr.getvalue().splitlines().count("and complains") == 3
    variable = horovodish.spark.run(lambda: os.environ["OF_THE_TEST"], num_proc=1, env={"OF_THE_TEST": "x"})
    assert variable == ["x"]


def test_an_exception_of_a_rank(context: Any) -> None:
    with pytest.raises(KeyError, match="no such key") as raised:
        horovodish.spark.run(raises_on_rank_1, num_proc=2)
    assert isinstance(raised.value.__cause__, RankTraceback)
    assert "in raises_on_rank_1" in str(raised.value.__cause__)


def test_a_killed_task(context: Any, tmp_path: Path) -> None:
    def kill() -> None:
        wait_for_files(tmp_path, 2)
        agents = [pid for pid, command in ours().items() if "horovodish.launcher.agents.agent" in command]
        task = int(Path(f"/proc/{min(agents)}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(task, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(
        hvd.RankLostError, match=r"the agent on .* has gone: its process was .*; the Spark job has failed"
    ):
        horovodish.spark.run(waits, args=(str(tmp_path),), num_proc=2)
    thread.join()


def test_two_runs_at_once(context: Any) -> None:
    found: list[Any] = []
    runs = [
        threading.Thread(target=lambda np=np: found.append(horovodish.spark.run(world, args=(1,), num_proc=np)))
        for np in (1, 2)
    ]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert sorted(found, key=len) == [[(0, 1, 1.0)], [(0, 2, 2.0), (1, 2, 2.0)]]


@pytest.mark.slow
def test_twenty_jobs(context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runs_twenty_times(lambda factor: horovodish.spark.run(world, args=(factor,), num_proc=2), tmp_path)


def test_tasks_that_find_no_room(context: Any) -> None:
    with pytest.raises(hvd.LaunchError, match=r"only [0-3] of 4 agents joined in time"):
        horovodish.spark.run(world, args=(1,), num_proc=4, start_timeout=3)
    assert context.parallelize(range(3), 3).map(lambda x: x + 1).collect() == [1, 2, 3]


class HardOfHearing:
    """A context that does not cancel jobs the first times."""

    def __init__(self, context: Any, times: float) -> None:
        self._context = context
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        self.times -= 1
        if self.times < 0:
            self._context.cancelJobGroup(group)


@pytest.mark.parametrize("times", [1, float("inf")])
def test_a_job_that_does_not_end_when_it_is_cancelled(
    context: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: float
) -> None:
    monkeypatch.setattr(run_function, "LEAVE_SECONDS", 1.0)
    hard_of_hearing = HardOfHearing(context, times)
    tasks = run_function._Tasks(hard_of_hearing, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with tasks.ended_after():
            tasks.start(f"{'0' * 64} {silent.getsockname()[1]} 127.0.0.1")
        assert hard_of_hearing.times in (-1, times)
        told = "warning: Spark has not ended the job of 1 ranks" in capsys.readouterr().err
        assert told == (times == float("inf")) == tasks._thread.is_alive()
    context.cancelJobGroup(tasks._group)
    tasks._thread.join()


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import cloudpickle
from ecosystem import cluster_functions
cloudpickle.register_pickle_by_value(cluster_functions)
import horovodish.spark
from pyspark.sql import SparkSession
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
horovodish.spark.run(cluster_functions.waits, args=({folder!r},), num_proc=2)
"""


def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    mark_of_this_process()
    program = DRIVER.format(tests=str(ROOT / "tests"), folder=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", program])
    wait_for_files(tmp_path, 2)
    assert len(ours()) > 4
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    assert left_behind() == {}
    for file in tmp_path.glob("*.ready"):
        assert not Path("/proc", file.read_text()).exists()


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        (
            "builder.config('spark.executorEnv.PYTHONPATH', {folder!r})",
            "the (agent of task 0|Spark job) has .*: .*No module named 'horovodish'",
        ),
        (
            "os.environ['PYSPARK_PYTHON'] = {folder!r} + '/python'",
            'the Spark job has failed: .*Cannot run program "/\\S+/python"',
        ),
    ],
    ids=["package", "Python"],
)
def test_what_is_missing_on_a_worker(tmp_path: Path, lacks: str, message: str) -> None:
    broken = tmp_path / "horovodish"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'horovodish'\")")
    program = (
        "import os, horovodish.spark; from pyspark.sql import SparkSession\n"
        f"builder = SparkSession.builder.master('local[1]')\n{lacks.format(folder=str(tmp_path))}\n"
        "builder.getOrCreate()\nhorovodish.spark.run(print, num_proc=1)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert re.search(f"LaunchError: only 0 of 1 agent joined: {message}.*\n$", ended.stderr), ended.stderr


ON_TWO_WORKERS = """
import socket, sys
import horovodish.spark
from pyspark.sql import SparkSession

def where():
    import numpy as np
    import horovodish as hvd
    hvd.init()
    return hvd.rank(), hvd.local_rank(), socket.gethostname(), float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])

master, address = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.driver.host", address)
builder.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false").getOrCreate()
print(horovodish.spark.run(where, num_proc=4))
"""


def test_workers_on_two_hosts(tmp_path: Path) -> None:
    mark_of_this_process()
    spark_class = str(Path(pyspark.__file__).parent / "bin/spark-class")
    with hosts(2) as on:
        master = f"spark://{on.address(0)}:7077"
        worker = ("org.apache.spark.deploy.worker.Worker", master, "--cores", "2", "--memory", "1g")
        commands = [(0, ("org.apache.spark.deploy.master.Master", "--port", "7077")), (0, worker), (1, worker)]
        environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for host, words in commands:
                own = {**environ, "SPARK_WORKER_DIR": str(tmp_path), "SPARK_LOCAL_HOSTNAME": on.address(host)}
                command = [*on.inside(host), spark_class, *words, "--host", on.address(host)]
                nodes.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            driver = [*on.inside(0), sys.executable, "-c", ON_TWO_WORKERS, master, on.address(0)]
            own = {**environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_HOSTNAME": on.address(0)}
            ended = subprocess.run(driver, env=own, capture_output=True, text=True, timeout=200)
            found = sorted(re.findall(r"\(\d, (\d), '(.*?)', 4\.0\)", ended.stdout))
            expected = [(str(local), on.name(host)) for local in (0, 1) for host in (0, 1)]
            assert found == expected, ended.stdout + ended.stderr
            assert left_behind() == {}
        finally:
            for node in reversed(nodes):
                node.terminate()
                node.wait(30)


def test_without_a_context() -> None:
    program = "import horovodish.spark; horovodish.spark.run(print)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "LaunchError: horovodish.spark.run() needs a SparkContext" in ended.stderr


def test_horovods_names() -> None:
    program = (
        "import horovod.spark, horovodish.spark\n"
        "print(horovod.spark.run is horovodish.spark.run)\n"
        "try: import horovod.spark.keras\n"
        "except ImportError as problem: print(problem)"
    )
    path = str(ROOT / "horovodish/as_horovod/on_path")
    found = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, text=True)
    assert found.startswith("True\nhorovodish has no horovod.spark.keras: ")
    assert "write the data to files" in found
