"""The code in the documents, so that tests can run it as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

from support.sources import ROOT


def python_blocks(document: str) -> list[str]:
    """The blocks of Python code in a document of this project, such as "docs/from-ddp.md"."""
    return re.findall(r"```python\n(.*?)```", Path(ROOT, document).read_text(), re.DOTALL)


def sides(document: str) -> tuple[str, str]:
    """The first diff in a document, as the two scripts between which it is."""
    (diff, *_) = re.findall(r"```diff\n(.*?)```", Path(ROOT, document).read_text(), re.DOTALL)
    before, after = ("\n".join(line[1:] for line in diff.splitlines() if line[:1] != other) for other in "+-")
    return before, after


def recipes(document: str, tab: str = "") -> dict[str, str]:
    """The Python code below each heading of a document, in the tab of a framework; without one, what is in no tab."""
    found = {}
    for section in re.split(r"^##+ ", Path(ROOT, document).read_text(), flags=re.MULTILINE):
        heading, _, text = section.removeprefix("# ").partition("\n")
        blocks = re.findall(r"(?:^\*\*([^*\n]+)\*\*\n\n)?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        codes = [code for name, code in blocks if name == tab]
        if codes:
            found[heading] = "\n".join(codes)
    return found
