"""The site makes tabs of plain Markdown, and leaves the rest of a page as it is."""

from __future__ import annotations

import sys

import pytest

from support.sources import ROOT

CODE = "```python\nif a:\n\n    b()\n```\n"
TABLE = "| computes on | run |\n|---|---|\n| CPUs | `pip` |\n"


@pytest.fixture
def with_tabs(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_site"))
    monkeypatch.delitem(sys.modules, "tabs", raising=False)
    return pytest.importorskip("tabs").with_tabs


def tabs(*items: tuple[str, str, str]) -> str:
    each = "\n".join(f":::{{tab-item}} {name}\n:sync: {tool}\n\n{body}:::\n" for name, tool, body in items)
    return f"::::{{tab-set}}\n:sync-group: tool\n\n{each}::::\n\n"


def test_blocks_become_tabs(with_tabs) -> None:  # type: ignore[no-untyped-def]
    page = f"Text.\n\n**PyTorch**\n\n{CODE}\n**Keras 3**\n\n{TABLE}\n**JAX**\n\n    pip install\n    jax\n\nMore.\n"
    items = ("PyTorch", "PyTorch", CODE), ("Keras 3", "Keras", TABLE), ("JAX", "JAX", "    pip install\n    jax\n")
    assert with_tabs(page) == f"Text.\n\n{tabs(*items)}More.\n"


def test_folded_blocks_become_tabs(with_tabs) -> None:  # type: ignore[no-untyped-def]
    folded = "<details>\n<summary>{}</summary>\n\n{}\n</details>\n\n"
    page = folded.format("PyTorch, to copy", CODE) + folded.format("JAX", CODE) + "More.\n"
    assert with_tabs(page) == tabs(("PyTorch", "PyTorch", CODE), ("JAX", "JAX", CODE)) + "More.\n"


def test_the_rest_stays(with_tabs) -> None:  # type: ignore[no-untyped-def]
    page = f"**PyTorch**\n\n{CODE}\nText.\n\n**Bold** text.\n\n{CODE}\n{TABLE * 50}"
    assert with_tabs(page) == page
