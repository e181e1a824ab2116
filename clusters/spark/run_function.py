"""`horovodish.spark.run()`: a function on ranks, each in the place of a Spark task."""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pyspark import InheritableThread, SparkContext

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.agents.agent import last_line, run_agent
from horovodish.launcher.function.call import Call
from horovodish.launcher.function.on_agents import agents_joined, ranks_of
from horovodish.launcher.function.run_function import environment, options_of
from horovodish.launcher.job.output import say

__all__ = ["run"]

T = TypeVar("T")

TIMEOUT_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"
USUAL_TIMEOUT_SECONDS = 600


def run(
    fn: Callable[..., T],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on ranks in the cluster of the active SparkContext. Blocks until they have ended.

    Meanwhile a Spark job runs with one task for each rank. The rank runs on the machine of its task, and sees the same
    GPUs. The machines need no ssh and no shared folder, but the same Python environment at the same place.

    Args:
        fn: the function that each rank calls. It calls `init()` itself.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; None: `spark.default.parallelism`.
        start_timeout: how many seconds the tasks may take to start; None: HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: accepted; MPI is always used.
        use_gloo: accepted, without effect.
        extra_mpi_args: more arguments for mpirun.
        env: variables that the ranks get in addition to this process's own.
        stdout: an object with `write(text)` that gets the output of the ranks, instead of `sys.stdout`.
        stderr: likewise, instead of `sys.stderr`.
        verbose: 2 or more: print how the ranks are started.
        nics: network interfaces between the machines.
        prefix_output_with_timestamp: begin each line of output with the time and its rank.
        executable: accepted, without effect: the ranks run the Python of this process.

    Returns:
        The results of the function, by rank.

    Raises:
        Exception: the exception of the function on the rank that failed first, with its traceback there as its cause.
        RankLostError: a rank or a task was lost before the function returned.
        SettingError: an argument or a variable has a value that is not accepted.
        LaunchError: there is no SparkContext, or not all tasks have started in time.

    Example:
        >>> import horovodish.spark
        >>> horovodish.spark.run(train, args=(0.5,), num_proc=2)  # doctest: +SKIP
        [0.0, 0.5]
    """
    context = SparkContext._active_spark_context
    if context is None:
        raise LaunchError("horovodish.spark.run() needs a SparkContext: SparkSession.builder.getOrCreate() makes one")
    timeout = _timeout() if start_timeout is None else start_timeout
    environ = environment(env or {})
    options = options_of(
        {
            "num_proc": context.defaultParallelism if num_proc is None else num_proc,
            "use_mpi": use_mpi,
            "use_gloo": use_gloo,
            "mpi_args": extra_mpi_args,
            "verbose": verbose > 1,
            "network_interfaces": ",".join(nics) if nics else None,
            "prefix_output_with_timestamp": prefix_output_with_timestamp,
        },
        environ,
    )
    call = Call.of(fn, tuple(args), dict(kwargs or {}))
    tasks = _Tasks(context, options.np)
    files = {"stdout": stdout, "stderr": stderr}
    with (
        tasks.ended_after(),
        agents_joined(options, tasks.start, within_seconds=timeout, problem=tasks.problem) as meeting,
        ranks_of(meeting, options, environ, tasks.problem, files) as ranks,
    ):
        return ranks.call(call, is_last=True)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(USUAL_TIMEOUT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"{TIMEOUT_VARIABLE}={text!r} is not a number of seconds") from None


class _Tasks:
    """The tasks of a Spark job. An agent runs in each of them."""

    def __init__(self, context: SparkContext, count: int) -> None:
        self._context = context
        self._count = count
        self._group = f"horovodish-{secrets.token_hex(4)}"
        self._failure = ""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def ended_after(self) -> Iterator[None]:
        """A context at whose end the job is cancelled, unless its tasks have ended. Says so if the job does not end."""
        try:
            yield
        finally:
            if self._thread:
                self._thread.join(LEAVE_SECONDS)
                gives_up_at = time.monotonic() + LEAVE_SECONDS
                while self._thread.is_alive() and time.monotonic() < gives_up_at:
                    with contextlib.suppress(Exception):  # another thread may have stopped the context
                        self._context.cancelJobGroup(self._group)  # a job that Spark does not know yet goes on
                    self._thread.join(CANCEL_SECONDS)
                if self._thread.is_alive():
                    say(
                        f"warning: Spark has not ended the job of {self._count} ranks, whose tasks may keep their slots"
                    )

    def start(self, contact: str) -> None:
        count, context = self._count, self._context

        def work() -> None:
            context.setJobGroup(self._group, f"horovodish: {count} ranks", interruptOnCancel=True)
            try:
                numbers = context.parallelize(range(count), count)
                ends: Sequence[str] = numbers.mapPartitions(lambda part: _agents(part, contact)).collect()
                ended = (f"the agent of task {number} has ended: {why}" for number, why in enumerate(ends) if why)
                self._failure = next(ended, "")
            except Exception as problem:
                self._failure = f"the Spark job has failed: {last_line(str(problem))}"

        self._thread = InheritableThread(target=work, daemon=True)
        self._thread.start()

    def problem(self, within_seconds: float) -> str:
        """Why the job has ended; nothing if it has not."""
        assert self._thread
        self._thread.join(within_seconds)
        return "" if self._thread.is_alive() else self._failure or "the Spark job has ended"


LEAVE_SECONDS = 10.0
"""How long the tasks may take to end when their agents are told to leave, and as long again when they are cancelled."""
CANCEL_SECONDS = 0.5
"""How often to cancel the job."""


def _agents(numbers: Iterator[int], contact: str) -> Iterator[str]:
    """The work of a task: runs an agent. Returns why the agent has ended; empty if it was told to."""
    for number in numbers:
        yield run_agent(contact, number)
