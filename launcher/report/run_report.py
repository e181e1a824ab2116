"""`horovodish run --report page.html`: ranks record to page.rank-N.records, of which the launcher makes the page."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launcher.job.output import say
from horovodish.launcher.options import LaunchOptions
from horovodish.reports.merge_traces import SUFFIX

TIMELINE = "timeline_filename"
TIMELINE_VARIABLES = ("HOROVODISH_TIMELINE_FILENAME", "HOROVOD_TIMELINE")


def settings(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings with which ranks record. Removes what an earlier run has recorded for the same page.

    Raises:
        SettingError: the page cannot be written there, or a timeline is asked for as well.
    """
    path = os.path.abspath(options.report or "")
    other = next((name for name in TIMELINE_VARIABLES if environ.get(name)), "")
    if options.settings.get(TIMELINE) or other:
        raise SettingError(f"--report and {other or '--timeline-filename'} both record the run: leave one of them out")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise SettingError(f"--report {options.report}: there is no folder {folder}")
    if os.path.isdir(path) or not os.path.basename(options.report or ""):
        raise SettingError(f"--report {options.report}: that is a folder; name a file in it")
    try:
        for old in _records(path):
            old.unlink()
        Path(path).write_text("The run has not ended, or was killed.\n")
    except OSError as problem:
        raise SettingError(f"--report {options.report}: {problem.strerror}") from problem
    return {TIMELINE: str(Path(path).with_suffix(SUFFIX))}


def make(path: str) -> None:
    """Make the page of what the ranks have recorded, and say so."""
    from horovodish.reports import page  # the launcher starts without NumPy

    records = sorted(map(str, _records(os.path.abspath(path))))
    if not records:
        Path(path).unlink(missing_ok=True)
        say(f"there is no report: no rank on this host has called hvd.init(), or none could write beside {path}")
    elif page.report(records, path) == 0:
        size = sum(os.path.getsize(each) for each in records)
        say(f"the report is {path}; its records lie beside it ({size / 1e6:.1f} MB)")
    else:
        Path(path).unlink(missing_ok=True)


def _records(path: str) -> list[Path]:
    stem = glob.escape(str(Path(path).with_suffix("")))
    found = [*glob.glob(f"{stem}.rank-*{SUFFIX}"), *glob.glob(f"{stem}.[0-9]*.rank-*{SUFFIX}")]
    return [Path(each) for each in found]
