"""The folder of `horovodish.run()`: its name is in command lines, and ranks run what they find in it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from horovodish.launcher.function import run_function
from horovodish.launcher.function.files import CALL, OPTIONS, read, write
from support.other_user import as_other_user, folder_of_all, uid


class Trap:
    """Whoever loads it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Stands for /tmp of another host."""
    with folder_of_all() as folder:
        yield folder


@pytest.fixture
def trap(shared: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of the second user with a call in it, which is never loaded."""
    folder, sprung = shared / "horovodish-call-x", tmp_path / "sprung"
    content = pickle.dumps(Trap(sprung))

    def make() -> None:
        folder.mkdir(0o755)
        (folder / CALL).write_bytes(content)

    assert as_other_user(make) is None
    yield folder
    assert not sprung.exists()
    pickle.loads(content).close()
    assert sprung.exists(), "this test could not have failed"


def test_a_file_from_a_folder_of_another_user_is_not_loaded(trap: Path) -> None:
    with pytest.raises(PermissionError, match=f"{trap} belongs to user {uid()}, and only a private folder"):
        read(trap, CALL)
    with pytest.raises(PermissionError):
        write(trap, CALL, "for nobody to read")


def test_nor_through_a_link(trap: Path, shared: Path) -> None:
    own = shared / "own"
    own.mkdir(0o700)
    write(own, CALL, "ours")
    as_other_user(lambda: (shared / "link").symlink_to(own))
    with pytest.raises(PermissionError, match=f"link belongs to user {uid()}"):
        read(shared / "link", CALL)
    assert read(own, CALL) == "ours"


def test_others_see_neither_the_function_nor_what_it_returns(shared: Path) -> None:
    with run_function._exchange(shared) as folder:
        write(Path(folder), CALL, "the function")
        attempts = [
            lambda: os.listdir(folder),
            lambda: Path(folder, CALL).read_bytes(),
            lambda: Path(folder, "rank-0").write_bytes(b"a result"),
            lambda: os.rename(folder, f"{folder}-away"),
        ]
        assert [type(as_other_user(attempt)) for attempt in attempts] == [PermissionError] * len(attempts)


def test_ranks_say_whose_the_folder_is(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lead_astray(folder: Path, name: str, content: Any) -> None:
        if name == OPTIONS:  # as for ranks on a host where somebody has made a folder of that name
            content = replace(content, command=[*content.command[:-1], str(trap)])
        write(folder, name, content)

    monkeypatch.setattr(run_function, "write", lead_astray)
    said = rf"rank \d on .* does not use the folder of horovodish.run\(\): {trap} belongs to user {uid()}, .*: have it "
    with pytest.raises(hvd.LaunchError, match=f"{said}removed, or pass as shared_folder one that all hosts have in"):
        hvd.run(sys.getrecursionlimit, num_proc=2)


def test_a_file_system_without_owners_is_refused_before_the_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = run_function._exchange

    def make_open(parent: Any) -> Any:
        made = make(parent)
        os.chmod(made.name, 0o777)  # as all folders of such a file system
        return made

    monkeypatch.setattr(run_function, "_exchange", make_open)
    with pytest.raises(hvd.SettingError, match=r"shared_folder: .* has mode 0777, .* or pass one where files have own"):
        hvd.run(sys.getrecursionlimit, shared_folder=tmp_path)
