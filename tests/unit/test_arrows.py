"""Imports go one way: frameworks -> core <- launcher, and no further."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from horovodish import supported
from support.sources import CLUSTERS, CORE, FRAMEWORKS, LAUNCHER, ROOT, python_files

ROOMS = {f"horovodish.{init.parent.name}" for init in CORE.glob("*/__init__.py")}
FRAMEWORK_MODULES = {*supported.FRAMEWORKS, "flax", "optax"}
COMPANIONS = {"jax": {"optax"}}  # what a framework's shim may import besides it
FLOORS = (
    {"_native", "errors", "package_names", "source_tree", "version"},
    {"settings"},
    {"launch"},
    {"mpi", "supported"},
    {"runtime"},
    {"collectives"},
    {"gradients"},
    {"predictions"},
    {"reports"},
    {"elastic"},
    {"process_api"},
    {"__init__", "as_horovod"},
)
"""The folders and files of the core. Each needs only folders and files of the floors before its own."""
CORE_NEEDS = {"horovodish", "numpy"}
CORE_IMPORTS_WHEN_USED = {
    "run_function.py": {"horovodish.launcher.function"},
    "pickling.py": {"cloudpickle"},
    "quantities.py": {"yaml"},
}
LAUNCHER_IMPORTS_WHEN_USED = {
    "config_file.py": {"yaml"},
    "call.py": {"cloudpickle"},
    "cli.py": {"horovodish.reports.page", "horovodish.reports.prediction"},
    "run_report.py": {"horovodish.reports.page"},
    "metrics.py": {"prometheus_client", "prometheus_client.core"},
    "watch.py": {"rich.console", "rich.live", "rich.table", "rich.text"},
}
LAUNCHER_ROOMS: dict[str, set[str]] = {
    "hosts": set(),
    "supervisor": set(),
    "mpirun": {"hosts", "options", "own_python"},
    "job": {"hosts", "mpirun", "options", "supervisor"},
    "elastic": {"agents", "hosts", "job", "options", "supervisor"},
    "agents": {"hosts", "job", "mpirun", "options", "own_python", "supervisor"},
    "report": {"function", "hosts", "job", "mpirun", "options", "own_python"},
    "status": {"hosts", "job", "supervisor"},
    "function": {"agents", "flags", "hosts", "job", "options", "own_python", "run", "supervisor"},
}
"""What the modules of each folder of the launcher may import from the rest of it."""
LAUNCHER_NEEDS = {
    f"horovodish.{name}"
    for name in (
        "errors",
        "launcher",
        "launch.output_files",
        "reports.merge_traces",
        "runtime.nccl_library",
        "settings",
        "supported",
        "version",
    )
}


def imports(source: str, *, inside_functions: bool = True) -> set[str]:
    """The full names of all modules that the source imports when it runs, at whatever depth."""
    found = set()
    for node in nodes_that_run(ast.parse(source), inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            module = node.module or ""
            # "from horovodish import errors" imports horovodish.errors.
            is_room = module == "horovodish" or module in ROOMS
            found |= {f"{module}.{alias.name}" for alias in node.names} if is_room else {module}
    return found


def nodes_that_run(node: ast.AST, *, inside_functions: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return
    if isinstance(node, ast.FunctionDef) and not inside_functions:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_that_run(child, inside_functions=inside_functions)


def is_below(module: str, parents: set[str]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def third_party(modules: set[str]) -> set[str]:
    return {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}


def when_used(source: str, modules: set[str]) -> set[str]:
    """Return the modules that the source imports only inside of functions."""
    return modules - imports(source, inside_functions=False)


def wrong_in_core(source: str, file: str) -> set[str]:
    allowed = CORE_NEEDS | ({"mpi4py"} if file == "binding.py" else set())
    shims = {f"horovodish.{name}" for name in FRAMEWORK_MODULES | {"launcher"}}
    modules = third_party(imports(source)) - when_used(source, CORE_IMPORTS_WHEN_USED.get(file, set()))
    return {module for module in modules if not is_below(module, allowed) or is_below(module, shims)}


def wrong_between_floors(source: str, room: str) -> set[str]:
    (floor,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    others = set().union(*FLOORS) - set().union(*FLOORS[:floor]) - {room}
    return {module for module in imports(source) if is_below(module, {f"horovodish.{other}" for other in others})}


def wrong_in_launcher(source: str, file: str) -> set[str]:
    modules = third_party(imports(source)) - when_used(source, LAUNCHER_IMPORTS_WHEN_USED.get(file, set()))
    return {module for module in modules if not is_below(module, LAUNCHER_NEEDS)}


def wrong_between_rooms(source: str, room: str) -> set[str]:
    prefix = "horovodish.launcher."
    others = {module.removeprefix(prefix).split(".")[0] for module in imports(source) if module.startswith(prefix)}
    return others - {room} - LAUNCHER_ROOMS[room]


def wrong_in_framework(modules: set[str], own: str) -> set[str]:
    others = FRAMEWORK_MODULES - {own} - COMPANIONS.get(own, set())
    forbidden = others | {f"horovodish.{name}" for name in others | {"launcher", "mpi"}} | {"mpi4py"}
    return {module for module in third_party(modules) if is_below(module, forbidden)}


def loads_settings(source: str) -> bool:
    """Whether the source calls `settings.load` or imports that function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "horovodish.settings":
            if "load" in {alias.name for alias in node.names}:
                return True
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("settings.load"):
            return True
    return False


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def wrong_below(folder: Path, wrong: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """The files that import what they must not, and what that is."""
    return {name_of(path): modules for path in python_files(folder) if (modules := wrong(path))}


def test_the_core_needs_no_framework_and_no_launcher() -> None:
    assert wrong_below(CORE, lambda path: wrong_in_core(path.read_text(), path.name)) == {}


def test_the_rooms_of_the_core_need_only_those_of_lower_floors() -> None:
    def wrong(path: Path) -> set[str]:
        return wrong_between_floors(path.read_text(), path.relative_to(CORE).parts[0].removesuffix(".py"))

    assert wrong_below(CORE, wrong) == {}


def test_no_import_of_the_core_leads_back_to_its_file() -> None:
    """Not even one inside of a function or for types alone."""
    graph = {}
    for path in python_files(CORE):
        parts = path.relative_to(CORE.parent).with_suffix("").parts
        every_import = imports(path.read_text().replace("if TYPE_CHECKING:", "if True:"))
        graph[".".join(parts).removesuffix(".__init__")] = every_import
    TopologicalSorter(graph).prepare()  # a CycleError names the files


def test_the_launcher_needs_settings_and_errors_alone() -> None:
    assert wrong_below(LAUNCHER, lambda path: wrong_in_launcher(path.read_text(), path.name)) == {}


def test_a_folder_of_the_launcher_needs_only_those_below_it() -> None:
    for init in LAUNCHER.glob("*/__init__.py"):
        room = init.parent.name
        assert wrong_below(init.parent, lambda path: wrong_between_rooms(path.read_text(), room)) == {}  # noqa: B023


def test_a_framework_needs_no_other_framework() -> None:
    def wrong(path: Path) -> set[str]:
        folders = path.relative_to(FRAMEWORKS).parent.parts
        own = next(name for name in reversed(folders) if name in FRAMEWORK_MODULES)  # tensorflow/keras is keras's
        return wrong_in_framework(imports(path.read_text()), own)

    assert wrong_below(FRAMEWORKS, wrong) == {}


def test_a_cluster_needs_no_framework_and_nobody_needs_a_cluster() -> None:
    names = {path.name: {path.name} for path in CLUSTERS.iterdir()} | {"spark": {"pyspark"}}

    def wrong(path: Path) -> set[str]:
        own = path.relative_to(CLUSTERS).parts[0]
        needs = names[own] | {f"horovodish.{name}" for name in (own, "errors", "launch", "launcher")}
        return {module for module in third_party(imports(path.read_text())) if not is_below(module, needs)}

    assert wrong_below(CLUSTERS, wrong) == {}
    shims = {f"horovodish.{name}" for name in names}
    for folder in (CORE, LAUNCHER, FRAMEWORKS):
        assert (
            wrong_below(folder, lambda path: {each for each in imports(path.read_text()) if is_below(each, shims)})
            == {}
        )


def test_init_alone_reads_the_settings() -> None:
    """All others read the running engine's settings, which the ranks have compared. MPI starts before the engine."""
    readers = [path for path in (*python_files(CORE), *python_files(FRAMEWORKS)) if loads_settings(path.read_text())]
    assert list(map(name_of, readers)) == ["horovodish/mpi/late_ranks.py", "horovodish/runtime/starting.py"]


def test_these_tests_see_wrong_imports() -> None:
    assert wrong_in_core("def f():\n    import torch.nn", "basics.py") == {"torch.nn"}
    assert wrong_in_core("from horovodish import launcher", "basics.py") == {"horovodish.launcher"}
    assert wrong_in_core("import mpi4py.MPI", "basics.py") == {"mpi4py.MPI"}
    assert wrong_in_core("import mpi4py.MPI", "binding.py") == set()
    assert wrong_in_core("if TYPE_CHECKING:\n    import mpi4py.MPI", "basics.py") == set()
    lazy = "from horovodish.launcher.function import run_function"
    assert wrong_in_core(f"def f():\n    {lazy}", "run_function.py") == set()
    assert wrong_in_core(lazy, "run_function.py") == {"horovodish.launcher.function"}
    assert wrong_in_core(f"def f():\n    {lazy}", "basics.py") == {"horovodish.launcher.function"}
    assert wrong_between_floors("from horovodish.elastic import loop", "collectives") == {"horovodish.elastic.loop"}
    assert wrong_between_floors("from horovodish import errors, process_api", "mpi") == {"horovodish.process_api"}
    assert wrong_between_floors("from horovodish.collectives.arrays import ARRAYS", "collectives") == set()
    assert wrong_in_launcher("from horovodish.runtime.basics import rank", "run.py") == {"horovodish.runtime.basics"}
    assert wrong_in_launcher("import numpy", "run.py") == {"numpy"}
    assert wrong_in_launcher("def f():\n    import yaml", "run.py") == {"yaml"}
    assert wrong_in_launcher("def f():\n    import yaml", "config_file.py") == set()
    assert wrong_in_launcher("import yaml", "config_file.py") == {"yaml"}
    assert wrong_between_rooms("from horovodish.launcher.job.job import Job", "hosts") == {"job"}
    assert wrong_between_rooms("from horovodish.launcher.job import job", "mpirun") == {"job"}
    assert wrong_between_rooms("from horovodish.launcher.hosts.allocation import Host", "job") == set()
    assert wrong_in_framework(imports("import jax.numpy"), "torch") == {"jax.numpy"}
    assert wrong_in_framework(imports("import torch"), "torch") == set()
    assert wrong_in_framework(imports("import optax"), "torch") == {"optax"}
    assert wrong_in_framework(imports("import optax"), "jax") == set()
    assert loads_settings("def f():\n    return settings.load().spin_us")
    assert loads_settings("import horovodish\nx = horovodish.settings.load")
    assert loads_settings("from horovodish.settings import load, table")
    assert not loads_settings("from horovodish.settings import table\nimport json\njson.load(file)")
