"""Files that the user names, in a folder where a second user can write, too, and has put links."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.gradients import autotune
from horovodish.launch.output_files import opener
from horovodish.launcher.elastic.events import FILE, Events
from horovodish.launcher.job.output import Output
from horovodish.launcher.options import LaunchOptions
from support.other_user import as_other_user, folder_of_all

THESIS = "the only copy"


@pytest.fixture
def shared() -> Iterator[Path]:
    with folder_of_all() as folder:
        yield folder


@pytest.fixture
def thesis(tmp_path: Path) -> Iterator[Path]:
    """What a link of the second user leads to; in the end it is as before."""
    file = tmp_path / "thesis"
    file.write_text(THESIS)
    yield file
    assert file.read_text() == THESIS


def plant(link: Path, target: Path) -> None:
    def make() -> None:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)

    assert as_other_user(make) is None


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_link_of_another_user_is_not_followed(shared: Path, thesis: Path, mode: str) -> None:
    plant(shared / "log", thesis)
    with pytest.raises(PermissionError, match="another user has made this link; remove it or name another file"):
        open(shared / "log", mode, opener=opener).close()


def test_a_link_that_leads_nowhere_makes_nothing(shared: Path, tmp_path: Path) -> None:
    plant(shared / "log", tmp_path / "authorized_keys")
    with pytest.raises(PermissionError):
        open(shared / "log", "w", opener=opener).close()
    assert not (tmp_path / "authorized_keys").exists()


def test_own_links_are_followed_and_files_are_made_replaced_and_continued(tmp_path: Path) -> None:
    link = tmp_path / "log"
    link.symlink_to("file")
    for mode, text in (("w", "one"), ("w", "two"), ("a", "three")):
        with open(link, mode, opener=opener) as file:
            file.write(text)
    assert (tmp_path / "file").read_text() == "twothree"
    open("/dev/stdout", "w", opener=opener).close()  # a link of root's


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    open(tmp_path / "log", "w", opener=opener).close()
    (tmp_path / "other").touch()
    assert (tmp_path / "log").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("level", ["the file", "its folder"])
def test_what_ranks_write(shared: Path, thesis: Path, tmp_path: Path, level: str) -> None:
    if level == "the file":
        plant(shared / "rank.0/stdout", thesis)
    else:
        (tmp_path / "stdout").symlink_to(thesis)
        plant(shared / "rank.0", tmp_path)
    options = LaunchOptions(command=["true"], np=1, output_filename=str(shared))
    with pytest.raises(SettingError, match=rf"{shared}/rank.0/stdout cannot be written: another user has made th"):
        Output(options, {})


def test_the_events_of_an_elastic_job(shared: Path, thesis: Path) -> None:
    plant(shared / FILE, thesis)
    with pytest.raises(SettingError, match=f"{FILE} cannot be written: another user has made this link"):
        Events(str(shared))


def test_the_timeline(shared: Path, thesis: Path) -> None:
    plant(shared / "trace.rank-0.json", thesis)
    code = f"import horovodish as hvd; hvd.init(); hvd.start_timeline({str(shared / 'trace.json')!r})"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "PermissionError: [Errno 1] another user has made this link" in done.stderr


def test_the_log_of_autotune(shared: Path, thesis: Path) -> None:
    plant(shared / "log.csv", thesis)
    with pytest.raises(SettingError, match=r"the log cannot be written \(.* another user has made this link"):
        autotune._log(str(shared / "log.csv"))
