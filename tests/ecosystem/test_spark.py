"""`horovodish.spark.run()` on a real Spark of this machine."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from support.orphans import mark_of_this_process
from support.scripts import output_of
from support.sources import ROOT

if find_spec("pyspark") is None:
    pytest.skip("`make test-ecosystem` installs what this needs", allow_module_level=True)

import cloudpickle
from ecosystem import cluster_functions
from ecosystem.cluster_functions import left_behind, ours, raises_on_rank_1, wait_for_files, waits, world
from pyspark.sql import SparkSession

import horovodish.spark
from horovodish.launcher.function.ranks import RankTraceback

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
    with pytest.raises(hvd.RankLostError, match=r"the agent on .* has gone: its process was "):
        horovodish.spark.run(waits, args=(str(tmp_path),), num_proc=2)
    thread.join()


def test_tasks_that_find_no_room(context: Any) -> None:
    with pytest.raises(hvd.LaunchError, match=r"only [0-3] of 4 agents joined in time"):
        horovodish.spark.run(world, args=(1,), num_proc=4, start_timeout=3)
    assert context.parallelize(range(3), 3).map(lambda x: x + 1).collect() == [1, 2, 3]


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
