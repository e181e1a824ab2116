"""Compiled programs whose collectives cannot come to an end: one error on every rank that waits, and no hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import horovodish
import horovodish.jax as hvd
from support.ranks import run_ranks, run_ranks_to_their_ends
from support.scripts import output_of

# The class depends on whether the program fails while JAX dispatches it.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

STALLS = {
    "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5",
    "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "2",
}


def take_a_branch_alone() -> str:
    hvd.init()
    program = jax.jit(lambda flag, x: lax.cond(flag, lambda x: hvd.allreduce(x, name="branch"), lambda x: x, x))
    program(True, jnp.ones(3)).block_until_ready()
    # Compiling takes one rank longer than another; the limit is for what comes after it.
    hvd.shutdown()
    os.environ.update(STALLS)
    hvd.init()
    if hvd.rank() == 0:
        with pytest.raises(FAILED) as in_jit:
            program(True, jnp.ones(3)).block_until_ready()
        return str(in_jit.value)
    program(False, jnp.ones(3)).block_until_ready()
    with pytest.raises(hvd.StallError) as outside:
        hvd.allreduce(jnp.ones(1), name="after")
    return str(outside.value)


def test_a_branch_that_only_some_ranks_take() -> None:
    inside, outside = run_ranks_to_their_ends(take_a_branch_alone, 2)
    assert inside.ended == outside.ended == "returned", inside.output + outside.output
    assert "DEADLINE_EXCEEDED: allreduce 'branch' failed on rank 0" in inside.result
    for text in (inside.result, outside.result):
        assert "'branch' was submitted by rank 0 but not by rank 1" in text


def lose_a_rank() -> str:
    hvd.init()
    program = jax.jit(lambda x: hvd.allreduce([x, x * 2], name="needed"))
    jax.block_until_ready(program(jnp.ones(3)))
    if hvd.rank() == 1:
        raise ZeroDivisionError("division by zero")
    with pytest.raises(FAILED) as raised:
        jax.block_until_ready(program(jnp.ones(3)))
    return str(raised.value)


def test_a_rank_that_is_lost() -> None:
    here, lost = run_ranks_to_their_ends(lose_a_rank, 2)
    assert (lost.ended, lost.error_class) == ("raised", "ZeroDivisionError"), lost.output
    assert here.ended == "returned", here.output
    for part in ("UNAVAILABLE: allreduce of 'needed[", "rank 1 raised ZeroDivisionError: division by zero"):
        assert part in here.result


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fail_again_and_again() -> int:
    hvd.init()
    # The last leaf is in the first bucket: where that fails, nobody asks for the results of the others.
    tree = [jnp.ones(1_500_000) for _ in range(6)] + [jnp.ones(3 + hvd.rank())]
    program = jax.jit(lambda tree: hvd.allreduce(tree, name="tree"))
    for attempt in range(14):
        with pytest.raises(FAILED, match="the ranks disagree about its shape"):
            jax.block_until_ready(program(tree))
        hvd.barrier()  # programs may fail faster than their other leaves are reduced
        if attempt == 1:
            before = resident_bytes()
    return resident_bytes() - before


def fail_before_another_tree() -> int:
    hvd.init()
    tree = [jnp.ones(1_500_000) for _ in range(6)]

    @jax.jit
    def program(wrong: jax.Array, tree: list[jax.Array]) -> Any:
        return hvd.allreduce(wrong, name="wrong"), hvd.allreduce(tree, name="tree")

    for attempt in range(14):
        with pytest.raises(FAILED, match="the ranks disagree about its shape"):
            jax.block_until_ready(program(jnp.ones(3 + hvd.rank()), tree))
        hvd.barrier()
        if attempt == 1:
            before = resident_bytes()
    return resident_bytes() - before


@pytest.mark.parametrize("program", [fail_again_and_again, fail_before_another_tree])
def test_programs_that_fail_keep_no_memory(program: Callable[[], int]) -> None:
    bytes_of_a_tree = 6 * 6_000_000
    assert max(run_ranks(program, 2, timeout=120)) < 6 * bytes_of_a_tree, "12 programs have failed"


def go_on_with_equal_trees() -> list[str]:
    hvd.init()
    texts = []
    # Every leaf but the last is a bucket of its own.
    leaves = [jnp.full(1_100_000, 1.0 + hvd.rank()) for _ in range(5)] + [jnp.full(3, 1.0 + hvd.rank())]
    total = sum(1.0 + rank for rank in range(hvd.size()))
    in_jit = jax.jit(lambda tree: hvd.allreduce(tree, op=hvd.Sum, name="tree"))
    for reduced in (in_jit, lambda tree: hvd.allreduce(tree, op=hvd.Sum, name="eager"), hvd.allreduce):
        for attempt in range(6):
            mine = leaves[: 3 + (hvd.rank() + attempt) % hvd.size()]
            if attempt == 5:  # the same leaves, of which the last bucket to be reduced differs: others are decided
                mine = [jnp.ones(1_100_000 + hvd.rank()), *leaves[1:]]
            with pytest.raises((*FAILED, hvd.MismatchError)) as raised:
                jax.block_until_ready(reduced(mine))
            texts.append(str(raised.value))
            scale = hvd.size() if reduced is hvd.allreduce else 1
            for result in jax.block_until_ready(reduced(leaves)):
                np.testing.assert_array_equal(result, total / scale)
    return texts


@pytest.mark.parametrize("ranks", [2, 3])
def test_after_trees_that_differ_the_same_call_goes_on(ranks: int) -> None:
    """At once, while operations that only some ranks have are still under way there, and other ranks are behind."""
    for texts in run_ranks(go_on_with_equal_trees, ranks):
        assert len(texts) == 18
        # Buckets of the same number may hold other leaves.
        other_leaves = (
            r"tree: rank.* ha.* leaves, rank.* ha.* leaves|tensors: rank.* ha.* '.*\[\d\]', rank.* ha.* '.*\[\d\]'"
        )
        for number, text in enumerate(texts):
            what = r"shape: rank.* ha.* \(1100000,\), rank.* ha.* \(110000[12],\)" if number % 6 == 5 else other_leaves
            assert re.search(rf"the ranks disagree about its ({what})[. ].*Remedy: ", text)


def use_a_program_with_another_process_set() -> tuple[str, list[float]]:
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    own = hvd.add_process_set([2])
    number = own.process_set_id
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=own))
    if hvd.rank() == 2:
        program(jnp.ones(2)).block_until_ready()
    hvd.shutdown()
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    other = hvd.add_process_set([1, 2])
    assert other.process_set_id == number
    if hvd.rank() == 0:
        return "", []
    if hvd.rank() == 1:
        return "", hvd.allreduce(jnp.ones(2), op=hvd.Sum, process_set=other).tolist()
    with pytest.raises(FAILED) as raised:
        program(jnp.ones(2)).block_until_ready()
    return str(raised.value), hvd.allreduce(jnp.ones(2), op=hvd.Sum, process_set=other).tolist()


def test_a_program_for_another_process_set() -> None:
    _, (_, theirs), (text, own) = run_ranks(use_a_program_with_another_process_set, 3)
    assert theirs == own == [2.0, 2.0]
    assert "compiled on rank 2 for a process set of the ranks 2, but the ranks of that set are now 1,2" in text
    assert "jax.clear_caches()" in text


def wait_in_different_programs() -> str:
    hvd.init()
    names = ("b", "c") if hvd.rank() == 0 else ("c", "b")
    own = jax.jit(lambda x: hvd.allreduce(x @ x, name=names[0]))  # JAX runs small programs at once, without a product
    under_way = own(jnp.ones((300, 300)))
    time.sleep(8)  # the other rank's program waits for what this thread submits next
    horovodish.allreduce(np.ones((300, 300), np.float32), name=names[1])  # JAX would queue it behind the program
    under_way.block_until_ready()
    with pytest.raises(FAILED) as raised:
        own(jnp.ones((300, 300))).block_until_ready()
    return str(raised.value)


def test_ranks_that_wait_in_different_programs_raise() -> None:
    """Within seconds, and not while a thread sleeps that will submit what the others wait for."""
    for outcome in run_ranks_to_their_ends(wait_in_different_programs, 2):
        assert outcome.ended == "returned", outcome.output
        assert "every rank waits, but not for the same tensors" in outcome.result
        assert "'b' was submitted by rank 0 but not by rank 1" in outcome.result
        assert "ranks have waited for others" not in outcome.output


LEAVES_A_PROGRAM_UNDER_WAY = """
import sys
import time
import jax
import jax.numpy as jnp
import horovodish.jax as hvd

