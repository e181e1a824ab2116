"""The table of settings: variables, flags, accepted values, and Horovod's variables of the same meaning."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from horovodish import _native, settings
from horovodish.errors import SettingError
from horovodish.runtime.starting import _check_agreement
from horovodish.settings import Settings, load, table
from support.sources import ROOT


def loaded(**variables: str) -> tuple[Settings, list[str]]:
    notices: list[str] = []
    return load(variables, warn=notices.append), notices


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_rows(row: settings.Setting) -> None:
    assert row.variable == f"HOROVODISH_{row.name.upper()}"
    assert row.flag == f"--{row.name.replace('_', '-')}"
    assert row.sentence.endswith(".")
    if row.default is None:
        assert row.parse("7", row.variable) == 7.0
        assert row.usual
        return
    assert row.parse(str(row.default), row.variable) == row.default
    assert type(row.parse(str(row.default), row.variable)) is type(row.default)


def test_buckets_are_larger_on_a_gpu_unless_they_are_set() -> None:
    assert [Settings().bucket_mb(on_gpu=on_gpu) for on_gpu in (False, True)] == [4.0, 32.0]
    chosen, _ = loaded(HOROVODISH_FUSION_THRESHOLD_MB="4")
    assert [chosen.bucket_mb(on_gpu=on_gpu) for on_gpu in (False, True)] == [4.0, 4.0]


def test_a_rank_that_sets_what_others_leave_unset() -> None:
    seen = [(0, Settings(), "1"), (1, Settings(fusion_threshold_mb=4.0), "1")]
    with pytest.raises(SettingError, match=r"is unset \(4\.0, and 32\.0 on GPUs\) on rank 0 but 4\.0 on rank 1"):
        _check_agreement(seen)


def test_nothing_set_gives_the_defaults() -> None:
    assert loaded(HOME="/root") == (Settings(), [])


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HOROVODISH_FUSION_THRESHOLD_MB", "0.5", "fusion_threshold_mb", 0.5),
        ("HOROVODISH_FUSION_THRESHOLD_MB", "0", "fusion_threshold_mb", 0.0),
        ("HOROVODISH_CACHE_CAPACITY", " 128 ", "cache_capacity", 128),
        ("HOROVODISH_PLANE", "MPI_Ring", "plane", "mpi_ring"),
        ("HOROVODISH_LOG_LEVEL", "debug", "log_level", "debug"),
        ("HOROVOD_FUSION_THRESHOLD", str(64 * 2**20), "fusion_threshold_mb", 64.0),
        ("HOROVOD_FUSION_THRESHOLD", "100000", "fusion_threshold_mb", 100000 / 2**20),
        ("HOROVOD_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_START_TIMEOUT", "90", "start_timeout_seconds", 90),
        ("HOROVOD_LOG_LEVEL", "TRACE", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "error"),
        ("HOROVODISH_LOG_LEVEL", "trace", "log_level", "debug"),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_check", False),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_check", True),
        ("HOROVODISH_TIMELINE_FILENAME", "Out/Trace.json", "timeline_filename", "Out/Trace.json"),
        ("HOROVOD_TIMELINE", "Out/Trace.json", "timeline_filename", "Out/Trace.json"),
        ("HOROVOD_TIMELINE", "DYNAMIC", "timeline_filename", ""),
        ("HOROVODISH_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
        ("HOROVODISH_TIMELINE_MARK_CYCLES", "True", "timeline_mark_cycles", True),
        ("HOROVODISH_TIMELINE_MARK_CYCLES", "off", "timeline_mark_cycles", False),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
    ],
)
def test_a_variable_sets_one_knob(variable: str, text: str, name: str, value: Any) -> None:
    found, notices = loaded(**{variable: text})
    assert found == dataclasses.replace(Settings(), **{name: value})
    assert type(getattr(found, name)) is type(value)
    assert len(notices) == variable.startswith("HOROVOD_")


def test_a_variable_of_horovod_is_honoured_with_a_notice_that_names_ours() -> None:
    _, notices = loaded(HOROVOD_FUSION_THRESHOLD=str(64 * 2**20))
    assert notices == [
        "HOROVOD_FUSION_THRESHOLD is honoured as HOROVODISH_FUSION_THRESHOLD_MB=64.0; please set that instead"
    ]


def test_ours_counts_more_than_horovods() -> None:
    found, notices = loaded(HOROVOD_CACHE_CAPACITY="1", HOROVODISH_CACHE_CAPACITY="2")
    assert found.cache_capacity == 2
    assert notices == []


def test_a_switch_that_horovod_has_the_other_way_round_is_refused_by_its_name() -> None:
    with pytest.raises(SettingError, match="HOROVOD_STALL_CHECK_DISABLE='maybe' is not accepted"):
        load({"HOROVOD_STALL_CHECK_DISABLE": "maybe"})


def test_the_guide_lists_horovods_variables() -> None:
    guide = Path(ROOT, "docs/from-horovod.md").read_text()
    honoured = dict(re.findall(r"^\| `(HOROVOD_\w+)` \| `(HOROVODISH_\w+)`", guide, re.MULTILINE))
    assert honoured == {row.horovod_variable: row.variable for row in settings.table() if row.horovod_variable}
    without_effect = dict(re.findall(r"^\| `(HOROVOD_\w+)` \| none: (.*) \|$", guide, re.MULTILINE))
    assert without_effect == {knob.variable: knob.reason for knob in settings.WITHOUT_EFFECT if knob.variable}


def test_variables_of_horovod_without_effect_get_a_notice() -> None:
    given = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    found, notices = loaded(**given)
    assert found == Settings()
    assert len(notices) == 2
    assert (
        "HOROVOD_CYCLE_TIME is set, but has no effect: there are no cycles; the engine acts as soon as there is work"
        in notices
    )
    assert loaded(**given, HOROVODISH_NP="2") == (Settings(), [])  # the launcher has given them


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("HOROVODISH_CACHE_CAPACITY", "many", "a whole number from 0 to 1048576 (default 4096)"),
        ("HOROVODISH_CACHE_CAPACITY", "1.5", "a whole number from 0"),
        ("HOROVODISH_CACHE_CAPACITY", "", "a whole number from 0"),
        ("HOROVODISH_CACHE_CAPACITY", "-1", "a whole number from 0"),
        ("HOROVODISH_CHUNK_KB", "3", "a whole number from 4 to 1048576 (default 256)"),
        ("HOROVODISH_CHUNK_KB", "9" * 30, "a whole number from 4"),
        ("HOROVODISH_FUSION_THRESHOLD_MB", "nan", "a number from 0 to 65536 (default 4.0, and 32.0 on GPUs)"),
        ("HOROVODISH_FUSION_THRESHOLD_MB", "inf", "a number from 0"),
        ("HOROVODISH_FUSION_THRESHOLD_MB", "64MB", "a number from 0"),
        ("HOROVODISH_TIMELINE_MARK_CYCLES", "2", "1 (on) or 0 (off) (default off)"),
        ("HOROVODISH_COLLECTIVE_GRADIENTS", "mean", "one of exact, horovod (default exact)"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_accepted(variable: str, text: str, accepted: str) -> None:
    name = variable.removeprefix("HOROVODISH_").lower()
    with pytest.raises(SettingError, match=re.escape(f"{variable}={text!r} is not accepted: {name} is {accepted}")):
        load({variable: text})


@pytest.mark.parametrize("text", ["64MB", "-1", str(2**60)])
def test_a_bad_value_of_horovods_variable_is_refused_by_its_name(text: str) -> None:
    message = (
        f"HOROVOD_FUSION_THRESHOLD={text!r} is not accepted; unset it, or set HOROVODISH_FUSION_THRESHOLD_MB instead, "
        "which is a number from 0 to 65536"
    )
    with pytest.raises(SettingError, match=re.escape(message)):
        load({"HOROVOD_FUSION_THRESHOLD": text})


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("HOROVODISH_SPIN_USEC", "HOROVODISH_SPIN_US"),
        ("HOROVODISH_FUSION_THRESHOLD", "HOROVODISH_FUSION_THRESHOLD_MB"),
        ("HOROVODISH_LOGLEVEL", "HOROVODISH_LOG_LEVEL"),
    ],
)
def test_an_unknown_variable_is_noticed_with_the_nearest_name(variable: str, nearest: str) -> None:
    found, notices = loaded(**{variable: "3"})
    assert found == Settings()
    assert notices == [f"{variable} is set, but there is no such setting. Did you mean {nearest}?"]


def test_the_launchers_own_variables_are_no_knobs_and_not_unknown() -> None:
    assert loaded(HOROVODISH_NP="2", HOROVODISH_RUN_DIR="/tmp/x") == (Settings(), [])


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVODISH_SPIN_US", "7")
    assert load().spin_us == 7


@pytest.mark.parametrize(("switch", "expected"), [("1", [7.0, 9.0]), ("0", [0.0, 0.0])])
def test_without_the_stall_check_the_engine_gets_no_times(
    switch: str, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def recording(**options: Any) -> Any:
        given.update(options)
        return engine(**options)

    engine = _native.Engine
    monkeypatch.setattr(_native, "Engine", recording)
    monkeypatch.setenv("HOROVODISH_STALL_CHECK", switch)
    monkeypatch.setenv("HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS", "7")
    monkeypatch.setenv("HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS", "9")
    hvd.init()
    hvd.shutdown()
    assert [given["stall_warning_seconds"], given["stall_shutdown_seconds"]] == expected


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}).spin_us = 3  # type: ignore[misc]


def test_examples() -> None:
    assert doctest.testmod(settings).failed == 0
