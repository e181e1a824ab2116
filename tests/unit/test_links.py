"""The links of the negotiation, as a native program."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.sources import CSRC, ROOT

SOURCES = [ROOT / "tests/native/links.cc", *(CSRC / name for name in ("abi/mpi.cc", "negotiation/rank_set.cc"))]


def test_links(tmp_path: Path) -> None:
    options = ["-std=c++20", "-O1", "-fno-access-control", f"-I{CSRC}", "-o", str(tmp_path / "links")]
    subprocess.run(["g++", *options, *map(str, SOURCES), "-ldl"], check=True)
    done = subprocess.run([tmp_path / "links"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
