"""Tabs from plain Markdown: two or more blocks in a row, each below a line such as **PyTorch**, or in <details>."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

BODY = r"(?:```\w+\n(?:(?!```).*\n)*```\n|(?: {4}.*\n)+|(?:\|.*\n)+)"
BLOCK = rf"^\*\*([^*\n]+)\*\*\n\n({BODY})\n*"
FOLDED = rf"^<details>\n<summary>([^<]+)</summary>\n\n({BODY})\n</details>\n*"


def as_tabs(run: str, block: str) -> str:
    items = []
    for name, body in re.findall(block, run, re.MULTILINE):
        tool = re.split(r"\W", name)[0]  # so that a choice holds on all pages, for "Keras" and "Keras 3" alike
        items.append(f":::{{tab-item}} {name.removesuffix(', to copy')}\n:sync: {tool}\n\n{body}:::\n")
    return "::::{tab-set}\n:sync-group: tool\n\n" + "\n".join(items) + "::::\n\n"


def with_tabs(text: str) -> str:
    """Return the text of a page with a set of tabs in place of each run of blocks."""
    for block in (BLOCK, FOLDED):
        text = re.sub(
            rf"(?:{block}){{2,}}", lambda found, block=block: as_tabs(found[0], block), text, flags=re.MULTILINE
        )
    return text


def put_tabs(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = with_tabs(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx_design")
    app.connect("source-read", put_tabs, priority=600)  # after the front page has its text
    return {"parallel_read_safe": True}
