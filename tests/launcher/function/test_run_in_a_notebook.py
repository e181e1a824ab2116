"""`horovodish.run()` in the cells of a notebook, in a real Jupyter kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = [
    """
import horovodish as hvd
rate = 3
class Result:
    def __init__(self, value):
        self.value = value
def train(start):
    hvd.init()
    print("rank", hvd.rank(), "trains")
    return Result(start + rate * hvd.rank())
def fail():
    raise LookupError("no data here")
""",
    """
results = hvd.run(train, args=(5,), num_proc=2)
print([type(result) is Result for result in results], [result.value for result in results])
""",
    "hvd.run(fail)",
]


def text_of(cell: Any, name: str) -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == name)


def test_functions_of_cells(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=300, startup_timeout=300, kernel_name="python3", allow_errors=True
    )
    client.execute(cwd=str(tmp_path))
    defines, trains, fails = notebook.cells
    assert defines.outputs == []
    lines = text_of(trains, "stdout").splitlines()
    assert sorted(lines[:2]) == ["rank 0 trains", "rank 1 trains"]
    assert lines[2:] == ["[True, True] [5, 8]"]
    error = fails.outputs[-1]
    assert (error["ename"], error["evalue"]) == ("LookupError", "no data here")
    assert 'raise LookupError("no data here")' in "\n".join(error["traceback"])
