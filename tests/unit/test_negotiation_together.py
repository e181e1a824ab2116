"""The negotiation with everything at once: eviction, disagreement, refusals, families, joins and lost ranks."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.negotiating_ranks import Ranks, Step
from support.negotiation import Network, told
from support.sources import ROOT

NAMES = "abcd"
trees = st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(0, 2**32))


@st.composite
def scripts_of(draw: st.DrawFn, size: int) -> list[list[Step]]:
    """In an epoch all ranks submit the same names, each in an order of its own; some ranks join before its end."""
    scripts: list[list[Step]] = [[] for _ in range(size)]
    for run in range(draw(st.integers(1, 4))):
        names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
        family = draw(st.sets(st.sampled_from(NAMES)))
        shape = draw(st.sampled_from([3, 4]))
        # Few ranks differ, so that other tensors are decided in the meantime.
        shapes = draw(
            st.dictionaries(st.tuples(st.integers(0, size - 1), st.sampled_from(NAMES)), st.just(7 - shape), max_size=2)
        )
        refusals = draw(st.sets(st.tuples(st.integers(0, size - 1), st.sampled_from(NAMES)), max_size=1))
        joins = draw(st.booleans())
        for rank, script in enumerate(scripts):
            order = draw(st.permutations(sorted(names)))
            length = draw(st.integers(0, len(order))) if joins and rank > 0 else len(order)
            for name in order[:length]:
                refuses = (rank, name) in refusals
                script.append(Step(name, shapes.get((rank, name), shape), refuses, name in family, run))
            if joins:
                script.append(Step())
    return scripts


@settings(max_examples=150)
@given(trees, st.integers(1, 3), st.data())
def test_whatever_comes_together_every_submission_ends_once(
    tree: tuple[int, int, int], cache_capacity: int, data: st.DataObject
) -> None:
    scripts = data.draw(scripts_of(tree[0]))
    ranks = Ranks(Network(*tree, cache_capacity), scripts)
    ranks.run()
    ranks.check_end()
    submissions = [sum(bool(step.name) for step in script) for script in scripts]
    assert [rank.ended for rank in ranks.ranks] == submissions
    assert all(node.cached() <= cache_capacity for node in ranks.network.nodes)


@settings(max_examples=80)
@given(trees, st.integers(1, 3), st.integers(0, 60), st.data())
def test_when_a_rank_dies_in_the_middle_all_ends(
    tree: tuple[int, int, int], cache_capacity: int, actions: int, data: st.DataObject
) -> None:
    ranks = Ranks(Network(*tree, cache_capacity), data.draw(scripts_of(tree[0])))
    for _ in range(actions):
        ranks.act()
    ranks.lose(data.draw(st.integers(0, tree[0] - 1)))
    ranks.run()
    ranks.check_end()
    for rank, decisions in enumerate(ranks.network.decisions):
        assert rank == ranks.gone or [d["type"] for d in decisions].count("lost") >= 1


def test_of_two_refusals_the_one_of_a_family_fails_the_family() -> None:
    for families in (["", "tree"], ["tree", ""], ["", ""]):
        network = Network(size=2, arity=1, seed=0)
        for rank, family in enumerate(families):
            network.nodes[rank].submit("x", [3], family=family, refusal="no")
            network.post(rank)
        network.drain()
        for decisions in network.decisions:
            assert told(decisions) == [("fail", "x")]
            assert decisions[0]["families"] == (["tree"] if "tree" in families else [])
            assert "cannot take part: no" in decisions[0]["text"]


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("make")), reason="no compiler: apt-get install g++ make")
@pytest.mark.soak
def test_every_order_of_events_of_three_ranks_ends_well() -> None:
    """`make explore` does the same for more worlds and longer scripts."""
    subprocess.run(["make", "--silent", "build/explore"], cwd=ROOT, check=True)
    done = subprocess.run(["build/explore", "small"], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
