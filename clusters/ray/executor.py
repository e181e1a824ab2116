"""`RayExecutor`: functions on ranks, each in the place of a Ray actor."""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovodish.errors import LaunchError, RankLostError
from horovodish.launcher.agents.meeting import Meeting
from horovodish.launcher.function import executable
from horovodish.launcher.function.call import Call, pickled
from horovodish.launcher.function.on_agents import agents_joined, ranks_of
from horovodish.launcher.function.ranks import Ranks
from horovodish.launcher.function.run_function import environment, options_of
from horovodish.launcher.job.environment import THREADS_VARIABLE
from horovodish.launcher.options import LaunchOptions
from horovodish.ray.actors import Actors, Promise

__all__ = ["RayExecutor", "RaySettings"]


@dataclass(frozen=True)
class RaySettings:
    """The result of `RayExecutor.create_settings()`.

    Attributes:
        timeout_s: how many seconds the actors may take to come up.
        placement_group_timeout_s: how many seconds Ray may take to reserve what they need.
        nics: network interfaces between the nodes; None: MPI's choice.
    """

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    nics: tuple[str, ...] | None = None


class RayExecutor:
    """Ranks in a Ray cluster. There is an actor for each rank. The rank runs on its node and sees the same GPUs.

    The ranks live from `start()` to `shutdown()`, so a function finds the objects that an earlier function has left in
    the memory of its rank. If a function raises on a rank, all ranks end. Call `shutdown()` and `start()` to get new
    ranks. Any thread may call the methods. One function runs at a time.

    Args:
        settings: the result of `create_settings()`.
        num_workers: number of ranks, which Ray packs on few nodes.
        num_hosts: number of nodes, each with `num_workers_per_host` ranks, instead of `num_workers`.
        num_workers_per_host: number of ranks on each node.
        cpus_per_worker: CPUs that Ray reserves for each rank, and its OMP_NUM_THREADS if that variable is not set.
        use_gpu: whether each rank has GPUs.
        gpus_per_worker: number of GPUs of a rank; None: one.
        use_current_placement_group: whether to use the placement group around this process, if there is one.
        min_workers: makes the executor elastic: a function continues while this many ranks are left. It trains with a
            state of `hvd.elastic`, and `run()` starts new ranks for each function.
        max_workers: largest number of ranks; None: `min_workers`. Ranks are added when Ray has room for their actors.
        reset_limit: how many times new processes may be started; None: no limit.
        cooldown_range: accepted, without effect.
        elastic_timeout: how many seconds to wait for room for `min_workers`.
        override_discovery: accepted, without effect: Ray's actors are the hosts.

    Raises:
        ValueError: the arguments contradict each other.

    Example:
        >>> from horovodish.ray import RayExecutor
        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)  # doctest: +SKIP
        >>> executor.start()  # doctest: +SKIP
        >>> accuracies = executor.run(train, args=(0.1,))  # doctest: +SKIP
        >>> executor.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers is not None and min_workers is None:
            raise ValueError("max_workers needs min_workers")
        if min_workers is not None and (num_workers is not None or num_hosts is not None):
            raise ValueError("min_workers replaces num_workers and num_hosts: leave these out")
        if max_workers is not None and max_workers < (min_workers or 0):
            raise ValueError(f"max_workers={max_workers} is less than min_workers={min_workers}")
        if min_workers is None and (num_workers is None) == (num_hosts is None):
            raise ValueError("RayExecutor needs num_workers or num_hosts, and not both")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        if use_gpu and gpus_per_worker is not None and gpus_per_worker <= 0:
            raise ValueError(f"gpus_per_worker must be more than 0, not {gpus_per_worker}")
        counts = (num_workers, num_hosts, num_workers_per_host, cpus_per_worker, min_workers)
        if min(count for count in counts if count is not None) < 1:
            raise ValueError("numbers of workers, hosts and CPUs are at least 1")
        self._settings = settings or RaySettings()
        self._np = max_workers or min_workers or num_workers or (num_hosts or 1) * num_workers_per_host
        self._elastic = {"min_np": min_workers, "max_np": self._np, "elastic_timeout": elastic_timeout}
        self._elastic["reset_limit"] = reset_limit
        self._is_elastic = min_workers is not None
        self._cpus = cpus_per_worker
        self._gpus = (gpus_per_worker or 1) if use_gpu else 0
        each = {"CPU": float(cpus_per_worker), **({"GPU": float(self._gpus)} if use_gpu else {})}
        per_bundle = num_workers_per_host if num_hosts else 1
        bundle = {name: amount * per_bundle for name, amount in each.items()}
        self._actors = Actors(
            [bundle] * (self._np // per_bundle),
            per_bundle,
            "" if self._is_elastic else "STRICT_SPREAD" if num_hosts else "PACK",
            {"num_cpus": cpus_per_worker, "num_gpus": self._gpus},
            use_current_placement_group,
        )
        self._opened = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._ended: Ranks | None = None  # the caller knows why these have ended
        self._meeting: Meeting | None = None
        self._options = LaunchOptions()
        self._environ: dict[str, str] = {}
        self._one_change = threading.RLock()  # held by start() and shutdown()
        self._one_call = threading.Lock()

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Iterable[str] | None = None,
    ) -> RaySettings:
        """Make the settings of an executor.

        Args:
            timeout_s: how many seconds the actors may take to come up.
            ssh_identity_file: accepted, without effect: there is no ssh.
            ssh_str: accepted, without effect.
            placement_group_timeout_s: how many seconds Ray may take to reserve what they need.
            nics: network interfaces between the nodes; None: MPI's choice.
        """
        return RaySettings(timeout_s, placement_group_timeout_s, tuple(nics) if nics else None)

    @property
    def num_workers(self) -> int:
        """The number of ranks."""
        return self._np

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Iterable[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Place the actors and start the ranks. Blocks until they wait for functions.

        Args:
            executable_cls: each rank makes an object of this class, for `execute()`.
            executable_args: its positional arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: variables that the ranks get in addition to this process's own.

        Raises:
            LaunchError: Ray has no room for the actors, or the ranks cannot be started.
            Exception: what the class raised on a rank.
        """
        environ = {THREADS_VARIABLE: str(self._cpus), **environment(extra_env_vars or {})}
        nics = self._settings.nics
        gpus = max(1, int(self._gpus)) if self._gpus else None
        flags: dict[str, Any] = self._elastic if self._is_elastic else {"num_proc": self._np}
        flags = {**flags, "gpus_per_rank": gpus, "network_interfaces": ",".join(nics) if nics else None}
        options = options_of(flags, environ)
        call = Call.of(executable.make, (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})))
        with self._one_change:
            if self._meeting:
                raise LaunchError("this RayExecutor was started already: call shutdown() first")
            self._environ, self._options = environ, options
            try:
                self._start(call)
            except BaseException:
                self.shutdown()
                raise

    def _start(self, call: Call) -> None:
        options, problem = self._options, self._actors.problem
        within = options.elastic_timeout if self._is_elastic else self._settings.timeout_s
        self._opened.callback(self._actors.end)
        self._actors.place(self._settings.placement_group_timeout_s)
        joined = agents_joined(options, self._actors.start, within_seconds=within, problem=problem)
        self._meeting = self._opened.enter_context(joined)
        if not self._is_elastic:
            self._ranks = self._opened.enter_context(ranks_of(self._meeting, options, self._environ, problem))
            self._call(call)

    def run(
        self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank. Blocks. The function calls `init()` itself.

        Returns:
            What it returned, by rank.

        Raises:
            Exception: what it raised on the rank that failed first, with the traceback it has there as its cause.
            RankLostError: a rank or an actor was lost, also since the call before.
            LaunchError: the ranks were not started, an earlier call has said why they have ended, or another thread has
                called `shutdown()`.
        """
        call = Call.of(fn, tuple(args or ()), dict(kwargs or {}))
        if not self._is_elastic:
            return self._call(call)
        with self._one_call:
            with self._one_change:
                if not self._meeting:
                    raise LaunchError(NOT_STARTED)
                ranks = ranks_of(self._meeting, self._options, self._environ, self._actors.problem)
                self._ranks = ranks
            with ranks:
                return self._answers(ranks, call, is_last=True)

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn(executable)` on every rank with the object of its class. Returns and raises as `run()`."""
        return self._call(Call.of(executable.use, (fn,)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 alone, and return what it returned. It cannot call collectives."""
        return self._call(Call.of(executable.use, (fn, 0)))[0]

    def run_remote(
        self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As `run()`, but do not wait: return a reference for each rank, for `ray.get()`.

        An elastic executor returns `max_workers` references. If fewer ranks are there at the end, the last give None.
        """
        # Each rank's result() waits in the actor, which ends when all of them have returned and nobody refers to it. It
        # runs on the node of this process, because any other node may be lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": self._np + 1, "scheduling_strategy": here}
        promise = ray.remote(Promise).options(**options).remote()

        def work() -> None:
            results: list[bytes] = []
            error: tuple[bytes, str] | None = None
            try:
                given = self.run(fn, args, kwargs)
                results = [pickled(result) for result in [*given, *[None] * (self._np - len(given))]]
            except BaseException as problem:
                error = _pickled_error(problem)
            if ray.is_initialized():
                promise.fulfil.remote(results, error)

        threading.Thread(target=work, name="horovodish-run-remote", daemon=True).start()
        return [promise.result.remote(rank) for rank in range(self._np)]

    def shutdown(self) -> None:
        """End the ranks, the actors and the placement group. Blocks until they have ended.

        A function that still runs ends with its rank, and `run()` raises LaunchError in the thread that has called it.
        """
        with self._one_change:
            ranks, self._ranks, self._meeting = self._ranks, None, None
            with self._opened:
                if ranks and not ranks.is_over and self._one_call.acquire(blocking=False):  # no function runs
                    try:
                        ranks.leave(within_seconds=LEAVE_SECONDS)
                    finally:
                        self._one_call.release()
                if ranks:
                    ranks.end()

    def _call(self, call: Call) -> list[Any]:
        with self._one_call:
            ranks = self._ranks
            if self._is_elastic and self._meeting:
                raise LaunchError("an elastic RayExecutor has run() alone")
            if not ranks:
                raise LaunchError(NOT_STARTED)
            if ranks is self._ended:
                raise LaunchError("the ranks have ended: call shutdown() and start() for new ones")
            try:
                return self._answers(ranks, call)
            finally:
                if ranks.is_over:
                    self._ended = ranks

    def _answers(self, ranks: Ranks, call: Call, *, is_last: bool = False) -> list[Any]:
        try:
            return ranks.call(call, is_last=is_last)
        except (LaunchError, RankLostError) as problem:
            if self._ranks is ranks:
                raise
            raise LaunchError("shutdown() was called before the function had returned on every rank") from problem


NOT_STARTED = "this RayExecutor has no ranks: call start() first"
LEAVE_SECONDS = 10.0
"""How long the ranks may take to end by themselves."""


def _pickled_error(error: BaseException) -> tuple[bytes, str]:
    """An exception as bytes, which are empty if they could not be loaded or would end who loads them; and its text."""
    text = "".join(traceback.format_exception_only(error)).strip()
    try:
        return (pickled(error) if isinstance(error, Exception) else b""), text
    except Exception:
        return b"", text
