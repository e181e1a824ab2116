"""The report of `horovodish check`: what is installed, whether ranks can be started, and what to do."""

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodish.errors import LaunchError, RankLostError, SettingError
from horovodish.launcher.hosts.schedulers import given_allocation
from horovodish.launcher.mpirun.command import Mpirun
from horovodish.launcher.mpirun.installation import Library, candidates, find_library, inspect, matching, with_home
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.report import libraries, links
from horovodish.launcher.report.round_trip import round_trip
from horovodish.runtime import nccl_library
from horovodish.settings import load
from horovodish.supported import FRAMEWORKS
from horovodish.version import __version__

MISSING = "not found"
OLDEST_TORCH = (2, 1)
EXTRAS = {"cloudpickle": ("cloudpickle", "horovodish.run()"), "yaml": ("PyYAML", "--config-file")}
"""Packages that the launcher needs for some of its functions, by module."""


@dataclass
class Report:
    """The findings, in the order that they are printed.

    Attributes:
        found: what and where, by name; some names occur more than once.
        problems: why ranks cannot be started, each with its remedy.
        hints: what is missing or does not fit together, but keeps no rank from starting.
    """

    found: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, name: str, text: object) -> None:
        """Notes what was found."""
        self.found.append((name, str(text)))

    def as_text(self) -> str:
        """For people."""
        lines = [f"{name:<12} {text}" for name, text in self.found]
        if self.problems:
            lines += ["", "Ranks cannot be started:", *map(_item, self.problems)]
        if self.hints:
            lines += ["", "Worth knowing:", *map(_item, self.hints)]
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs."""
        found: dict[str, list[str]] = {}
        for name, text in self.found:
            found.setdefault(name, []).append(text)
        return json.dumps({"found": found, "problems": self.problems, "hints": self.hints}, indent=2)


def check(environ: Mapping[str, str], *, as_json: bool = False, options: LaunchOptions | None = None) -> int:
    """Prints what is installed and what to do; any process can call it. Starts two ranks if there is what they need.

    Args:
        environ: of the user.
        as_json: whether to print it as JSON.
        options: that name hosts, whose links are measured too; None: none.

    Returns:
        The exit status: 0 if ranks can be started here, and on the hosts, and 1 if not.
    """
    report = gathered(environ)
    if options and not report.problems:
        _add_links(report, options, environ)
    print(report.as_json() if as_json else report.as_text(), flush=True)
    return 1 if report.problems else 0


def _add_links(report: Report, options: LaunchOptions, environ: Mapping[str, str]) -> None:
    try:
        lines, problems = links.in_words(links.measured(options, environ))
    except (LaunchError, RankLostError) as problem:
        lines, problems = [], [str(problem)]
    for line in lines:
        report.add("link", line)
    report.problems += problems


def gathered(environ: Mapping[str, str]) -> Report:
    """The findings that `check` prints. Takes some seconds, because two ranks are started."""
    report = Report()
    environ = with_home(environ)
    _add_python(report)
    _add_horovod(report)
    _add_frameworks(report)
    _add_settings(report, environ)
    _add_mpi(report, environ)
    if not report.problems:
        try:
            report.add("round trip", round_trip(environ))
        except LaunchError as problem:
            report.add("round trip", "failed")
            report.problems.append(str(problem))
    return report


def _add_python(report: Report) -> None:
    report.add("horovodish", __version__)
    engine = importlib.util.find_spec("horovodish._native")
    report.add("engine", engine.origin if engine else "not built")
    if engine is None:
        report.problems.append(f"the native engine is not built for {sys.executable}; install horovodish with its pip")
    report.add("python", f"{platform.python_version()} {sys.executable}")
    report.add("cores", len(os.sched_getaffinity(0)))
    for module, (distribution, use) in EXTRAS.items():
        found = libraries.package(module, distribution)
        report.add(distribution, found or "not installed")
        if found is None:
            report.hints.append(f"{use} needs {distribution}: pip install {distribution}")


def _add_horovod(report: Report) -> None:
    for distribution in (libraries.NAMES, libraries.REAL):
        if found := libraries.package("horovod", distribution):
            report.add(distribution, found)
    if problem := libraries.conflict():
        report.problems.append(problem)


def _add_frameworks(report: Report) -> None:
    frameworks = {name: libraries.package(name, *row.distributions) for name, row in FRAMEWORKS.items()}
    for name, found in frameworks.items():
        report.add(name, found or "not installed")
        if found and importlib.util.find_spec(f"horovodish.{name}") is None:
            report.hints.append(f"there is no horovodish.{name} yet")
    if not any(frameworks.values()):
        report.hints.append("no framework is installed: only NumPy arrays can be reduced; pip install torch")
    driver = libraries.cuda_driver()
    report.add("CUDA driver", f"supports CUDA {_dotted(driver)}" if driver else MISSING)
    nccl = nccl_library.find()
    report.add("NCCL", nccl or MISSING)
    report.hints += nccl_hints(nccl, driver)
    if frameworks["torch"]:
        report.hints += torch_hints(frameworks["torch"], libraries.torchs_cuda(frameworks["torch"]), driver)


def nccl_hints(nccl: nccl_library.Found | None, driver: tuple[int, int] | None) -> list[str]:
    """The problem that keeps CUDA tensors from being reduced.

    Args:
        nccl: the library that would be used.
        driver: the newest CUDA that the driver supports, None without a driver.
    """
    oldest = _dotted(nccl_library.OLDEST)
    if driver is None:
        return []
    if nccl is None:
        return [f"CUDA tensors need NCCL {oldest} or later: pip install nvidia-nccl-cu{min(driver[0], 13)}"]
    if nccl.too_old:
        return [f"CUDA tensors need NCCL {oldest} or later, and this is {nccl}: install a newer one where it is from"]
    return []


def torch_hints(torch: libraries.Package, cuda: tuple[int, int] | None, driver: tuple[int, int] | None) -> list[str]:
    """Hints about software that does not fit together with PyTorch.

    Args:
        torch: the installed one.
        cuda: what it is built for.
        driver: the newest CUDA that the driver supports.
    """
    hints = []
    if torch.number < OLDEST_TORCH:
        hints.append(f"horovodish.torch needs torch {_dotted(OLDEST_TORCH)} or later, and this is {torch.version}")
    if cuda and driver is None:
        hints.append(f"torch is built for CUDA {_dotted(cuda)}, but there is no CUDA driver: it computes on CPUs")
    if cuda and driver and cuda[0] > driver[0]:
        hints.append(
            f"torch is built for CUDA {_dotted(cuda)}, but the driver supports {_dotted(driver)}: "
            f"update the driver, or install a torch for CUDA {driver[0]}"
        )
    return hints


def _add_settings(report: Report, environ: Mapping[str, str]) -> None:
    try:
        load(environ, warn=report.hints.append)
        given = given_allocation(environ)
    except SettingError as problem:
        report.problems.append(str(problem))
        return
    if given:
        report.add("hosts", f"{given.source}: {', '.join(host.name for host in given.hosts)} with {given.slots} slots")


def _add_mpi(report: Report, environ: Mapping[str, str]) -> None:
    try:
        library = find_library(environ)
    except LaunchError as problem:
        library = Library(None, None, None, str(problem))
    report.add("mpi4py", library.mpi4py or "not installed")
    report.add("MPI library", f"{library.library} {library.path or ''}".rstrip() if library.library else MISSING)
    mpiruns = [inspect(path, environ) for path in candidates(environ)]
    for mpirun in mpiruns:
        report.add("mpirun", mpirun)
    if not mpiruns:
        report.add("mpirun", MISSING)
    try:
        taken = matching(library, mpiruns)
    except LaunchError as problem:
        report.add("pairing", "none")
        report.problems.append(str(problem))
        return
    report.add("pairing", f"mpi4py and mpirun match: `horovodish run` uses {taken.path}")
    first = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    report.hints += mpirun_hints(taken, next((mpirun for mpirun in mpiruns if mpirun.path == first), None))


def mpirun_hints(taken: Mpirun, first: Mpirun | None) -> list[str]:
    """Hints if the first mpirun on PATH does not fit the one that `horovodish run` takes.

    Args:
        taken: the one that `horovodish run` takes.
        first: the first on PATH, if there is one.
    """
    if first is None or first.family == taken.family:
        return []
    return [
        f"without horovodish run, start ranks with {taken.path}: the mpirun that comes first on PATH, {first}, "
        "belongs to another MPI than mpi4py's, and every rank would be alone"
    ]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _item(text: str) -> str:
    return "- " + text.replace("\n", "\n  ")
