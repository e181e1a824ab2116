"""`horovodish.run()`: functions go to real ranks, and what becomes of them comes back."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import horovodish as hvd
from horovodish.errors import LaunchError, RankLostError
from horovodish.launcher.function.call import Call, Report
from horovodish.launcher.function.exchange import Exchange
from horovodish.launcher.function.ranks import Ranks, RankTraceback, results
from horovodish.launcher.function.run_function import options_of
from support.processes import wait_until

ENDS_WITHIN_SECONDS = 30


class OutOfRangeError(ValueError):
    """Only this file knows it, as only a notebook knows its own."""


class TwoArgumentsError(Exception):
    """Can be pickled, but not be loaded, as many exceptions of this kind."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


@pytest.fixture(autouse=True)
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file's functions travel by value, as those of `__main__` do, and nothing stays behind."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)
    assert list(place.iterdir()) == []


def test_results_come_by_rank_and_output_appears_here(capsys: pytest.CaptureFixture[str]) -> None:
    factor = 3  # of the closure

    def train(first: int, *, second: int) -> dict[str, Any]:
        hvd.init()
        print(f"rank {hvd.rank()} prints é")
        print("and complains", file=sys.stderr)
        return {
            "rank": hvd.rank(),
            "sum": hvd.allreduce(np.array([first, second, factor]), op=hvd.Sum).tolist(),
            "knobs": [os.environ[name] for name in ("HOROVODISH_SPIN_US", "HOROVODISH_AUTOTUNE", "OF_THE_TEST")],
        }

    results = hvd.run(
        train,
        (1,),
        {"second": 2},
        num_proc=3,
        env={"OF_THE_TEST": "x y"},
        spin_us=7,
        autotune=False,
        verbose=2,
        use_mpi=True,
    )
    assert [result["rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert result["sum"] == [3, 6, 9]
        assert result["knobs"] == ["7", "0", "x y"]
    told = capsys.readouterr()
    assert sorted(told.out.splitlines()) == [f"rank {rank} prints é" for rank in range(3)]
    assert told.err.splitlines().count("and complains") == 3
    assert "started by" in told.err


class Collected:
    """Stands for stdout in some programs, though it has no `flush()`."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_stdout_can_be_whatever_python_programs_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_file, collected = io.TextIOWrapper(io.BytesIO(), encoding="ascii"), Collected()
    for stdout in (None, ascii_file, collected):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert hvd.run(lambda: print("é")) == [None]
    assert ascii_file.buffer.getvalue() == b"?\n"
    assert collected.text == "é\n"


def test_an_exception_is_raised_again_with_its_traceback_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def deeper() -> None:
        raise OutOfRangeError("7 is too much", 7)

    def train() -> None:
        hvd.init()
        if hvd.rank() == 1:
            deeper()
        hvd.barrier()

    with pytest.raises(OutOfRangeError) as raised:
        hvd.run(train, num_proc=2)
    assert raised.value.args == ("7 is too much", 7)
    cause = raised.value.__cause__
    assert isinstance(cause, RankTraceback)
    text = str(cause)
    assert text.startswith("rank 1 on ")
    assert "in train" in text
    assert 'raise OutOfRangeError("7 is too much", 7)' in text
    assert "function_rank" not in text
    assert "rank 1 raised OutOfRangeError" in capsys.readouterr().err, "the other rank was told"


def ends(how: str) -> Any:
    if how == "sys.exit":
        sys.exit(3)
    if how == "ends well":
        sys.exit()
    if how == "os._exit":
        os._exit(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise TwoArgumentsError("fire", "sea")
    if how == "a lock":
        return threading.Lock()
    return OfTheRanksAlone()


class OfTheRanksAlone:
    """Can be pickled by a rank, but not be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("sys.exit", hvd.RankLostError, "raised SystemExit: 3"),
        ("ends well", hvd.RankLostError, r"SystemExit: 0\. The function must return instead of calling sys\.exit"),
        ("os._exit", hvd.RankLostError, "rank 0 ended before the function returned"),
        ("SIGKILL", hvd.RankLostError, r"rank 0 on .* was killed by signal 9 \(SIGKILL\)"),
        ("raises", hvd.RankLostError, "raised TwoArgumentsError: fire at sea"),
        ("a lock", TypeError, "the function returned a lock that cannot be pickled: cannot pickle '_thread.lock'"),
        ("a mystery", TypeError, "what rank 0 returned cannot be loaded here: invalid literal"),
    ],
)
def test_a_rank_that_brings_nothing_back(how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hvd.run(ends, (how,))


def test_a_function_whose_module_the_ranks_do_not_find() -> None:
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    try:
        with pytest.raises(TypeError, match="the function cannot be loaded: ModuleNotFoundError: No module named"):
            hvd.run(ends, ("never",))
    finally:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_rank_that_does_not_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        contact = f"{'0' * 64} {closed.getsockname()[1]} 127.0.0.1"
    monkeypatch.setattr(Exchange, "contact", property(lambda _: contact, lambda *_: None), raising=False)
    with pytest.raises(hvd.LaunchError, match=r"rank \d on .* cannot reach the caller of horovodish.run\(\): port"):
        hvd.run(ends, ("never",), num_proc=2)


def test_ranks_that_nobody_wants_before_their_launcher_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = threading.Event()
    start = Ranks._started

    def late(self: Ranks, file: int) -> Any:
        may_begin.wait(ENDS_WITHIN_SECONDS)
        return start(self, file)

    monkeypatch.setattr(Ranks, "_started", late)
    ranks = Ranks(options_of({"num_proc": 1}, os.environ), os.environ)
    leaving = threading.Thread(target=lambda: ranks.__exit__(None, None, None), daemon=True)
    leaving.start()
    wait_until(lambda: bool(ranks._awaits_launcher))
    may_begin.set()
    leaving.join(ENDS_WITHIN_SECONDS)
    assert ranks.is_over


def test_from_a_thread_that_is_not_the_first() -> None:
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(hvd.run(lambda: 5)))
    thread.start()
    thread.join()
    assert results == [[5]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"func": 3}, TypeError, "takes a function, not 3"),
        ({"args": (threading.Lock(),)}, TypeError, r"ends and its arguments cannot be pickled for the ranks: cannot"),
        ({"num_proc": 0}, hvd.SettingError, "argument -np/--num-proc: '0' is not a number of ranks"),
        ({"num_proc": "two"}, hvd.SettingError, "'two' is not a number of ranks"),
        ({"fusion_treshold_mb": 3}, TypeError, "no argument fusion_treshold_mb; did you mean fusion_threshold_mb?"),
        ({"spin_us": "fast"}, hvd.SettingError, "--spin-us='fast' is not accepted: spin_us is a whole number from -1"),
        ({"verbose": "very"}, TypeError, "verbose is True or False, not 'very'"),
        ({"autotune": 7}, TypeError, "autotune is True or False, not 7"),
        ({"use_mpi": "yes"}, TypeError, "use_mpi is True or False, not 'yes'"),
        ({"min_np": 1}, hvd.LaunchError, "cannot lose ranks. For elastic training start a script"),
        ({"check": True}, TypeError, "has no argument check"),
        ({"config_file": "x.yaml"}, TypeError, "takes no config_file; pass its settings as arguments"),
        ({"env": {"A": 3}}, TypeError, "env has 'A': 3, but variables are text"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refusal:
        hvd.run(**{"func": ends, "args": ("never",), **arguments})
    assert message in str(refusal.value)


def test_a_rank_cannot_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVODISH_NP", "2")
    with pytest.raises(hvd.LaunchError, match=r"run\(\) was called by a rank"):
        hvd.run(ends)


def test_what_the_launcher_said_last_tells_which_error_it_is() -> None:
    with pytest.raises(RankLostError, match="ranks 2-3 on beta vanished"):
        results([], 4, 1, ["ranks 2-3 on beta vanished: somebody killed their supervisors"])
    with pytest.raises(RankLostError, match="the agent on beta has gone: it got SIGTERM"):
        results([], 4, 1, ["the agent on beta has gone: it got SIGTERM"])
    with pytest.raises(LaunchError, match="cannot be reached"):
        results([], 4, 1, ["beta cannot be reached"])
    reports = [Report(0, "here", 0, 1.0, error="SystemExit: 0")]
    with pytest.raises(RankLostError, match="rank 0 on here raised SystemExit: 0"):
        results(reports, 1, 0, ["1 rank on 2 cores: OMP_NUM_THREADS=2; set it to choose another number"])


def trains_until(folder: str, size: int) -> tuple[int, int]:
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while hvd.size() != size:
            hvd.barrier()
            Path(folder, f"{hvd.size()}.size").touch()
            state.commit()

    train(hvd.elastic.ObjectState())
    return hvd.rank(), hvd.size()


def test_a_rank_that_was_told_to_leave_has_no_result(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=3")
    options = options_of({"min_np": 1, "max_np": 3, "hostfile": str(hostfile)}, os.environ)
    found: list[Any] = []
    with Ranks(options, os.environ) as ranks:
        call = Call.of(trains_until, (str(tmp_path), 2))
        caller = threading.Thread(target=lambda: found.append(ranks.call(call, is_last=True)))
        caller.start()
        wait_until((tmp_path / "3.size").exists)
        hostfile.write_text("localhost slots=2")
        caller.join()
    assert found == [[(0, 2), (1, 2)]]


def test_an_exit_status_of_its_own_is_no_order() -> None:
    def leaves() -> None:
        hvd.init()
        sys.exit(75)

    options = options_of({"min_np": 1, "max_np": 1, "hosts": "localhost:1"}, os.environ)
    with (
        Ranks(options, os.environ) as ranks,
        pytest.raises(RankLostError, match=r"rank 0 on .* failed with exit status 75"),
    ):
        ranks.call(Call.of(leaves), is_last=True)


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(hvd.LaunchError, match="needs cloudpickle; install it: pip install cloudpickle"):
        hvd.run(ends)


def test_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no/libmpi.so")
    with pytest.raises(hvd.LaunchError, match="mpi4py finds no MPI library that works"):
        hvd.run(ends)


SCRIPT = """
import sys
import horovodish

class Weights:
    def __init__(self, value):
        self.value = value

def train(start):
    horovodish.init()
    return Weights(start + horovodish.rank())

weights = horovodish.run(train, args=(5,), num_proc=2)
print([type(each) is Weights for each in weights], [each.value for each in weights])
print(horovodish.run(lambda: horovodish.is_initialized()))
"""


@pytest.mark.parametrize("how", ["file", "stdin", "-i"])
def test_scripts_need_no_guard(how: str, start: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = {"file": [str(script)], "stdin": ["-"], "-i": ["-i", "-q"]}[how]
    job = start(sys.executable, *arguments, stdin=SCRIPT if how in ("stdin", "-i") else "")
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == ["[True, True] [5, 6]", "[False]"]


WAITS = """
import signal, sys
import horovodish

def wait():
    print("ready")
    signal.pause()

try:
    horovodish.run(wait, num_proc=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_the_ranks(start: Callable[..., Any], tmp_path: Path) -> None:
    job = start(sys.executable, "-c", WAITS, env={"TMPDIR": str(tmp_path)})
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0
    assert job.stdout.lines == ["ready", "ready", "interrupted"]


def test_a_killed_caller_leaves_nothing_behind(start: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # where a socket has a short enough name
        job = start(sys.executable, "-c", WAITS, env={"TMPDIR": place})
        job.stdout.wait_for("ready", 2)
        assert os.listdir(place)
        job.process.kill()
        assert job.finish(within=ENDS_WITHIN_SECONDS) == -signal.SIGKILL
        assert os.listdir(place) == []


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("there is no text")


class BecomesTextError(Exception):
    """Is something else after its journey."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("a text",)


@pytest.mark.parametrize(
    ("error", "text"),
    [(WithoutTextError, "WithoutTextError: <exception str() failed>"), (BecomesTextError, "BecomesTextError: x")],
)
def test_exceptions_that_cannot_be_told_or_raised(error: type[Exception], text: str) -> None:
    def train() -> None:
        raise error("x")

    with pytest.raises((RankLostError, error)) as raised:
        hvd.run(train)
    assert raised.type is error or text in str(raised.value)
    assert text in str(raised.value.__cause__)


def test_a_rank_that_has_closed_its_link_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankLostError, match=r"rank 0 on .* failed with exit status 1"):
        hvd.run(lambda: os.closerange(3, 256))
    assert "Bad file descriptor" in capsys.readouterr().err


@pytest.mark.parametrize("raises", [False, True])
def test_a_forked_process_of_a_rank_does_not_answer_in_its_place(raises: bool) -> None:
    def forks() -> str:
        child = os.fork()
        if child == 0:
            if raises:
                raise ValueError("of the child")
            return "child"
        os.waitpid(child, 0)
        return "rank"

    with Ranks(options_of({"num_proc": 2}, os.environ), os.environ) as ranks:
        assert ranks.call(Call.of(forks)) == ["rank"] * 2
        assert ranks.call(Call.of(lambda: "next")) == ["next"] * 2


def test_a_rank_is_killed_between_two_calls() -> None:
    with Ranks(options_of({"num_proc": 2}, os.environ), os.environ) as ranks:
        os.kill(ranks.call(Call.of(os.getpid))[1], signal.SIGKILL)
        wait_until(lambda: ranks.is_over)
        with pytest.raises(RankLostError, match=r"rank 1 on .* was killed by signal 9"):
            ranks.call(Call.of(os.getpid))


def test_a_rank_ends_between_two_calls() -> None:
    with Ranks(options_of({"num_proc": 1}, os.environ), os.environ) as ranks:
        ranks.call(Call.of(lambda: threading.Timer(0.1, os._exit, [0]).start()))
        wait_until(lambda: ranks.is_over)
        with pytest.raises(RankLostError, match="rank 0 ended before the function returned"):
            ranks.call(Call.of(os.getpid))
