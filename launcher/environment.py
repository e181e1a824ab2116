"""The environment that the ranks get."""

import os
from collections.abc import Mapping
from pathlib import Path

from horovodish.launcher.installation import search_path
from horovodish.settings import NP_VARIABLE, RUN_DIR_VARIABLE, Value, table

__all__ = ["THREADS_VARIABLE", "rank_environment", "threads_per_rank", "with_settings"]

THREADS_VARIABLE = "OMP_NUM_THREADS"


def threads_per_rank(np: int) -> int:
    """How many threads a rank should compute with, so that the ranks together use each core that we may use once."""
    return max(1, len(os.sched_getaffinity(0)) // np)


def with_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the settings that the user gave as flags are set. A flag counts more than a variable.

    Args:
        environ: the user's environment.
        flags: text by the name of the setting.
    """
    return {**environ, **{row.variable: flags[row.name] for row in table() if row.name in flags}}


def rank_environment(
    environ: Mapping[str, str], np: int, run_dir: Path, settings: Mapping[str, Value], *, unbuffered: bool
) -> dict[str, str]:
    """The variables of every rank.

    Args:
        environ: the user's environment, with the flags.
        np: number of ranks.
        run_dir: the folder of this run.
        settings: value by name. Those that came from a variable of Horovod are set under our name, so that the launcher
            alone gives notice of it.
        unbuffered: whether Python shall write what it prints at once, because nothing else makes a pipe live.
    """
    ours = {NP_VARIABLE: str(np), RUN_DIR_VARIABLE: str(run_dir), "PATH": search_path(environ)}
    for row in table():
        if row.horovod_variable in environ and row.variable not in environ:
            ours[row.variable] = str(settings[row.name])
    defaults = {THREADS_VARIABLE: str(threads_per_rank(np))}
    if unbuffered:
        defaults["PYTHONUNBUFFERED"] = "1"
    return {**defaults, **environ, **ours}
