"""The code in the documents, so that tests can run it as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

from support.sources import ROOT


def python_blocks(document: str) -> list[str]:
    """The blocks of Python code in a document of this project, such as "docs/from-ddp.md"."""
    return re.findall(r"```python\n(.*?)```", Path(ROOT, document).read_text(), re.DOTALL)


def columns(block: str) -> tuple[str, str]:
    """The two scripts of a block that shows them side by side; each begins with a comment that names it."""
    first, *_ = block.splitlines()
    width = first.index("#", 1)
    lines = [(line[:width].rstrip(), line[width:]) for line in block.splitlines()]
    crossed = [line for line in block.splitlines() if len(line) > width and line[width - 1] != " "]
    assert not crossed, f"these lines cross from one column into the other: {crossed}"
    left, right = zip(*lines, strict=True)
    return "\n".join(left), "\n".join(right)
