"""Where this project's sources lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "tests" / "support" / "startup"
"""Has a `sitecustomize.py`, for PYTHONPATH."""
CORE = ROOT / "horovodish"
CSRC = CORE / "csrc"
LAUNCHER = ROOT / "launcher"
FRAMEWORKS = ROOT / "frameworks"
CLUSTERS = ROOT / "clusters"


def python_files(folder: Path) -> list[Path]:
    """The Python files below `folder`, without those that lie behind a link."""
    found = sorted(folder.rglob("*.py"))
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]
