"""The operations of a rank in a process set: names that are in use, families, and refusals that are on their way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish._native import testing

Table = testing.OperationTable


def test_an_operation_from_its_submission_to_its_end() -> None:
    table = Table()
    table.submit("a")
    assert table.take_news() == [("stated", "a")] and table.busy()
    table.begin("a", decision=1)
    assert table.take_news() == [] and table.busy()
    table.end(1)
    assert table.take_news() == [("done", 1)] and not table.busy()


def test_what_was_not_submitted_cannot_begin() -> None:
    with pytest.raises(ValueError, match="'a' was decided although this rank has neither submitted it nor joined"):
        Table().begin("a", decision=1)


def test_a_name_is_in_use_until_its_operation_ends() -> None:
    table = Table()
    table.submit("a", family="tree")
    table.begin("a", decision=1)
    table.take_news()
    table.submit("a", family="tree")
    # The other ranks hear of a refusal, which is what the name stands for until they do.
    assert table.take_news() == [("stated", "a"), ("DuplicateNameError", 2)]
    table.fail("a")
    table.end(1)
    table.submit("a", family="tree")
    assert table.take_news() == [("MismatchError", 0), ("done", 1), ("stated", "a")]


def test_a_name_can_be_used_again_while_its_refusal_is_on_its_way() -> None:
    table = Table()
    table.submit("a", refusal="bad splits")
    table.submit("a")
    table.submit("b")
    assert table.take_news() == [("stated", "a"), ("stated", "b")]
    table.fail("a")
    assert table.take_news() == [("MismatchError", 1), ("stated", "a")]


def test_a_family_fails_as_a_whole() -> None:
    table = Table()
    for name in ("tree.a", "tree.b", "other"):
        table.submit(name, family=name.partition(".")[0], run=1)
    table.take_news()
    table.fail("tree.a", families=["tree"])
    assert sorted(table.take_news()) == [("MismatchError", 1), ("MismatchError", 2)]
    table.submit("tree.c", family="tree", run=1)  # a part of the same run
    table.submit("tree.a", family="tree", run=2)
    assert table.take_news() == [("MismatchError", 4), ("stated", "tree.a")]


def test_names_of_a_failed_run_are_free_while_it_is_still_executed() -> None:
    table = Table()
    table.submit("tree.a", family="tree", run=1)
    table.begin("tree.a", decision=1)
    table.submit("tree.b", family="tree", run=1)
    table.fail("tree.b", families=["tree"])
    table.submit("tree.a", family="tree", run=2)
    table.take_news()
    table.end(1)
    table.submit("tree.a", family="tree", run=3)
    assert table.take_news() == [("done", 1), ("DuplicateNameError", 4)]


def test_later_runs_wait_until_all_ranks_know_of_a_refusal() -> None:
    table = Table()
    table.submit("tree.a", family="tree", run=1)
    table.submit("tree.b", family="tree", run=1, refusal="bad dtype")
    table.take_news()
    table.submit("tree.a", family="tree", run=2)
    table.submit("tree.c", family="tree", run=2)
    table.submit("alone")
    assert table.take_news() == [("stated", "alone")]
    table.fail("tree.b", families=["tree"])
    assert table.take_news() == [
        ("MismatchError", 1),
        ("MismatchError", 2),
        ("stated", "tree.a"),
        ("stated", "tree.c"),
    ]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "refuse", "begin", "fail", "fail family", "end"]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["", "tree"]),
        st.integers(1, 3),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_submission_ends_once(steps: list[tuple[str, str, str, int]]) -> None:
    table, begun, submitted = Table(), [], 0
    news: list[tuple[str, Any]] = []
    for decision, (step, name, family, run) in enumerate(steps):
        if step in ("submit", "refuse"):
            submitted += 1
            table.submit(name, family, run, "why" if step == "refuse" else "")
        elif step == "end" and begun:
            table.end(begun.pop(0))
        elif step == "begin":
            with contextlib.suppress(ValueError):  # nothing of that name is undecided
                table.begin(name, decision)
                begun.append(decision)
        elif step.startswith("fail"):
            table.fail(name, ["tree"] if step == "fail family" else [])
        news += table.take_news()
    table.abandon()
    news += table.take_news()
    # What the table refuses by itself has the number 0.
    assert sorted(which for what, which in news if what != "stated" and which) == list(range(1, submitted + 1))
    assert not table.busy()
