"""Builds horovodish: maps the folders to packages and compiles the native engine. Metadata stands in pyproject.toml."""

import sys
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# Where each package really lies. The links horovodish/launcher and horovodish/torch serve editors and checkers only.
PACKAGE_DIR = {
    "horovodish": "horovodish",
    "horovodish.launcher": "launcher",
    "horovodish.torch": "frameworks/torch",
}
ROOT = Path(__file__).parent.resolve()
CSRC = Path("horovodish/csrc")


def packages() -> list[str]:
    """Every mapped package that is there, with its subpackages; links are not followed."""
    found = []
    for package, folder in PACKAGE_DIR.items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            inside = init.parent.relative_to(ROOT / folder)
            ancestors = [ROOT / folder / part for part in (inside, *inside.parents) if part != Path()]
            if not any(ancestor.is_symlink() for ancestor in ancestors):
                found.append(".".join([package, *inside.parts]))
    return found


def csrc(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).rglob("*") if path.suffix in suffixes)


def needs_recompile(object_file: str, source: str) -> bool:
    """Whether any file that the compiler read for `object_file`, by its own list (-MMD), is newer or gone."""
    made, listing = Path(object_file), Path(object_file).with_suffix(".d")
    if not made.exists() or not listing.exists():
        return True
    read = listing.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    changed = made.stat().st_mtime
    return any(not Path(path).exists() or Path(path).stat().st_mtime > changed for path in [source, *read])


class BuildExt(build_ext):
    """Keeps the object files of each interpreter under build/, also for editable installs, which else start anew."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = f"build/objects-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


native = Pybind11Extension(
    "horovodish._native",
    csrc(".cc"),
    include_dirs=[str(CSRC)],
    depends=csrc(".h"),  # this alone brings the headers into the sdist
    cxx_std=20,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-MMD"],
    libraries=["pthread", "dl"],
)

ParallelCompile(default=0, needs_recompile=needs_recompile).install()

setup(
    package_dir=PACKAGE_DIR,
    packages=packages(),
    ext_modules=[native],
    cmdclass={"build_ext": BuildExt},
)
