"""Scripts that use horovodish and end in one way or another: the interpreter always does, and so does the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

ENDS_WITHIN_SECONDS = 40
PLANES = ["auto", "mpi_ring"]
PRELUDE = """
import atexit, threading, time
import numpy as np
import horovodish as hvd
hvd.init()
rank = hvd.rank()
hvd.allreduce(np.zeros(3), name="that works")
print("ready")
"""

FINE = {
    "without shutdown": "",
    "with something pending": "hvd.allreduce_async(np.zeros(3), name=f'of rank {rank} alone')",
    "in the middle of a reduction": "hvd.allreduce_async(np.zeros(20_000_000), name='large')",
    "with something that fails while programs end": """
from horovodish.runtime import basics
def finish():
    while not basics.engine().failures(): pass
if rank == 0: basics.follow(finish=finish)
hvd.allreduce_async(np.zeros(3), name=f"of rank {rank} alone")
if rank == 1: time.sleep(1); hvd.shutdown()
""",
    "with handles kept": "kept = [hvd.allreduce_async(np.zeros(3), name=f'{rank} {i}') for i in 'ab']; kept += [kept]",
    "with threads that wait": """
def wait(number):
    hvd.allreduce(np.zeros(3), name=f"{number} of rank {rank} alone")
for number in range(6):
    threading.Thread(target=wait, args=(number,), daemon=True).start()
""",
    "with a failing atexit function": "atexit.register(lambda: 1 / 0)",
    "with sys.exit in an atexit function": "atexit.register(sys.exit, 3)",
    "with a collective in an atexit function": "atexit.register(lambda: print(hvd.allreduce(np.ones(2), op=hvd.Sum)))",
    "one after the other": "if rank == 0: hvd.barrier()\nelse: hvd.barrier(); hvd.shutdown()",
    "with shutdown on one rank": """
if rank == 1:
    hvd.shutdown()
else:
    try:
        hvd.barrier()
    except hvd.RankLostError as error:
        assert "rank 1 called shutdown()" in str(error)
    else:
        sys.exit("no error")
""",
}


TRAINS_MEANWHILE = """
import atexit, threading, time
atexit.register(time.sleep, 0.5)
import numpy as np
import horovodish as hvd
from horovodish import _native
from horovodish.runtime import basics
hvd.init()
gradient = np.ones(9, np.float32)
members = [("gradient", _native.DTYPES["float32"], [9], 0)]
plan = basics.engine().plan("plan", hvd.Sum, 1.0, 1.0, members, [-1], 0)
begun = threading.Event()
def train():
    while True:
        plan.submit(0, gradient.ctypes.data, gradient.ctypes.data)
        assert plan.wait(60)
        plan.reset()
        begun.set()
        time.sleep(0.01)
threading.Thread(target=train, daemon=True).start()
begun.wait()
"""


def test_a_thread_that_trains_meanwhile_ends_quietly(launch_ranks: Callable[..., Any]) -> None:
    """Python goes on for a while, with what was to be done at the exit before horovodish was there."""
    job = launch_ranks(1, TRAINS_MEANWHILE, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines
    assert not any("Error" in line for line in job.stderr.lines), job.stderr.lines


@pytest.mark.parametrize("ending", FINE)
def test_a_script_that_does_not_fail_ends(launch_ranks: Callable[..., Any], ending: str) -> None:
    plane = PLANES[list(FINE).index(ending) % 2]
    job = launch_ranks(2, PRELUDE + FINE[ending], mpi=False, env={"HOROVODISH_PLANE": plane})
    job.stdout.wait_for("ready", 2)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines
    assert ("[2. 2.]" in job.stdout.lines) == ("collective" in ending)


def test_the_middle_of_a_reduction_over_mpi_ends(launch_ranks: Callable[..., Any]) -> None:
    code = PRELUDE + "hvd.allreduce_async(np.zeros(20_000_000), name='large')\nif rank == 1: hvd.shutdown()"
    job = launch_ranks(3, code, mpi=False, env={"HOROVODISH_PLANE": "mpi_ring"})
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines


@pytest.mark.parametrize(
    ("what_rank_1_does", "status", "last_words"),
    [
        ("sys.exit()", 1, "rank 1 has ended its script"),
        ("sys.exit(5)", 5, "rank 1 on .* failed with exit status 5"),
        ("raise ValueError('a reason of its own')", 1, "rank 1 on .* ValueError: a reason of its own"),
        ("os._exit(6)", 6, "rank 1 on .* failed with exit status 6"),
    ],
)
def test_one_rank_ends_while_the_others_wait(
    launch_ranks: Callable[..., Any], what_rank_1_does: str, status: int, last_words: str
) -> None:
    code = f"hvd.barrier()\nif rank == 1: {what_rank_1_does}\nhvd.allreduce(np.zeros(3), name='needs rank 1')"
    job = launch_ranks(3, PRELUDE + code, mpi=False)
    job.stdout.wait_for("ready", 3)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == status
    assert re.search(last_words, job.stderr.lines[-1]), job.stderr.lines


@pytest.mark.parametrize("message", ["chr(0x1F525) * 9_000", "chr(0) * 12_000", "'x' * 100_000"])
def test_an_exception_is_shown_with_its_place_however_long_its_message(
    launch_ranks: Callable[..., Any], message: str
) -> None:
    code = f"if rank == 1: raise ValueError({message})\nhvd.barrier()"
    job = launch_ranks(2, PRELUDE + code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    assert "Traceback (most recent call last):" in job.stderr.lines
    assert any("in <module>" in line for line in job.stderr.lines)
    assert re.match("horovodish: rank 1 on .* failed with exit status 1: ValueError: ", job.stderr.lines[-1])


def test_an_exception_about_a_file_name_that_is_not_utf_8_is_told_to_all(launch_ranks: Callable[..., Any]) -> None:
    code = "if rank == 1: raise ValueError(os.fsdecode(b'/data/caf\\xe9.jpg'))\nhvd.barrier()"
    job = launch_ranks(2, PRELUDE + code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    told = "ValueError: /data/caf\\udce9.jpg"
    assert any(line.endswith(f"rank 1 raised {told}") for line in job.stderr.lines), "to rank 0"
    assert told in job.stderr.lines, "in the traceback"
    assert job.stderr.lines[-1].endswith(told)
    assert not any("TypeError" in line for line in job.stderr.lines)
