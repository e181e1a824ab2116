"""The tests that docs/security.md names for each threat exist."""

from __future__ import annotations

import re

from support.sources import ROOT


def test_every_threat_has_a_test() -> None:
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    rows = [line.strip("|").split("|")[-1] for line in lines if line.startswith("| ") and "`test_" in line]
    assert len(rows) > 10
    assert len([line for line in lines if line.startswith("| ")]) == len(rows) + 1, "a row without a test"
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    assert {name for row in rows for name in re.findall(r"`(test_\w+)`", row)} <= defined
