"""Builds horovodish: maps the folders to packages and compiles the native parts. Metadata stands in pyproject.toml."""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).parent.resolve()
# Where each package really lies.
PACKAGE_DIR = {
    "horovodish": "horovodish",
    "horovodish.launcher": "launcher",
    **{
        f"horovodish.{init.parent.name}": f"{init.parent.relative_to(ROOT)}"
        for init in sorted([*ROOT.glob("frameworks/*/__init__.py"), *ROOT.glob("clusters/*/__init__.py")])
    },
}
CSRC = Path("horovodish/csrc")
REPOSITORY = "https://github.com/horovodish/horovodish"


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


def link_mapped_folders() -> None:
    """For editors and checkers, which look for `horovodish.torch` in horovodish/torch. Git ignores the links."""
    for package, folder in PACKAGE_DIR.items():
        link = ROOT / package.replace(".", "/")
        if not link.exists():
            link.unlink(missing_ok=True)  # it leads nowhere
            link.symlink_to(Path("..", folder))


def readme() -> str:
    """README.md for PyPI, where links relative to the repository lead nowhere."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith(".svg") else "blob"
        return f"]({REPOSITORY}/{kind}/main/{match[1]})"

    return re.sub(r"\]\((?!https?:)([^)]+)\)", link, (ROOT / "README.md").read_text())


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


def rooms(sources: list[str]) -> list[str]:
    """A source for each folder, which includes the sources there: most of the time goes into the headers they share."""
    made = []
    for folder in sorted({Path(source).parent for source in sources}):
        path = ROOT / "build" / "rooms" / f"{'_'.join(folder.relative_to(CSRC.parent).parts)}.cc"
        inside = [Path(source).relative_to(CSRC) for source in sources if Path(source).parent == folder]
        text = "".join(f'#include "{source}"\n' for source in inside)
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made.append(str(path.relative_to(ROOT)))
    return made


OBJECTS = f"build/objects-{sysconfig.get_platform()}"
BINDINGS = files(CSRC / "python", ".cc")
OPERATIONS = files(CSRC / "tensorflow", ".cc")
ENGINE = [path for path in files(CSRC, ".cc") if path not in BINDINGS + OPERATIONS]
NANOBIND = f"{nanobind.source_dir()}/nb_combined.cpp"
NANOBIND_HEADERS = [nanobind.include_dir(), f"{nanobind.source_dir()}/../ext/robin_map/include"]
OPTIONS = ["-std=c++20", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off", "-MMD"]
OPTIONS += [f"-isystem{folder}" for folder in NANOBIND_HEADERS]

# `depends` brings the files into the sdist.
native = Extension("horovodish._native", [], depends=BINDINGS + ENGINE + files(CSRC, ".h"), language="c++")
native.libraries = ["pthread", "dl"]
# No module of Python's: TensorFlow opens it. What it needs of TensorFlow is there by then.
tensorflow_ops = Extension("horovodish._tensorflow_ops", [], depends=OPERATIONS + files(CSRC, ".h"), language="c++")


def say(text: str) -> None:
    print(f"horovodish: {text}", file=sys.stderr, flush=True)


def require_compiler() -> None:
    """End with one line if there is no C++ compiler."""
    compiler, *_ = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    if not shutil.which(compiler):
        raise SystemExit(
            f"error: horovodish is compiled when it is installed, and there is no {compiler}: install g++ 12 or later "
            "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or set CXX to another C++20 compiler"
        )


class DistInfo(dist_info):
    """pip asks for the metadata first, so it ends before it downloads a framework that could not be used."""

    def run(self) -> None:
        require_compiler()
        super().run()


class BuildExt(build_ext):
    """Keeps the object files. The bindings are compiled for each interpreter, all other files once."""

    def run(self) -> None:
        super().run()
        if self.inplace:
            link_mapped_folders()

    def build_extensions(self) -> None:
        require_compiler()
        cores = os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            under_way: list[Future[None]] = []

            def compiled(sources: list[str], folder: str, *options: str) -> list[str]:
                made = self.compiler.object_filenames(sources, output_dir=folder)
                outdated = [each for each, path in zip(sources, made, strict=True) if needs_recompile(path, each)]
                under_way.extend(pool.submit(self.compile_one, source, folder, options) for source in outdated)
                return made

            engine = compiled(rooms(ENGINE), OBJECTS, "-O3")
            of_interpreter = f"{OBJECTS}/{sys.implementation.cache_tag}"
            bindings = compiled(BINDINGS, of_interpreter, "-O2", "-fno-strict-aliasing")  # which nanobind asks for
            bindings += compiled([NANOBIND], of_interpreter, "-O2", "-fno-strict-aliasing", "-w")
            operations = compiled(rooms(OPERATIONS), OBJECTS, "-O2")
            if under_way:
                say(f"compiling {len(under_way)} files on {cores} cores (all of them: 1 to 4 minutes on 2 cores)")
            for number, each in enumerate(as_completed(under_way), 1):
                each.result()
                say(f"{number} of {len(under_way)} files are compiled")
        native.extra_objects = bindings + engine
        tensorflow_ops.extra_objects = operations
        super().build_extensions()

    def compile_one(self, source: str, folder: str, options: tuple[str, ...]) -> None:
        given = [*OPTIONS, *options]
        self.compiler.compile([source], output_dir=folder, include_dirs=[str(CSRC)], extra_postargs=given)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    package_dir=PACKAGE_DIR,
    packages=packages(),
    ext_modules=[native, tensorflow_ops],
    cmdclass={"build_ext": BuildExt, "dist_info": DistInfo},
)
