"""What all tests share."""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support.orphans import mark_of_this_process
from support.ranks import let_idle_ranks_leave
from support.sources import ROOT, STARTUP
from support.startup import sitecustomize  # noqa: F401  (for this process)

TESTS = Path(__file__).parent

# `python -m pytest` puts the checkout there, and `tests`, `launcher` and the like would be modules, in the ranks, too.
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT]

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))

# A rank of JAX takes a program that another one has compiled, unless it reads while that one writes, which it warns of.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# LLVM's optimizations take a third of what it costs to compile a program, and change no result.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent,ignore:Error writing persistent"

# Only ranks import it, which starts MPI: without mpirun, Open MPI leaves 16 MiB in /dev/shm behind, finalized or not.
sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "without times", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without times")


DRAWN = (
    *("faults", "frameworks", "hosts", "parallel"),
    *("launcher/elastic", "launcher/function", "launcher/job", "launcher/test_mistakes"),
)
"""Where cases cost processes. `make test` runs a sixth of a test's cases, drawn by names; `make soak`, the rest."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        is_soak = item.get_closest_marker("soak") is not None
        if not is_soak and os.path.relpath(item.path, TESTS).startswith(DRAWN):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        of_one.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in of_one[(len(of_one) + 5) // 6 :]:
            item.add_marker(pytest.mark.soak)


def pytest_sessionstart() -> None:
    """What the tests start ends with this process, even if it is killed."""
    mark_of_this_process()


@pytest.fixture(scope="session", autouse=True)
def ranks_leave() -> Iterator[None]:
    """The ranks that have served several tests end by themselves, and nothing stays behind."""
    yield
    let_idle_ranks_leave()
