"""The program that each rank of `run_ranks` executes: `python rank_main.py FOLDER stop|go-on`."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from support.threads import thread_names

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
STAYS_SECONDS = 30
VANISHES_WITHIN_SECONDS = 5.0


def main(folder: Path, stops_at_failure: bool) -> None:
    rank = next(int(os.environ[variable]) for variable in RANK_VARIABLES if variable in os.environ)
    faulthandler.enable()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # holds again once the interpreter has ended and MPI has not
    faulthandler.register(signal.SIGUSR1)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    stays = True
    with (folder / f"{rank}.calls").open() as calls:
        while stays and (line := calls.readline().split()):
            place, then = line
            stays = then == "stay"
            answer(folder / place, rank, stops_at_failure, stays)


def answer(place: Path, rank: int, stops_at_failure: bool, stays: bool) -> None:
    """Does what a folder says, writes there what has become of it, and ends this process if it fails."""
    output = os.open(place / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        with as_it_was() if stays else contextlib.nullcontext():
            result = call(**pickle.loads((place / "call").read_bytes()))
            shut_down()
        hand_over(place, rank, {"ended": "returned", "result": result})
    except BaseException as error:
        told = {"ended": "raised", "error": traceback.format_exc(), "error_class": type(error).__name__}
        hand_over(place, rank, told)
        if isinstance(error, SystemExit) and not error.code:
            raise
        if not stops_at_failure:
            leave_like_python(error)
        # If this process ended now, mpirun would end the others before they can tell what they saw.
        traceback.print_exc()
        time.sleep(STAYS_SECONDS)
        os._exit(1)


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Variables, working directory and threads are what they were before, and PyTorch begins with its usual seed."""
    variables, directory, threads = dict(os.environ), Path.cwd(), set(threading.enumerate())
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(torch.Generator().initial_seed())
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(directory)
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join()


def leave_like_python(error: BaseException) -> None:
    """What Python does on the way out, but for the status, at which mpirun would end the other ranks."""
    sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(0)


def call(path: str, module: str, qualname: str, args: tuple[Any, ...], env: dict[str, str], begin: bool) -> Any:
    os.environ.update(env)
    target: Any = loaded(Path(path), module)
    for part in qualname.split("."):
        target = getattr(target, part)
    if begin:
        importlib.import_module("horovodish").init()
    return inspect.unwrap(target)(*args)  # of a test that `on_ranks` has made, what each rank shall do


def loaded(path: Path, name: str) -> ModuleType:
    """The module under the name that it has in the tests' process, so that what it returns can be unpickled there."""
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    parents = name.split(".")[:-1]
    for depth in range(len(parents)):
        parent = ".".join(parents[: depth + 1])
        sys.modules.setdefault(parent, ModuleType(parent))
    specification.loader.exec_module(module)
    gc.freeze()  # so that a later collection does not look at all of TensorFlow
    return module


def shut_down() -> None:
    """Stops the engine if the function has not done so, and checks that nothing of it stays behind."""
    if "horovodish" not in sys.modules:
        return
    import horovodish

    horovodish.shutdown()
    gc.collect()  # a handle in a reference cycle holds on to its engine
    ends_at = time.monotonic() + VANISHES_WITHIN_SECONDS
    while (left := left_behind()) and time.monotonic() < ends_at:
        time.sleep(0.01)
    if left:
        raise AssertionError(f"still there after shutdown(): {', '.join(left)}")


def left_behind() -> list[str]:
    """Threads of the engine, its shared memory and Python threads that this process still has."""
    own = re.compile("horovodish|hvd-")
    native = [f"thread {name}" for task, name in thread_names().items() if own.search(name) and task != os.getpid()]
    python = [f"Python thread {thread.name}" for thread in threading.enumerate() if own.search(thread.name)]
    memory = re.compile(r"/memfd:horovodish\S*")
    opened = [f"open {link}" for link in open_files() if memory.match(link)]
    mapped = [f"mapped {found[0]}" for found in memory.finditer(Path("/proc/self/maps").read_text())]
    return native + python + opened + mapped


def open_files() -> list[str]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(path))
    return links


def hand_over(folder: Path, rank: int, told: dict[str, Any]) -> None:
    """Writes the outcome so that it is either complete or not there."""
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(pickle.dumps(told))
    unfinished.rename(folder / f"{rank}.outcome")


if __name__ == "__main__":
    main(Path(sys.argv[1]), stops_at_failure=sys.argv[2] == "stop")
