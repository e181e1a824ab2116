"""Figures and what stands beside them: the machine, the versions and the command."""

import csv
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def machine(packages: Sequence[str] = ()) -> str:
    """The machine, Python and the installed versions of packages, in one line."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    versions = "".join(f", {package} {version(package)}" for package in packages)
    processor = names[0] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}{versions}"


def command(start: str = "python") -> str:
    """The command that started this; `start` is what came before the script."""
    return " ".join([start, os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def write_csv(rows: "Sequence[DataclassInstance]", path: Path) -> None:
    """Writes one line for each row, under the names of its fields."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
