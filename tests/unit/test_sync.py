"""What ranks compare of a policy for `sync=`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from horovodish.gradients.sync import DiLoCo, LocalSGD, OuterSGD, Sync

ADDS = "def merge(self, start, change, memory):\n    return start + 0.9 * change, memory"
AGAIN = ADDS.replace("start,", "start,  ")
OTHERS = [
    ADDS.replace("0.9", "0.8"),
    ADDS.replace("+", "-"),
    ADDS.replace("change, memory\n", "change, memory=()\n").replace("0.9", "min(0.9, 1)"),
    ADDS + "\ndef is_due(self, step, fragment=0):\n    return step in {2, 3}",
]


def policy(base: type, code: str, *arguments: Any) -> Any:
    """An object of a class of this code."""
    methods: dict[str, Any] = {}
    exec(code, methods)
    return type("Own", (base,), {name: its for name, its in methods.items() if name != "__builtins__"})(*arguments)


@pytest.mark.parametrize("other", OTHERS)
def test_the_code_of_a_class_counts(other: str) -> None:
    assert repr(policy(Sync, ADDS, 4)) == repr(policy(Sync, AGAIN, 4))
    assert repr(policy(Sync, ADDS, 4)) != repr(policy(Sync, other, 4))
    outer, again, another = (DiLoCo(4, policy(OuterSGD, code)) for code in (ADDS, AGAIN, other))
    assert repr(outer) == repr(again) != repr(another)


def test_public_numbers_count() -> None:
    policies = [policy(Sync, ADDS, 4) for _ in range(3)]
    policies[0].damping, policies[1]._rank = 0.5, 1
    assert repr(policies[0]) != repr(policies[1]) == repr(policies[2])


def test_our_policies_are_called_as_they_are_made() -> None:
    assert repr(LocalSGD(4, after=2)) == "LocalSGD(every=4, after=2)"
    assert repr(DiLoCo(4)) == "DiLoCo(every=4, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))"


def test_every_process_gives_code_the_same_number() -> None:
    """Sets of text have another order in each of them."""
    text = ADDS + '\n    return "x" in {"a", "b", "c", "d"}, lambda each: each in {"e", "f", "g"}'
    program = (
        "from horovodish.gradients.sync import Sync; made = {}; exec(%r, made); "
        "print(type('Own', (Sync,), {'merge': made['merge']})(4))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program % text],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(printed) == 1
