"""What the nodes of a negotiation make of bytes that no node has written: an error, never anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from horovodish._native import testing
from support.mutations import mutations

HUGE = b"\xff" * 8 + b"\x7f"
CHANGED = 3000
"""Takes a second."""


def leaf(rank: int) -> testing.Negotiation:
    return testing.Negotiation(False, [[rank]], 2)


def node(root: bool) -> testing.Negotiation:
    """Above two leaves."""
    return testing.Negotiation(root, [[0], [1], [2]], 2)


def statements(rank: int) -> list[bytes]:
    """What a leaf says."""
    below = leaf(rank)
    said = []
    for states in (
        lambda: below.submit("a", [3]),
        lambda: below.submit("b", [2, 3], [1], 9),
        lambda: below.submit("c", [3], family="f"),
        below.join,
        lambda: below.lost(True, 3, "gone"),
        lambda: below.note_to_root("sleeps"),
    ):
        states()
        said.append(below.take_for_parent())
    return said


def decisions() -> list[bytes]:
    """What a root says."""
    root = node(True)
    said = []
    for name in "aabc":
        for participant in (1, 2):
            root.from_child(participant, statements(participant)["abc".index(name)])
        root.submit(name, [3] if name != "b" else [2, 3], [1] if name == "b" else [], 9 if name == "b" else 1)
        said.append(root.take_for_children())
    for says in (lambda: root.note_to_all("who sleeps?"), root.join, lambda: root.lost(True, 3, "gone")):
        says()
        said.append(root.take_for_children())
    return said


UP, DOWN = [*statements(1), *statements(2)], decisions()


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (b"\x09", "unknown record"),
        (b"\0\1", "it names an unknown id"),
        (b"\2\1\1\1\1\0\0", "a request without ranks"),
        (b"\1\1\xff\xff\3", "it names an unknown id"),
        (b"\0" + HUGE, "there is no"),
        (b"\4\1a\0\0\0\0", "a request without ranks"),
        (b"\4\1a\0\0\0" + HUGE, "there is no"),
        (b"\4\1a\0\0\0\1\0\0", "a request without ranks"),
        (b"\4\1a\1\5\2\0", "ranks out of order"),
        (b"\4\1a\2\1\2\3\4\0", "ranks out of order"),
        (b"\5\xff\xff\xff\xff\x0f", "there is no"),
        (b"\6", "an acknowledgement without a decision"),
        (b"\7\4\0\0", "there is no"),
        (b"\x08\5", "there is no"),
        (b"\x08\1\0\0\0\2", "there is no"),
        (b"\x08\1\0\0\0\0" + HUGE, "cut short"),
    ],
)
@pytest.mark.parametrize("root", [True, False])
def test_a_statement_that_no_node_makes_is_refused(root: bool, message: bytes, what: str) -> None:
    with pytest.raises(RuntimeError, match=f"control message: {what}"):
        node(root).from_child(1, message)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (b"\x09", "unknown record"),
        (b"\0\7", "a decision about an id that is not cached"),
        (b"\1\7\2", "a decision about an id that is not cached"),
        (b"\4\7", "a decision about an id that is not cached"),
        (b"\3\1\1a\0\0\0\3\1\1b\0\0\0", "enters the response cache twice"),
        (b"\3\1\1a\0\0\0\3\2\1a\0\0\0", "enters the response cache twice"),
        (b"\5\1a\0" + HUGE, "there is no"),
        (b"\6\xff\xff\xff\xff\x0f", "there is no"),
        (b"\7\4\0\0", "there is no"),
        (b"\x08\5", "there is no"),
    ],
)
def test_a_decision_that_no_root_makes_is_refused(message: bytes, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        node(False).from_parent(message)


@pytest.mark.parametrize("root", [True, False])
def test_any_bytes_are_a_message_or_an_error(root: bool) -> None:
    def hear(message: bytes, deliver: Callable[[testing.Negotiation, bytes], None]) -> None:
        state = node(root)
        for participant, rank in ((1, 1), (2, 2)):
            state.from_child(participant, statements(rank)[0])
        state.submit("a", [3])
        with contextlib.suppress(RuntimeError):  # and nothing else, as out of range or out of memory
            deliver(state, message)
            state.take_for_parent()
            state.take_for_children()
            with contextlib.suppress(UnicodeDecodeError):  # Python's, of a text that is changed
                state.take_decisions()

    for message in mutations(UP, CHANGED):
        hear(message, lambda state, each: state.from_child(1, each))
    for message in [] if root else mutations(DOWN, CHANGED):
        hear(message, lambda state, each: state.from_parent(each))
