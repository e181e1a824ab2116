"""`import horovod` gives horovodish: for the ranks of `--as-horovod`, or where horovod-names is installed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.as_horovod import MODULES, VERSION
from horovodish.launcher.job.environment import HOROVOD_FOLDER, exported, with_horovods_names
from horovodish.launcher.report.libraries import conflict
from horovodish.supported import FRAMEWORKS
from support.sources import ROOT

NAMES = ROOT / "names"
WITHOUT_FRAMEWORKS = [f"horovod.{name}" for name in MODULES if name not in (*FRAMEWORKS, "ray", "spark")]
REFUSED = {
    "horovod.mxnet": "train with another framework",
    "horovod.runner.http": "No module named",
    "horovod.runner.util": "No module named",
}

PROGRAM = f"""
import importlib, pickle, sys
import horovod
import horovodish
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError
assert horovod.__version__ == {VERSION!r}
assert horovod.run is horovodish.run
for name in {WITHOUT_FRAMEWORKS}:
    module = importlib.import_module(name)
    assert [exported for exported in module.__all__ if not hasattr(module, exported)] == []
for name, remedy in {REFUSED}.items():
    try:
        importlib.import_module(name)
    except ImportError as problem:
        assert name in str(problem) and remedy in str(problem), problem
    else:
        raise AssertionError(name)
assert importlib.util.find_spec("horovod.common.util")
assert importlib.util.find_spec("horovod.nothing") is None
assert importlib.util.find_spec("horovod.runner.http") is None
assert not HorovodBasics("", "mpi_lib").is_initialized()
assert HorovodInternalError is horovodish.HorovodInternalError
assert pickle.loads(b"chorovod.common.process_sets\\nProcessSet\\n.") is horovodish.ProcessSet
loaded = [framework for framework in {list(FRAMEWORKS)} if framework in sys.modules]
print(horovod.__file__, loaded)
"""

CALLER = """
import horovodish

def version():
    import horovod
    return horovod.__version__

print(horovodish.run(version, num_proc=1, as_horovod=True))
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with another Horovod."""
    package = tmp_path / "other" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('another Horovod')\n")
    return package.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed horovod-names, from its sdist."""
    source, target = tmp_path_factory.mktemp("names"), tmp_path_factory.mktemp("installed")
    shutil.copytree(NAMES, source, dirs_exist_ok=True)  # setuptools writes into the folder
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (sdist,) = source.parent.glob("horovod_names-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", target, sdist], check=True, timeout=300)
    return target


def test_the_names_come_before_another_horovod_and_without_a_framework(
    launch_ranks: Callable[..., Any], other: Path
) -> None:
    job = launch_ranks(2, PROGRAM, "--as-horovod", mpi=False, env={"PYTHONPATH": str(other)})
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == [f"{HOROVOD_FOLDER}/horovod.py []"] * 2


def test_ranks_do_not_get_them_unasked(launch_ranks: Callable[..., Any], other: Path) -> None:
    job = launch_ranks(1, "import horovod", mpi=False, env={"PYTHONPATH": str(other)})
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == ["another Horovod"]


def test_the_path_of_the_user_stays_and_the_current_folder_is_not_added() -> None:
    assert with_horovods_names({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{HOROVOD_FOLDER}:/a:/b"
    assert with_horovods_names({"PYTHONPATH": ""})["PYTHONPATH"] == HOROVOD_FOLDER
    assert with_horovods_names({"HOME": "/h"}) == {"HOME": "/h", "PYTHONPATH": HOROVOD_FOLDER}
    assert "PYTHONPATH" in exported(with_horovods_names({}))
    assert [name for name in os.listdir(HOROVOD_FOLDER) if name != "__pycache__"] == ["horovod.py"]


def test_functions_get_them(start: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    job = start(sys.executable, str(script))
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == [f"['{VERSION}']"]


def test_an_installed_package(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert found.stdout == f"{installed}/horovod.py []\n", found.stderr
    program = "import horovod; print(horovod.__version__)"
    job = [installed / "bin/horovodrun", "-np", "1", "--gloo", "-H", "localhost:1", sys.executable, "-c", program]
    started = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=300)
    assert started.stdout == f"{VERSION}\n", started.stderr
    assert "--gloo is accepted, but has no effect" in started.stderr


def test_both_ways_give_the_same_module() -> None:
    def contents(folder: object) -> dict[str, Any]:
        found = runpy.run_path(f"{folder}/horovod.py")
        return {name: found[name] for name in found if name[0] != "_" or name in ("__all__", "__path__", "__version__")}

    assert contents(NAMES) == contents(HOROVOD_FOLDER)
    assert len(contents(HOROVOD_FOLDER)) == 4


def test_it_does_not_go_beside_horovod_itself(installed: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = other / "horovod-0.28.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{other}"}
    said = "horovod 0.28.1 and horovod-names are both installed"
    for command in (["-m", "horovodish.launcher", "run"], [installed / "bin/horovodrun"]):
        refused = [sys.executable, *command, "-np", "1", "true"]
        ended = subprocess.run(refused, env=environment, capture_output=True, text=True, timeout=300)
        assert (ended.returncode, said in ended.stderr) == (1, True), ended.stderr
    allowed = [sys.executable, "-m", "horovodish.launcher", "run", "--as-horovod", "-np", "1", "true"]
    subprocess.run(allowed, env=environment, check=True, timeout=300)

    monkeypatch.syspath_prepend(str(other))
    assert conflict() == ""


def test_the_types_are_those_of_our_modules() -> None:
    stubs = NAMES / "horovod-stubs"
    files = {
        path.relative_to(stubs).with_suffix("").as_posix().removesuffix("/__init__") for path in stubs.rglob("*.pyi")
    }
    assert files == {"__init__", *FRAMEWORKS, "tensorflow/keras", "ray", "spark"}
    for name in files - {"__init__"}:
        path = next(path for path in (stubs / f"{name}.pyi", stubs / name / "__init__.pyi") if path.exists())
        assert f"from horovodish.{name.replace('/', '.')} import *\n" in path.read_text()
