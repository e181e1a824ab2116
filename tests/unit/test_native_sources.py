"""What the C++ sources may include, and that every header stands by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.sources import CSRC

FOREIGN = re.compile(r"^(ATen/|Python\.h|c10/|cuda|jax|mpi|nccl|nanobind/|tensorflow/|torch/|xla)", re.IGNORECASE)
ONLY_BINDINGS = re.compile(r"^(Python\.h|nanobind/)")
HEADERS = sorted(CSRC.rglob("*.h"))
SOURCES = sorted(CSRC.rglob("*.cc"))


def foreign_includes(source: str, path: str) -> list[str]:
    """The headers in angle brackets that belong to a framework, MPI, CUDA or, outside of the folder python, Python."""
    found = [
        header for header in re.findall(r"^\s*#\s*include\s*<([^>]+)>", source, re.MULTILINE) if FOREIGN.match(header)
    ]
    return [header for header in found if not (path.startswith("python/") and ONLY_BINDINGS.match(header))]


def name_of(path: Path) -> str:
    return str(path.relative_to(CSRC))


def test_no_foreign_header_is_included() -> None:
    found = {name_of(path): foreign_includes(path.read_text(), name_of(path)) for path in SOURCES + HEADERS}
    assert {file: foreign for file, foreign in found.items() if foreign} == {}


def test_this_test_sees_foreign_headers() -> None:
    headers = ["<mpi.h>", "<vector>", "<nanobind/nanobind.h>", '"abi/mpi.h"', "<cuda_runtime.h>"]
    source = "\n".join(f"#include {header}" for header in headers)
    assert foreign_includes(source, "engine/engine.cc") == ["mpi.h", "nanobind/nanobind.h", "cuda_runtime.h"]
    assert foreign_includes(source, "python/engine.cc") == ["mpi.h", "cuda_runtime.h"]


BELOW_ENGINE = {"abi", "gpu", "memory", "negotiation", "operation", "planes", "timeline"}
ROOMS: dict[str, set[str]] = {
    "abi": set(),
    "arithmetic": set(),
    "memory": set(),
    "negotiation": {"abi", "arithmetic", "memory"},
    "timeline": {"memory", "negotiation"},
    "gpu": {"abi", "arithmetic"},
    "operation": {"arithmetic", "gpu", "memory", "negotiation", "timeline"},
    "planes": {"abi", "arithmetic", "gpu", "memory", "negotiation", "operation"},
    "engine": BELOW_ENGINE,
    "xla": {"abi", "arithmetic", "engine", "gpu", "operation"},
    "tensorflow": {"abi", "arithmetic", "engine_interface.h"},
    "python": {*BELOW_ENGINE, "arithmetic", "engine_interface.h", "engine", "xla"},
}
"""What the files of each folder may include of the others: only folders further up in this table."""


def wrong_includes(source: str, room: str) -> set[str]:
    """The folders, and files that lie in none, that a file of this folder must not include."""
    included = {path.split("/")[0] for path in re.findall(r'^#include "([^"]+)"', source, re.MULTILINE)}
    return included - {room} - ROOMS[room]


def test_a_folder_includes_only_those_above_it() -> None:
    files = [path for path in SOURCES + HEADERS if path.parent != CSRC]
    found = {name_of(path): wrong_includes(path.read_text(), path.relative_to(CSRC).parts[0]) for path in files}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_no_two_folders_include_each_other() -> None:
    above: set[str] = {"engine_interface.h"}
    for room, needs in ROOMS.items():
        assert needs <= above, f"{room} stands above {needs - above}"
        above.add(room)


def test_this_test_sees_wrong_includes() -> None:
    assert wrong_includes('#include <vector>\n#include "engine/engine.h"', "planes") == {"engine"}
    assert wrong_includes('#include "engine_interface.h"', "xla") == {"engine_interface.h"}
    assert wrong_includes('#include "planes/plane.h"\n#include "memory/arena.h"', "planes") == set()


def first_include(source: Path) -> str:
    found = re.search(r'^#include\s*[<"]([^>"]+)', source.read_text(), re.MULTILINE)
    return "" if found is None else found[1]


def test_a_header_is_what_its_source_includes_first() -> None:
    """So whoever builds the library has compiled it alone."""
    for header in HEADERS:
        assert "\n#pragma once\n" in header.read_text(), header
        source = header.with_suffix(".cc")
        if source.exists():
            assert first_include(source) in (header.name, name_of(header)), source


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine: apt-get install g++")
@pytest.mark.soak
def test_a_header_without_a_source_compiles_alone(tmp_path: Path) -> None:
    nanobind = pytest.importorskip("nanobind", reason="nanobind is not installed: make dev")
    folders = [f"-I{folder}" for folder in (CSRC, nanobind.include_dir(), sysconfig.get_paths()["include"])]
    headers = [header for header in HEADERS if not header.with_suffix(".cc").exists()]
    assert headers

    def complaints(header: Path) -> str:
        source = tmp_path / f"{header.relative_to(CSRC)}".replace("/", "-").replace(".h", ".cc")
        source.write_text(f'#include "{header}"\n')
        command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", *folders, str(source)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(headers, pool.map(complaints, headers), strict=True))
    wrong = {str(header.relative_to(CSRC)): text for header, text in found.items() if text}
    assert not wrong, "\n".join(f"{header}:\n{text}" for header, text in wrong.items())
