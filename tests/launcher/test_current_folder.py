"""Modules in the current folder: the user's script finds them, the launcher and all that it starts do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("horovodish"))
MODULES_OF_THE_LAUNCHER = """
import pkgutil, sys
import horovodish.launcher
for module in pkgutil.walk_packages(horovodish.launcher.__path__, "horovodish.launcher."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
import json, runpy, statistics  # what the programs import that it starts
print(*{name.partition(".")[0] for name in sys.modules} & (sys.stdlib_module_names | {"numpy"}))
"""
USERS_MODULE = """
import sys
if "script.py" not in (getattr(sys, "argv", None) or [""])[0]:
    raise BaseException(f"{__name__} was taken from the current folder")
OWNER = "the user's"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of the name of each that the launcher imports, and of horovodish's own."""
    program = [sys.executable, "-c", MODULES_OF_THE_LAUNCHER]
    names = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    taken = set(names) - set(sys.builtin_module_names)
    assert {"queue", "select", "secrets", "numpy", "subprocess", "json", "runpy", "socket"} <= {*taken, "queue"}
    folder = tmp_path / "current"
    folder.mkdir()
    for name in {*taken, "queue", "mpi4py", "cloudpickle", "horovodish"}:
        (folder / f"{name}.py").write_text(USERS_MODULE)
    monkeypatch.chdir(folder)
    return folder


def test_a_script_finds_its_own_modules_and_the_launcher_does_not(start: Callable[..., Any], folder: Path) -> None:
    (folder / "script.py").write_text("import queue, select\nprint(queue.OWNER, select.OWNER)\n")
    job = start(COMMAND, "run", "-np", "2", "python", "script.py")
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == ["the user's the user's"] * 2


@pytest.mark.usefixtures("folder")
def test_check_does_not_find_them(start: Callable[..., Any]) -> None:
    job = start(COMMAND, "check")
    assert job.finish() == 0, job.stdout.lines


@pytest.mark.usefixtures("folder")
def test_a_function_on_ranks_does_not_find_them(start: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "elsewhere.py"
    script.write_text(
        "import horovodish\n"
        "def rank():\n"
        "    import horovodish as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank()\n"
        "if __name__ == '__main__':\n"
        "    print(horovodish.run(rank, num_proc=2))\n"
    )
    job = start(sys.executable, str(script))
    assert (job.finish(), job.stdout.lines) == (0, ["[0, 1]"]), job.stderr.lines


def test_this_test_sees_a_module_that_is_taken(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import secrets"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, os.getcwd()) == (1, str(folder))
    # Python 3.13 takes another one before.
    assert re.search("(secrets|linecache) was taken from the current folder", done.stderr)
