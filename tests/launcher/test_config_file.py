"""Flags in a YAML file: what counts more, what keys there are, and what is said about one that makes no sense."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import cli
from horovodish.launcher.config_file import read
from horovodish.launcher.flags import run_parser
from horovodish.launcher.job.environment import with_settings
from horovodish.launcher.options import LaunchOptions


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A function that writes a file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_keys_are_the_names_of_flags(config: Any) -> None:
    text = "np: 8\nfusion-threshold-mb: 32\ncache_capacity: 16\nverbose: yes\nprefix_output: on\nlog-level: INFO\n"
    assert read(config(text), run_parser()) == {
        "np": 8,
        "fusion_threshold_mb": "32",
        "cache_capacity": "16",
        "verbose": True,
        "prefix_output": True,
        "log_level": "INFO",
    }


def test_the_sections_of_horovods_files(config: Any) -> None:
    text = """
params:
  fusion_threshold_mb: 32
  cache_capacity: 2048
  cycle_time_ms: 50
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: horovod_autotune_log.txt
  warmup_samples: 5
  steps_per_sample: 20
timeline:
  filename: horovod_timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  num_nccl_streams: 2
logging:
  level: TRACE
"""
    assert read(config(text), run_parser()) == {
        "fusion_threshold_mb": "32",
        "cache_capacity": "2048",
        "cycle_time_ms": "50",
        "hierarchical_allreduce": True,
        "autotune": True,
        "autotune_log": "horovod_autotune_log.txt",
        "autotune_warmup_samples": "5",
        "autotune_steps_per_sample": "20",
        "timeline_filename": "horovod_timeline.json",
        "timeline_mark_cycles": True,
        "stall_check": False,
        "stall_check_warning_time_seconds": "120",
        "stall_check_shutdown_time_seconds": "240",
        "num_nccl_streams": "2",
        "log_level": "TRACE",
    }


def test_a_section_of_one_switch_can_be_that_switch(config: Any) -> None:
    assert read(config("autotune: true\nstall-check: false\n"), run_parser()) == {
        "autotune": True,
        "stall_check": False,
    }


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_sets_nothing(text: str, config: Any) -> None:
    assert read(config(text), run_parser()) == {}


def test_the_command_line_counts_more_than_the_file_and_the_file_more_than_variables(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchOptions] = []
    spin_us: list[str] = []

    def run(options: LaunchOptions, environ: Any) -> int:
        asked.append(options)
        spin_us.append(with_settings(environ, options.settings)["HOROVODISH_SPIN_US"])
        return 0

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setenv("HOROVODISH_SPIN_US", "9")
    path = config("np: 3\nspin-us: 1\ncache-capacity: 1\nautotune: true\nverbose: true\nprefix-output: true\n")
    flags = ["--config-file", path, "--cache-capacity", "2", "--no-autotune", "--no-prefix-output"]
    assert cli.main(["run", *flags, "true"]) == 0
    settings = {"spin_us": "1", "cache_capacity": "2", "autotune": "0"}
    assert asked == [LaunchOptions(["true"], settings, np=3, prefix_output=False, verbose=True)]
    assert spin_us == ["1"]


MISTAKES = [
    ("fusion-treshold-mb: 3", "line 1: there is no key fusion-treshold-mb; did you mean fusion-threshold-mb?"),
    ("np: 2\n\nspin-usec: 3", "line 3: there is no key spin-usec; did you mean spin-us?"),
    ("autotune:\n  log-fil: x", "line 2: there is no key log-fil in autotune; did you mean log-file?"),
    ("params:\n  enabled: true", "line 2: there is no key enabled in params"),
    ("what: {spin-us: 3}", "line 1: there is no key what"),
    ("no-autotune: true", "line 1: there is no key no-autotune; did you mean autotune?"),
    ("version: 1", "line 1: there is no key version"),
    (
        "spin-us: fast",
        "line 1: spin-us='fast' is not accepted: spin_us is a whole number from -1 to 1000000",
    ),
    ("params:\n  spin_us: 1.5", "line 2: spin-us='1.5' is not accepted: spin_us is a whole number"),
    ("autotune:\n  enabled: perhaps", "line 2: enabled='perhaps' is not accepted: autotune is 1 (on) or 0 (off)"),
    ("verbose: 3", "line 1: verbose='3' is not accepted: it is true or false"),
    ("np: two", "line 1: np: 'two' is not a number of ranks"),
    ("np: [1, 2]", "line 1: np has a list, but takes one value"),
    ("np: {a: 2}", "line 1: np has further keys, but takes one value"),
    ("timeline: trace.json", "line 1: there is no key timeline"),
    ("np:", "line 1: np has no value, but takes one value"),
    ("np: 2\nnum-proc: 3", "line 2: num-proc is set in line 1 already"),
    ("autotune-log: a\nautotune:\n  log_file: b", "line 3: log-file is set in line 1 already"),
    ("- np", "line 1: the file must consist of lines such as `np: 4`"),
    ("np: 2\n  : [", "line 2 is not YAML: "),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_told_with_its_line(text: str, message: str, config: Any) -> None:
    path = config(text)
    with pytest.raises(SettingError) as refusal:
        read(path, run_parser())
    assert str(refusal.value).startswith(f"{path}, {message}")
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere.yaml"
    assert cli.main(["run", "--config-file", str(path), "true"]) == 2
    assert capsys.readouterr().err == f"horovodish: {path} cannot be read: No such file or directory\n"


def test_without_pyyaml(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError, match="--config-file needs PyYAML; install it: pip install PyYAML"):
        read(config("np: 2"), run_parser())
