"""The actors of a `RayExecutor`: in each runs an agent."""

import asyncio
import contextlib
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovodish.errors import LaunchError
from horovodish.launcher.agents.agent import last_line, run_agent


class Worker:
    """Runs an agent."""

    def serve(self, contact: str, number: int, starts_again: bool) -> str:
        """Returns why the agent has ended; nothing if it was told to."""
        return run_agent(contact, number, starts_again=starts_again)


class Promise:
    """Gives what the driver will know later to whoever asks. It holds bytes: only who asks needs the modules."""

    def __init__(self) -> None:
        self._known = asyncio.Event()
        self._results: list[bytes] = []
        self._error: tuple[bytes, str] | None = None

    def fulfil(self, results: list[bytes], error: tuple[bytes, str] | None) -> None:
        """Takes a pickled result for each rank, or a pickled exception and its text."""
        self._results, self._error = results, error
        self._known.set()

    async def result(self, rank: int) -> Any:
        await self._known.wait()
        if self._error is None:
            return _Pickled(self._results[rank])
        try:
            error = pickle.loads(self._error[0])
        except Exception:  # a class of the driver alone
            error = LaunchError(self._error[1])
        raise error


class _Pickled:
    """Is pickled as the value that it holds."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._value,)


class Actors:
    """A `Worker` for each rank.

    Args:
        resources: of each bundle of the placement group.
        per_bundle: how many actors each bundle has.
        strategy: of the placement group; empty without one: then each actor begins when Ray has room for it, and Ray
            starts it again when it dies. The actor starts its agent again.
        of_actor: the options of an actor that name its resources.
        uses_current_group: whether to use the placement group around this process, if there is one.
    """

    def __init__(
        self,
        resources: Sequence[dict[str, float]],
        per_bundle: int,
        strategy: str,
        of_actor: Mapping[str, float],
        uses_current_group: bool,
    ) -> None:
        self._resources = list(resources)
        self._per_bundle = per_bundle
        self._strategy = strategy
        self._of_actor: dict[str, Any] = dict(of_actor)
        self._uses_current_group = uses_current_group
        self._own_group: PlacementGroup | None = None
        self._handles: list[Any] = []
        self._ends: list[Any] = []

    def place(self, within_seconds: float) -> None:
        """Reserves the resources and makes the actors.

        Raises:
            LaunchError: the cluster has not got them within that time.
        """
        if not self._strategy:
            again = {"max_restarts": -1, "max_task_retries": -1}
            self._handles = [ray.remote(Worker).options(**again, **self._of_actor).remote() for _ in self._resources]
            return
        group = get_current_placement_group() if self._uses_current_group else None
        if group is None:
            group = self._own_group = placement_group(self._resources, strategy=self._strategy)
            if not group.wait(within_seconds):
                wanted = _in_words(self._resources, self._strategy)
                there = ", ".join(f"{name} {ray.available_resources().get(name, 0):g}" for name in self._resources[0])
                raise LaunchError(
                    f"Ray has not placed {wanted} within {within_seconds:g} s; the cluster has {there} free. Ask for "
                    "less, add nodes, or give it more time: RayExecutor.create_settings(placement_group_timeout_s=N)"
                )
        for number in range(len(self._resources) * self._per_bundle):
            bundle = number // self._per_bundle if self._own_group else -1
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            self._handles.append(ray.remote(Worker).options(scheduling_strategy=where, **self._of_actor).remote())

    def start(self, contact: str) -> None:
        """Starts the agents."""
        self._ends = [each.serve.remote(contact, n, not self._strategy) for n, each in enumerate(self._handles)]

    def problem(self, within_seconds: float) -> str:
        """Which actor has failed and why; nothing if none has."""
        if not ray.is_initialized():  # Ray's functions would start it anew
            return "ray.shutdown() has ended the actors"
        ended, _ = ray.wait(self._ends, timeout=within_seconds)
        for end in ended:
            number = self._ends.index(end)
            try:
                return f"the agent of actor {number} has ended: {ray.get(end)}"
            except Exception as problem:
                found = re.search(r"\bpid: (\d+)(?:.*\n)*?.*\bip: (\S+)", str(problem))
                place = f" (process {found[1]} on {found[2]})" if found else ""
                why = last_line(str(problem)).partition(" Some common causes include: ")[0]
                return f"actor {number}{place} has failed: {why}"
        return ""

    def end(self) -> None:
        """Waits for the agents, which were told to leave, and removes the actors and the placement group."""
        handles, ends, group = self._handles, self._ends, self._own_group
        self._handles, self._ends, self._own_group = [], [], None
        if not ray.is_initialized():  # they have ended with it, and Ray's functions would start it anew
            return
        if ends:
            # Actors without a placement group may never have begun.
            within = LEAVE_SECONDS if self._strategy else LEAVE_UNPLACED_SECONDS
            ray.wait(ends, num_returns=len(ends), timeout=within)
        for each in handles:
            ray.kill(each)
        if group:
            remove_placement_group(group)
            gives_up_at = time.monotonic() + LEAVE_SECONDS
            while _is_there(group) and time.monotonic() < gives_up_at:
                time.sleep(0.05)


LEAVE_UNPLACED_SECONDS = 2.0
LEAVE_SECONDS = 10.0
"""How long agents may take to end when they are told to leave, and Ray to free what they have used."""


def _is_there(group: PlacementGroup) -> bool:
    with contextlib.suppress(Exception):  # Ray has another way to say that it is gone in each release
        return bool(ray.util.placement_group_table(group).get("state") != "REMOVED")
    return False


def _in_words(resources: Sequence[dict[str, float]], strategy: str) -> str:
    each = ", ".join(f"{name} {amount:g}" for name, amount in resources[0].items())
    what = f"{len(resources)} {'bundle' if len(resources) == 1 else 'bundles'} of {each}"
    return f"{what} on as many nodes" if strategy == "STRICT_SPREAD" else what
