"""The command line: what it means, and what is said about one that makes no sense."""

from __future__ import annotations

import errno
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.cli import main
from horovodish.launcher.elastic.job import Slots
from horovodish.launcher.flags import COMMANDS, notices_without_effect, run_parser
from horovodish.launcher.options import LaunchOptions, launch_options
from horovodish.launcher.supervisor.supervisor import script_of
from horovodish.settings import Setting, table
from horovodish.version import __version__


def parsed(*arguments: str) -> LaunchOptions:
    return launch_options(run_parser().parse(arguments), {})


def test_without_a_number_there_is_a_rank_for_each_slot(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=3\n")
    assert launch_options(run_parser().parse(["true"]), slurm).np == 5
    assert launch_options(run_parser().parse(["-np", "2", "true"]), slurm).np == 2
    assert launch_options(run_parser().parse(["-H", "a:4,b:2", "true"]), slurm).np == 6
    assert launch_options(run_parser().parse(["--hostfile", str(hostfile), "true"]), slurm).np == 3


@pytest.mark.parametrize(
    ("flags", "np"),
    [
        ("--min-np 2 --max-np 4", 4),
        ("--min-np 2", 2),
        ("--max-np 3", 3),
        ("-H a:3,b:2 --min-np 2", 5),
        ("-H a:3,b:2 --min-np 2 --max-np 4", 4),
        ("-H a:3,b:2 --min-np 6 --oversubscribe", 6),
        ("-np 3 --min-np 2", 3),
    ],
)
def test_an_elastic_job_has_a_rank_for_each_slot(flags: str, np: int) -> None:
    assert Slots(parsed(*flags.split(), "true"), None).options(0.0).np == np


def test_the_commands_own_flags_are_left_alone() -> None:
    assert parsed("-np", "2", "python", "train.py", "-np", "3", "--verbose", "--", "x") == LaunchOptions(
        np=2, command=["python", "train.py", "-np", "3", "--verbose", "--", "x"], settings={}
    )


def test_no_word_of_the_command_is_taken_for_a_flag() -> None:
    runs = run_parser()
    cut = {flag[:length] for flag in runs.flags if flag[1] != "-" for length in range(1, len(flag))}
    words = [*runs.flags, *sorted(cut), "-host", "-np=3", "-p22", "-1", "- a", "-x y", "--nope", "--np=1"]
    for ours in (["-np", "2"], ["-n", "2"], ["-Hlocalhost:2", "-np=2", "--no-prefix-output", "--thread-affinity", "1"]):
        assert runs.parse([*ours, "python", *words]).command == ["python", *words]
        for word in words:
            assert runs.parse([*ours, "python", word]).command == ["python", word]
        assert runs.parse([*ours, "--", *words]).command == words


def test_two_dashes_end_the_flags() -> None:
    assert parsed("--num-proc", "4", "--verbose", "--prefix-output", "--", "./train") == LaunchOptions(
        np=4, command=["./train"], settings={}, prefix_output=True, verbose=True
    )


def test_every_setting_has_a_flag() -> None:
    for row in table():
        if not row.is_switch:
            value = "7" if row.default is None else str(row.default)
            assert parsed("-np", "1", row.flag, value, "true").settings == {row.name: value}
    assert parsed("-np", "1", "--start-timeout", "9", "true").settings == {"start_timeout_seconds": "9"}


@pytest.mark.parametrize("row", [row for row in table() if row.is_switch], ids=lambda row: row.name)
def test_a_switch_has_two_flags(row: Setting) -> None:
    assert parsed("-np", "1", row.flag, "true").settings == {row.name: "1"}
    assert parsed("-np", "1", row.flag.replace("--", "--no-"), "true").settings == {row.name: "0"}
    assert parsed("-np", "1", "true").settings == {}


def test_a_bad_setting_is_refused_by_its_flag() -> None:
    with pytest.raises(SettingError, match=r"--plane='ring' is not accepted: plane is one of auto, mpi_ring"):
        parsed("-np", "1", "--plane", "ring", "true")


# The flags of Horovod 0.28.1, with values.
HOROVODRUN = """-np 2|--num-proc 2|-p 22|--ssh-port 22|-H a:2|--hosts a:2|--network-interfaces lo|--network-interface lo
--output-filename o|--verbose|--disable-cache|--start-timeout 9|--fusion-threshold-mb 32|--cycle-time-ms 5
--cache-capacity 9|--hierarchical-allreduce|--no-hierarchical-allreduce|--hierarchical-allgather
--no-hierarchical-allgather|--torus-allreduce|--no-torus-allreduce|--autotune|--no-autotune|--autotune-log-file f
--autotune-warmup-samples 3|--autotune-steps-per-sample 9|--autotune-bayes-opt-max-samples 9
--autotune-gaussian-process-noise 0.8|--timeline-filename t|--timeline-mark-cycles|--no-timeline-mark-cycles
--stall-check|--no-stall-check|--stall-check-warning-time-seconds 9|--stall-check-shutdown-time-seconds 9
--mpi-threads-disable|--no-mpi-threads-disable|--mpi-args x|--tcp|--binding-args x|--num-nccl-streams 1
--min-np 2|--max-np 2|--reset-limit 3|--elastic-timeout 9|--thread-affinity 0
--gloo-timeout-seconds 9|--log-level INFO|--log-with-timestamp|--log-without-timestamp
--log-hide-timestamp|--no-log-hide-timestamp|-prefix-timestamp|--prefix-output-with-timestamp|--gloo|--mpi|--jsrun"""


def test_the_flags_of_horovodrun_are_accepted() -> None:
    for flags in HOROVODRUN.replace("\n", "|").split("|"):
        assert parsed("-np", "2", *flags.split(), "true").command == ["true"], flags
        assert parsed("-np", "2", "=".join(flags.split()), "true").command == ["true"], flags
    assert parsed("--as-horovod", "-np", "2", "true") == LaunchOptions(["true"], {}, np=2, as_horovod=True)


def test_flags_of_horovod_that_are_synonyms() -> None:
    assert parsed("-np", "1", "--autotune-log-file", "a.csv", "true").settings == {"autotune_log": "a.csv"}
    assert parsed("-np", "1", "--disable-cache", "true").settings == {"cache_capacity": "0"}
    assert parsed("-np", "1", "--log-level", "TRACE", "true").settings == {"log_level": "TRACE"}


def test_flags_of_horovod_without_effect_are_accepted_with_a_notice() -> None:
    flags = ["--cycle-time-ms", "5", "--no-hierarchical-allreduce", "--num-nccl-streams", "2", "--mpi"]
    options = run_parser().parse(["-np", "1", *flags, "true"])
    assert launch_options(options, {}).settings == {}
    told = notices_without_effect(options)
    assert len(told) == 4
    for name in ("--cycle-time-ms", "--hierarchical-allreduce", "--num-nccl-streams", "--mpi"):
        assert any(line.startswith(f"{name} is accepted, but has no effect: ") for line in told)
    assert notices_without_effect(run_parser().parse(["-np", "1", "true"])) == []


ONE_LINE = [
    ([], "a command is missing, such as in: horovodish run -np 2 python train.py"),
    (["walk"], "there is no command walk, but for example: horovodish run -np 2 python train.py"),
    (["help", "chek"], "there is no command chek; did you mean check?"),
    (["-np", "2", "true"], "-np comes after a command: horovodish run -np ..."),
    (["--check-build", "true"], "true is one argument too many"),
    (["check", "true"], "true is one argument too many"),
    (["check", "--verbos"], "there is no flag --verbos"),
    (["merge-traces"], "the following arguments are required: FILE"),
    (["run", "python", "train.py"], "-np is missing, the number of ranks"),
    (["run", "python", "train.py", "-np", "2"], "-np is missing before the command, the number of ranks"),
    (["run", "-np", "2"], "COMMAND is missing"),
    (["run", "-np", "2", "--"], "COMMAND is missing"),
    (
        ["run", "-np", "2", "/bin/torchrun", "--nproc-per-node", "2", "train.py"],
        "torchrun starts processes, and so does horovodish run: leave torchrun out, as in: horovodish run -np 2 python",
    ),
    (["run", "-np", "0", "true"], "'0' is not a number of ranks"),
    (["run", "-np", "two", "true"], "'two' is not a number of ranks"),
    (["run", "-np", "2", "--no-such-flag", "true"], "there is no flag --no-such-flag"),
    (["run", "-np", "2", "--min-np", "3", "true"], "--min-np 3 is more than -np 2: the job could not begin"),
    (["run", "-np", "2", "--max-np", "1", "true"], "--max-np 1 is less than -np 2"),
    (
        ["run", "-H", "a:2", "--min-np", "3", "true"],
        "--min-np 3 is more than the 2 slots of --hosts: the job could not",
    ),
    (["run", "--host-discovery-script", "/no/such", "true"], "there is no program /no/such"),
    (["run", "-np", "2", "--min-np", "1", "--reset-limit", "-1", "true"], "'-1' is not a whole number from 0"),
    (
        ["run", "--host-discovery-script", "/bin/true", "-H", "a", "true"],
        "--host-discovery-script names the hosts: leave --hosts and --hostfile out",
    ),
    (["run", "-np", "2", "--slots", "2", "true"], "--slots-per-host is for --host-discovery-script"),
    (
        ["run", "--nproc-per-node=2", "true"],
        "there is no flag --nproc-per-node; did you mean -np, the number of all ranks?",
    ),
    (["run", "-np", "2", "-q", "true"], "there is no flag -q (see "),
    (["run", "-np", "2", "--chunk", "8", "true"], "there is no flag --chunk; did you mean --chunk-kb?"),
    (["run", "-np", "2", "--chunks-kb=8", "true"], "there is no flag --chunks-kb; did you mean --chunk-kb?"),
    (["run", "-np", "2", "--no-autotuned", "true"], "there is no flag --no-autotuned; did you mean --no-autotune?"),
]


@pytest.mark.parametrize(("arguments", "message"), ONE_LINE, ids=lambda value: " ".join(value)[:40])
def test_arguments_that_make_no_sense(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_program_that_is_not_executable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "the hosts.sh"
    program.write_text("#!/bin/sh\necho localhost:2\n")
    assert main(["run", "--host-discovery-script", str(program), "true"]) == 2
    assert f"{program} is not executable. Remedy: chmod +x '{program}'" in capsys.readouterr().err


def test_help_has_every_flag_under_a_title() -> None:
    text = run_parser().format_help()
    titles = ["what runs", "where it runs", "output", "tuning", "autotune", "timeline", "stalls", "instead of a run"]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert "options:" not in text
    for row in table():
        assert f"{row.flag} " in text or f"{row.flag}," in text


@pytest.mark.parametrize("arguments", [["--check-build"], ["-cb"], ["run", "--check-build"], ["check"]])
def test_horovods_flag_for_the_check(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovodish.launcher.cli.check", lambda environ, **_: 5)
    assert main(arguments) == 5


@pytest.mark.parametrize("arguments", [["run", "--help"], ["run", "-h"], ["help", "run"], ["run", "--help-all"]])
def test_the_short_help_fits_on_a_screen(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.split("python train.py")[0].split() for line in lines if line.startswith("  horovodish run ")]
    assert len(examples) == 4
    for _, _, *flags in examples:
        parsed(*(flags or ["-np", "1"]), "true")
    is_short = "--help-all" not in arguments
    assert (len(lines) <= 40) == is_short
    assert any("--cycle-time-ms" in line for line in lines) != is_short
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("arguments", [["help"], ["--help"]])
def test_the_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(f"\n  {command}  " in said for command in COMMANDS)


@pytest.mark.parametrize("flags", [["--version"], ["-v"], ["run", "--version"], ["version"]])
def test_version(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"horovodish {__version__}"
    assert [line[:10].strip() for line in lines[1:]] == ["Python", "frameworks", "MPI", "NCCL"]
    assert f"mpi4py {importlib.metadata.version('mpi4py')}" in lines[3]


@pytest.mark.parametrize("source", ["--spin-us", "HOROVODISH_SPIN_US"])
def test_a_bad_value_is_a_usage_error(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = []
    if source.startswith("--"):
        flags = [source, "fast"]
    else:
        monkeypatch.setenv(source, "fast")
    assert main(["run", "-np", "1", *flags, "true"]) == 2
    expected = (
        f"horovodish: {source}='fast' is not accepted: spin_us is a whole number from -1 to 1000000 (default -1)\n"
    )
    assert capsys.readouterr().err == expected


def test_an_unknown_variable_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVODISH_SPINUS", "3")
    assert main(["run", "-np", "1", "no-such-command"]) == 127
    assert "HOROVODISH_SPINUS is set, but there is no such setting. Did you mean HOROVODISH_SPIN_US?" in (
        capsys.readouterr().err
    )


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "no-such-command"]) == 127
    assert capsys.readouterr().err == "horovodish: no-such-command: command not found\n"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("python train.py", 127, "python train.py: command not found (leave the quotes around the whole command out)"),
        ("folder", 126, "folder is a folder: name a program in it, or start a script with python"),
    ],
)
def test_a_command_that_is_no_program(
    command: str,
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-np", "2", command]) == status
    assert capsys.readouterr().err == f"horovodish: {message}\n"


@pytest.mark.parametrize("flags", [[], ["-u", "-O"]])
def test_a_script_that_is_not_there(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", sys.executable, *flags, "no/train.py"]) == 127
    assert capsys.readouterr().err == "horovodish: there is no script no/train.py\n"


def test_only_what_is_certainly_a_script_must_be_there() -> None:
    for words in (
        ["python", "-m", "x"],
        ["python", "-c", "x"],
        ["python", "-X", "dev", "x"],
        ["python"],
        ["make", "x"],
    ):
        assert script_of(words) == ""
    assert script_of(["/env/bin/python3.11", "-u", "train.py", "-m"]) == "train.py"


@pytest.mark.parametrize("flag", ["--timeline-filename", "--autotune-log"])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no/x.json", "there is no folder {folder}/no"),
        ("", "that is a folder; name a file in it"),
        ("x.json", "no file can be made in the folder {folder}: Permission denied"),
    ],
)
def test_a_file_that_no_rank_could_write(
    flag: str,
    path: str,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(dir: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("horovodish.launcher.run.tempfile.TemporaryFile", refuse)  # root may write everywhere
    assert main(["run", "-np", "2", flag, f"{tmp_path}/{path}", "true"]) == 2
    assert capsys.readouterr().err == f"horovodish: {flag} {tmp_path}/{path}: {problem.format(folder=tmp_path)}\n"


def test_a_script_without_its_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    assert main(["run", "-np", "2", str(script)]) == 126
    assert capsys.readouterr().err == f"horovodish: {script} is not executable: start it with python {script}\n"


def test_settings_given_as_flags_reach_the_ranks(launch: Callable[..., Any]) -> None:
    code = "import os; print(os.environ['HOROVODISH_PLANE'])"
    job = launch("run", "-np", "2", "--plane", "mpi_ring", sys.executable, "-c", code)
    assert job.finish() == 0
    assert job.stdout.lines == ["mpi_ring", "mpi_ring"]


def test_verbose_shows_what_is_run(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "1", "--verbose", "true")
    assert job.finish() == 0
    assert any("libmpi" in line and "started by" in line for line in job.stderr.lines)
    assert any("-np 1" in line for line in job.stderr.lines)
    assert "horovodish: each rank runs: true" in job.stderr.lines
