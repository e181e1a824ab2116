"""Worlds that are kept as files, because they have found something."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulation import jobs, programs
from simulation.ranks import Fault
from simulation.trainings import Training

FOLDER = Path(__file__).with_name("kept")


def plain(made: Any) -> dict[str, Any]:
    """A program or a job, for JSON."""
    return {"kind": type(made).__name__, **asdict(made)}


def read(file: Path) -> tuple[Any, Any]:
    """The module that runs what a file holds, and the program or job itself."""
    values = json.loads(file.read_text())
    values["faults"] = tuple(Fault(**each) for each in values["faults"])
    pairs = {name: tuple(values[name]) for name in ("bug", "leaves", "raises", "ends") if values.get(name)}
    values |= pairs
    values["training"] = values.get("training") and Training(**values["training"])
    if values.pop("kind") == "Job":
        stall = values["stall"] and jobs.Stall(**values["stall"])
        return jobs, jobs.Job(**values | {"stall": stall})
    steps = tuple(programs.Step(**each) for each in values["steps"])
    return programs, programs.Program(**values | {"steps": steps, "teams": tuple(map(tuple, values["teams"]))})
