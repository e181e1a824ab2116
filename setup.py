"""Builds horovodish: maps the folders to packages and compiles the native parts. Metadata stands in pyproject.toml."""

import sys
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Where each package really lies. The links of these names in horovodish/ serve editors and checkers only.
PACKAGE_DIR = {
    "horovodish": "horovodish",
    "horovodish.launcher": "launcher",
    "horovodish.tensorflow": "frameworks/tensorflow",
    "horovodish.jax": "frameworks/jax",
    "horovodish.keras": "frameworks/keras",
    "horovodish.torch": "frameworks/torch",
}
ROOT = Path(__file__).parent.resolve()
CSRC = Path("horovodish/csrc")
TENSORFLOW = CSRC / "tensorflow"
WARNINGS = ["-Wall", "-Wextra"]


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


def files(folder: Path, suffix: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(f"*{suffix}"))


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
    [path for path in files(CSRC, ".cc") if TENSORFLOW not in Path(path).parents],
    include_dirs=[str(CSRC)],
    depends=files(CSRC, ".h"),  # this alone brings the headers into the sdist
    cxx_std=20,
    extra_compile_args=["-O3", *WARNINGS, "-ffp-contract=off", "-MMD"],
    libraries=["pthread", "dl"],
)
# No module of Python's: TensorFlow opens it. What it needs of TensorFlow is there by then.
tensorflow_ops = Extension(
    "horovodish._tensorflow_ops",
    files(TENSORFLOW, ".cc"),
    include_dirs=[str(CSRC)],
    depends=files(CSRC, ".h"),
    language="c++",
    extra_compile_args=["-std=c++20", "-O2", *WARNINGS, "-fvisibility=hidden", "-MMD"],
)

ParallelCompile(default=0, needs_recompile=needs_recompile).install()

setup(
    package_dir=PACKAGE_DIR,
    packages=packages(),
    ext_modules=[native, tensorflow_ops],
    cmdclass={"build_ext": BuildExt},
)