hvd.init()
program = jax.jit(lambda x: hvd.allreduce([x @ x for _ in range(4)], name="left"))
x = jnp.ones((600, 600))
jax.block_until_ready(program(x))
if hvd.rank() == 1:
    kept = program(x)
if sys.argv[1] == "later":
    time.sleep(2)  # the program has failed before the script ends
print(f"rank {hvd.rank()} ends", flush=True)
if sys.argv[1] == "shutdown":
    hvd.shutdown()
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "end", ["at once", *(pytest.param(end, marks=pytest.mark.soak) for end in ("later", "shutdown"))]
)
def test_a_script_that_ends_with_a_program_under_way(end: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(LEAVES_A_PROGRAM_UNDER_WAY)
    output = output_of(script, end, np=2, timeout=120, with_errors=True, status=1)
    assert sorted(line for line in output.splitlines() if line.endswith(" ends")) == ["rank 0 ends", "rank 1 ends"]
    failed = r"allreduce .* failed on rank 1: rank 0 (has ended its script|called shutdown\(\))"
    assert re.search(rf"rank 1 on \S+ failed with exit status 1: RankLostError: {failed}; the script has not", output)


USES_THE_RESULT_AFTER_THE_LOOP = """
import sys
import jax
import jax.numpy as jnp
import horovodish.jax as hvd

hvd.init()
step = jax.jit(lambda x: hvd.allreduce(jnp.tanh(x @ x), name="step"))


def train(x):
    for _ in range(20):
        x = step(x)
    return x if hvd.rank() == 0 else None  # nobody holds the result on rank 1


x = step(jnp.ones((300, 300)))
x = train(x)
if sys.argv[1] == "shutdown":
    hvd.shutdown()
if x is not None:
    print(x.shape)
"""


@pytest.mark.parametrize("end", ["script", "shutdown"])
def test_programs_under_way_are_waited_for_at_the_end(end: str, tmp_path: Path) -> None:
    script = tmp_path / "used.py"
    script.write_text(USES_THE_RESULT_AFTER_THE_LOOP)
    assert output_of(script, end, np=2, timeout=120) == "(300, 300)\n"


WAITS_FOR_DIFFERENT_TENSORS_AT_THE_END = """
import jax
import jax.numpy as jnp
import horovodish.jax as hvd

hvd.init()
state = hvd.elastic.JaxState(x=jnp.ones((300, 300)))
with hvd.elastic.attempt(state):  # in an elastic job, a thread listens to the launcher from now on
    pass
x = jax.jit(lambda x: hvd.allreduce(x @ x, name=f"of rank {hvd.rank()}"))(state.x)
"""


@pytest.mark.soak
@pytest.mark.parametrize("flags", [(), ("--min-np", "2")], ids=["plain", "elastic"])
def test_ranks_that_wait_for_different_tensors_at_the_end_do_not_hang(flags: Sequence[str], tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(WAITS_FOR_DIFFERENT_TENSORS_AT_THE_END)
    output = output_of(script, np=2, flags=flags, timeout=120, with_errors=True, status=1)
    for rank in (0, 1):
        assert f"allreduce 'of rank {rank}' failed on rank {rank}: every rank waits, but not for the" in output
