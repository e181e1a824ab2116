"""The table of the frameworks, and the warning that names a release of one that is too old."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

import versions
from horovodish.supported import FRAMEWORKS, warn_if_too_old
from support import sources


def warned(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_too_old("torch")
    return [str(warning.message) for warning in caught]


def test_every_folder_is_in_the_table() -> None:
    assert {path.parent.name for path in sources.FRAMEWORKS.glob("*/__init__.py")} == set(FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_has_an_extra_and_a_page_of_the_reference(framework: str) -> None:
    assert framework in metadata("horovodish").get_all("Provides-Extra")
    page = (sources.ROOT / "docs" / "reference" / f"{framework}.md").read_text()
    assert f"```{{api}} horovodish.{framework}\n" in page


def test_older_releases_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMEWORKS, "torch", FRAMEWORKS["torch"]._replace(oldest=(2, 1, 1)))
    for version in ("2.1.1", "2.1.1+cu130", "2.13.0a0+git", "3", "100.0rc1", "unknown"):
        assert warned(monkeypatch, version) == []
    for version in ("1.13.1", "2.0.1", "2.1.0+cpu", "2.1"):
        (message,) = warned(monkeypatch, version)
        assert message.endswith(f"needs torch 2.1.1 or later, and this is {version}")


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for rank, messages in ((0, 1), (1, 0)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        assert len(warned(monkeypatch, "1.13.1")) == messages


def test_the_warning_is_about_the_line_that_imports_our_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="1.13.1"))  # type: ignore[arg-type]
    monkeypatch.syspath_prepend(str(tmp_path))
    shim, script = tmp_path / "shim_that_warns.py", tmp_path / "script.py"
    shim.write_text("from horovodish import supported\n\nsupported.warn_if_too_old('torch')\n")
    script.write_text("import shim_that_warns\n")
    with pytest.warns(UserWarning, match="needs torch") as caught:
        runpy.run_path(str(script))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(str(script), 1)]


def test_the_extras_ask_for_the_oldest_releases() -> None:
    asked = metadata("horovodish").get_all("Requires-Dist") or []
    for framework, row in FRAMEWORKS.items():
        oldest = ".".join(map(str, row.oldest))
        pattern = rf"{framework}(\[cpu\])?>={re.escape(oldest)}; extra == ['\"]{framework}['\"]"
        assert any(re.fullmatch(pattern, each) for each in asked), asked


def test_the_page_gets_what_passed_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "versions.md"
    before = ["# Versions", "", "| asked for | installed |", "|---|---|", "| 3.11, all | numpy 2.4 |"]
    names = [combination.name for combination in versions.COMBINATIONS]
    older = {name: f"| {name} | numpy 1.0 |" for name in names[2:0:-1]}
    page.write_text("\n".join([*before, *older.values(), ""]))

    def run(combination: versions.Combination, wheel: Path, log: IO[str]) -> str:
        if combination.name == names[1]:
            raise subprocess.CalledProcessError(1, "pytest")
        return f"| {combination.name} | numpy 2.0 |"

    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(versions, "run", run)
    monkeypatch.setattr(versions, "wheel_for", lambda python: None if python == "3.14" else tmp_path)
    assert versions.main(names[:2]) == 1
    passed = f"| {names[0]} | numpy 2.0 |"
    assert page.read_text().splitlines() == [*before, passed, older[names[1]], older[names[2]]]
    assert f"{names[1]}: failed, see {tmp_path}/logs/{names[1]}.log\n" in capsys.readouterr().out

    assert versions.main(names[4:5]) == 0
    assert "dist/ has no wheel for Python 3.14: skipped" in capsys.readouterr().out
    assert page.read_text().splitlines()[-1] == older[names[2]]
