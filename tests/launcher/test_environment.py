"""The variables that the ranks get."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from horovodish.launcher.environment import rank_environment, threads_per_rank, with_settings
from horovodish.settings import load

FOLDER = Path("/tmp/run")


@pytest.mark.parametrize(("cores", "np", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 5, 1)])
def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, np: int, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads_per_rank(np) == expected


def test_what_ranks_get_besides_the_users_variables() -> None:
    got = rank_environment({"HOME": "/root", "PATH": "/usr/bin"}, 2, FOLDER, asdict(load({})), unbuffered=True)
    assert got == {
        "HOME": "/root",
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin",
        "HOROVODISH_NP": "2",
        "HOROVODISH_RUN_DIR": "/tmp/run",
        "OMP_NUM_THREADS": str(threads_per_rank(2)),
        "PYTHONUNBUFFERED": "1",
    }


def test_what_the_user_has_set_stays() -> None:
    user = {"OMP_NUM_THREADS": "7", "HOROVODISH_SPIN_US": "3", "HOROVOD_LOG_LEVEL": "INFO", "HOROVODISH_NP": "9"}
    got = rank_environment(user, 2, FOLDER, asdict(load({})), unbuffered=False)
    assert (got["OMP_NUM_THREADS"], got["HOROVODISH_SPIN_US"], got["HOROVOD_LOG_LEVEL"]) == ("7", "3", "INFO")
    assert got["HOROVODISH_NP"] == "2"
    assert "PYTHONUNBUFFERED" not in got


def test_a_variable_of_horovod_reaches_the_ranks_under_our_name_so_that_they_do_not_give_notice_again() -> None:
    user = {"HOROVOD_FUSION_THRESHOLD": str(8 * 2**20)}
    notices: list[str] = []
    settings = load(user, warn=notices.append)
    got = rank_environment(user, 2, FOLDER, asdict(settings), unbuffered=False)
    assert len(notices) == 1
    assert load(got, warn=notices.append) == settings
    assert len(notices) == 1


def test_a_flag_counts_more_than_a_variable() -> None:
    assert with_settings({"HOROVODISH_SPIN_US": "3"}, {"spin_us": "4"}) == {"HOROVODISH_SPIN_US": "4"}
