"""The variables that the ranks get."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.job.environment import (
    exported,
    rank_environment,
    rank_variables,
    threads_notices,
    torchs_variables,
    with_settings,
)
from horovodish.launcher.job.launcher_end import Hello
from horovodish.settings import load


def hellos(host: str, first: int, count: int, cores: int = 2, own: int | None = None, gpus: str = "") -> list[Hello]:
    names = tuple(filter(None, gpus.split(",")))
    return [
        Hello(first + i, 1, 1, host, "machine", cores, own or cores, "3.11.7", names, 29500, "") for i in range(count)
    ]


@pytest.mark.parametrize(("cores", "np", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 5, 1)])
def test_ranks_share_the_cores(cores: int, np: int, expected: int) -> None:
    variables = rank_variables(hellos("a", 0, np, cores), with_threads=True)
    assert variables == {rank: {"OMP_NUM_THREADS": str(expected)} for rank in range(np)}


def test_ranks_share_the_cores_of_their_own_host_and_a_bound_rank_has_those_that_it_is_bound_to() -> None:
    everybody = [*hellos("a", 0, 2, cores=8), *hellos("b", 2, 1, cores=8), *hellos("c", 3, 2, cores=8, own=3)]
    threads = rank_variables(everybody, with_threads=True)
    assert [threads[rank]["OMP_NUM_THREADS"] for rank in range(5)] == ["4", "4", "8", "3", "3"]
    assert threads_notices(everybody) == [
        "2 ranks on 8 cores of a: OMP_NUM_THREADS=4 for each; set it to choose another number",
        "1 rank on 8 cores of b: OMP_NUM_THREADS=8 for each; set it to choose another number",
        "2 ranks on 8 cores of c: OMP_NUM_THREADS=3 for each; set it to choose another number",
    ]
    assert rank_variables(everybody, with_threads=False) == {rank: {} for rank in range(5)}


def test_hosts_that_are_alike_share_a_line() -> None:
    everybody = [each for index in range(6) for each in hellos(f"n{index}", index, 1)]
    (few,), (many,) = threads_notices(everybody[:3]), threads_notices(everybody)
    assert few.startswith("1 rank on 2 cores of each of n0, n1, n2: OMP_NUM_THREADS=2 for each;")
    assert many.startswith("1 rank on 2 cores of each of 6 hosts: OMP_NUM_THREADS=2 for each;")
    assert threads_notices(everybody[:1])[0].startswith("1 rank on 2 cores: OMP_NUM_THREADS=2 for each;")


def test_ranks_share_the_gpus_of_their_host() -> None:
    everybody = [*hellos("a", 0, 2, gpus="0,1,2,3"), *hellos("b", 2, 2, gpus="GPU-5,GPU-7")]
    one = rank_variables(everybody, with_threads=False, gpus_per_rank=1)
    assert [one[rank]["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["0", "1", "GPU-5", "GPU-7"]
    assert rank_variables(everybody[:2], with_threads=False, gpus_per_rank=2)[1] == {"CUDA_VISIBLE_DEVICES": "2,3"}
    message = "--gpus-per-rank 2 needs 4 GPUs on b, which has 2 for its 2 ranks"
    with pytest.raises(SettingError, match=re.escape(message)):
        rank_variables(everybody, with_threads=False, gpus_per_rank=2)


def test_what_belongs_to_a_host_stays_there() -> None:
    passed = ["CUDA_VISIBLE_DEVICES", "HOROVODISH_NP", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "_X", "lower"]
    own = [
        "HOME",
        "HOSTNAME",
        "PWD",
        "SSH_AUTH_SOCK",
        "SLURM_JOB_ID",
        "BASH_FUNC_x%%",
        "_",
        "OMPI_MCA_btl",
        "PMIX_RANK",
    ]
    assert exported(dict.fromkeys([*own, *passed], "")) == passed


def test_what_ranks_get_besides_the_users_variables() -> None:
    got = rank_environment({"HOME": "/root", "PATH": "/usr/bin"}, 2, asdict(load({})), unbuffered=True)
    assert got == {
        "HOME": "/root",
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin",
        "HOROVODISH_NP": "2",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_what_the_user_has_set_stays() -> None:
    user = {"OMP_NUM_THREADS": "7", "HOROVODISH_SPIN_US": "3", "HOROVOD_LOG_LEVEL": "INFO", "HOROVODISH_NP": "9"}
    got = rank_environment(user, 2, asdict(load({})), unbuffered=False)
    assert (got["OMP_NUM_THREADS"], got["HOROVODISH_SPIN_US"], got["HOROVOD_LOG_LEVEL"]) == ("7", "3", "INFO")
    assert got["HOROVODISH_NP"] == "2"
    assert "PYTHONUNBUFFERED" not in got


def test_a_variable_of_horovod_reaches_the_ranks_under_our_name_so_that_they_do_not_give_notice_again() -> None:
    user = {"HOROVOD_FUSION_THRESHOLD": str(8 * 2**20)}
    notices: list[str] = []
    settings = load(user, warn=notices.append)
    got = rank_environment(user, 2, asdict(settings), unbuffered=False)
    assert len(notices) == 1
    assert load(got, warn=notices.append) == settings
    assert len(notices) == 1


def test_a_flag_counts_more_than_a_variable() -> None:
    assert with_settings({"HOROVODISH_SPIN_US": "3"}, {"spin_us": "4"}) == {"HOROVODISH_SPIN_US": "4"}


def test_what_the_user_has_set_for_torch_stays() -> None:
    everybody = [*hellos("a", 0, 2), *hellos("b", 2, 1)]
    ours = torchs_variables(everybody, "10.0.0.1", {"RANK": "7"})
    assert [ours[rank]["RANK"] for rank in range(3)] == ["0", "1", "2"]
    assert {(own["MASTER_ADDR"], own["MASTER_PORT"], own["WORLD_SIZE"]) for own in ours.values()} == {
        ("10.0.0.1", "29500", "3")
    }
    assert [ours[rank]["GROUP_RANK"] for rank in range(3)] == ["0", "0", "1"]
    theirs = torchs_variables(everybody, "10.0.0.1", {"MASTER_ADDR": "head", "MASTER_PORT": "1"})
    assert "MASTER_ADDR" not in theirs[0] and "MASTER_PORT" not in theirs[0]
