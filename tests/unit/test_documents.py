"""What is published beside the code: one version everywhere, and links to pages that the site has."""

from __future__ import annotations

import re

from horovodish.version import __version__
from support.sources import ROOT


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {newest[1]}\ndate-released: {newest[2]}\n" in citation
    assert __version__ == newest[1]


def test_llms_txt_names_pages_of_the_site() -> None:
    text = (ROOT / "llms.txt").read_text()
    title, empty, summary, *_ = text.splitlines()
    assert title.startswith("# ") and not empty and summary.startswith("> ")
    pages = re.findall(r"\(https://horovodish\.readthedocs\.io/en/latest/(\S+)\.html\)", text)
    assert len(pages) > 10
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").exists()] == []


def test_plots_take_the_colours_of_the_page() -> None:
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    plots = {
        name for page in pages for name in re.findall(r"\]\(\.\./(benchmarks/results/\S+)\)", page) if "txt" not in name
    }
    assert len(plots) >= 5
    for name in plots:
        svg = (ROOT / name).read_text()
        assert svg.startswith('<svg class="picture plot"') and "var(--ink)" in svg and "<text" in svg, name
        assert not re.search(r"<style[^>]*>\s*\*", svg), f"{name} styles all of the page"
