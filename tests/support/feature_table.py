"""Write the table in docs/install.md and README.md that says what works with which framework.

Its command is `python tests/support/feature_table.py`. A new row or note goes into docs/install.md.
The words of a row say where its cells come from: the names and options in
it, else the tests that `pytest.mark.shows` it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_type_hints

from horovodish import process_api
from horovodish.gradients import options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/install.md"
README = ROOT / "README.md"
HEADING = "## What works with which framework\n"
PACKAGES = {
    "PyTorch": "frameworks/torch",
    "TensorFlow": "frameworks/tensorflow",
    "Keras 3": "frameworks/keras",
    "JAX": "frameworks/jax",
    "MLX": "frameworks/mlx",
    "NumPy": "horovodish",
}


def generated(page: str) -> str:
    """Return the page with the cells as they should be: "yes" or a note that is there, or nothing.

    Raises:
        ValueError: a package has a part of what a row names, or tests show a row that the table lacks.
    """
    head, heading, table = page.partition(HEADING)
    lines, rows = table.split("\n"), set()
    for number, line in enumerate(lines):
        if re.match(r"\| *[^ |-]", line):
            row, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.add(row)
            has = [works(row, folder) for folder in PACKAGES.values()]
            cells = [(cell or "yes") if each else "" for cell, each in zip(cells, has, strict=True)]
            lines[number] = re.sub(" +", " ", f"| {row} | {' | '.join(cells)} |")
        elif "PyTorch" in line:
            lines[number : number + 2] = [f"| | {' | '.join(PACKAGES)} |", "|---|" + ":-:|" * len(PACKAGES)]
    if unknown := set().union(*map(shown_by_tests, PACKAGES.values())) - rows:
        raise ValueError(f"tests show rows that the table lacks: {unknown}")
    return head + heading + "\n".join(lines)


def with_table(readme: str, page: str) -> str:
    """Return the README with the table of the page, whose links then lead into docs."""
    rows = re.findall(r"^\|.*\n", page.partition(HEADING)[2], re.MULTILINE)
    head, heading, section = readme.partition(HEADING)
    rest = re.sub(r"^\n(\|.*\n)*", "", section)
    return f"{head}{heading}\n{''.join(rows).replace('](', '](docs/')}{rest}"


def works(row: str, folder: str) -> bool:
    public, taken = public_names(folder), options_of_optimizers(folder)
    parts = [any(each.startswith(name) for each in public) for name in re.findall(r"`(\w+)`", row)]
    parts += [name in taken for name in re.findall(r"`(\w+)=`", row)]
    if len(set(parts)) > 1:
        raise ValueError(f"{folder} has a part of the row {row!r}: make two rows of it")
    return parts[0] if parts else row in shown_by_tests(folder)


def shown_by_tests(folder: str) -> set[str]:
    sources = [path.read_text() for path in (ROOT / "tests" / folder).glob("test_*.py")]
    return {row for text in sources for row in re.findall(r"^@pytest\.mark\.shows\(\"(.+)\"\)$", text, re.MULTILINE)}


def options_of_optimizers(folder: str) -> set[str]:
    file = ROOT / folder / "optimizer.py"
    kinds = re.findall(r"@takes\(\s*(\w+)", file.read_text()) if file.exists() else []
    return {name for kind in kinds for name in get_type_hints(getattr(options, kind))}


def public_names(folder: str) -> set[str]:
    """The names in `__all__` of this package's modules, by their sources; of the core, collectives and objects."""
    files = [ROOT / "horovodish/collectives/objects.py"]
    files += [ROOT / folder / "collectives/functions.py"] if folder == "horovodish" else (ROOT / folder).glob("*.py")
    lists = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    elements = [element for found in lists if isinstance(found, ast.List) for element in found.elts]
    return {element.value for element in elements if isinstance(element, ast.Constant)} | set(process_api.__all__)


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
    README.write_text(with_table(README.read_text(), PAGE.read_text()))
