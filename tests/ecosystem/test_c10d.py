"""PyTorch's own cases for process groups pass on our backend, but for those that are explained."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.scripts import output_of
from support.sources import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("expecttest") is None, reason="`make test-ecosystem` installs what this needs"
)

EXPLAINED = {
    "test_get_backend": "it asks for gloo by its name",
    "test_monitored_barrier": "PyTorch refuses monitored_barrier on every backend but gloo",
}
"""Why cases whose names begin so fail."""


def test_pytorchs_own_cases(tmp_path: Path) -> None:
    outcomes = run(4, tmp_path / "4")
    larger = [name for name, outcome in outcomes.items() if "small world size" in outcome]
    outcomes.update(run(8, tmp_path / "8", *larger))
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("rank")}
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    print(f"{passed} of {passed + len(failed)} pass, {len(outcomes) - passed - len(failed)} need GPUs or are skipped")
    unexplained = {name: text for name, text in failed.items() if not name.startswith(tuple(EXPLAINED))}
    assert not unexplained, "\n".join(f"{name}: {text}" for name, text in unexplained.items())
    assert all(any(name.startswith(each) for name in failed) for each in EXPLAINED), "these pass now"
    page = (ROOT / "docs/torch-distributed.md").read_text()
    assert re.search(rf"\b{passed} of {passed + len(failed)}\b", page), "the page names another number"


def run(ranks: int, results: Path, *words: str) -> dict[str, str]:
    """The outcome of each case, by name."""
    output_of(ROOT / "tests/ecosystem/c10d_cases.py", results, *words, np=ranks, timeout=1200)
    return dict(json.loads(line) for line in results.read_text().splitlines())
