"""What the launcher says to do about exceptions of ranks that do not say it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovodish.launcher.job.hints import HINTS, hint

MADE_BY = {
    "No module named 'horovod'": "import horovod",
    "No module named 'tensorflow'": """raise ModuleNotFoundError("No module named 'tensorflow'")""",
    "_cuda_setDevice|": "import torch; torch.cuda.set_device(0)",
    "Default process group": "from torch.utils.data import DistributedSampler; DistributedSampler(range(4))",
    "Unknown backend type horovodish": "raise AssertionError('Unknown backend type horovodish')",
    "Unknown backend type (": "import torch.distributed; torch.distributed.init_process_group('horovodisch')",
    "Unable to import backend": "import os; os.environ['KERAS_BACKEND'] = 'tenosrflow'; import keras",
    "DistStoreError": """import datetime, torch.distributed as dist
wait = datetime.timedelta(seconds=1)
dist.TCPStore('localhost', 0, world_size=2, is_master=True, timeout=wait)""",
    "unexpected keyword": "(lambda optimizer: None)('sgd', experimental_run_tf_function=False)",
    "DataLoader worker": """import ctypes, torch.utils.data as data
class Crashes(data.Dataset):
    __len__ = lambda self: 1
    __getitem__ = lambda self, index: ctypes.string_at(0)
next(iter(data.DataLoader(Crashes(), num_workers=1)))""",
    "\\bStopIteration": "import torch.utils.data; torch.utils.data.RandomSampler([])",
    "(?:No such file": "raise FileNotFoundError(2, 'No such file or directory', '/')",
}
"""Code that raises, by the beginning of its pattern."""


RAISE_ALL = """
import json, sys, traceback
def error_of(code):
    try:
        exec(code, {})
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
print(json.dumps([error_of(code) for code in json.load(sys.stdin)]))
"""


def test_exceptions_have_their_hints() -> None:
    """They are real ones, of one process."""
    torch = importlib.util.find_spec("torch") and importlib.import_module("torch")
    made_by = {
        begin: code
        for begin, code in MADE_BY.items()
        if "torch" not in code or (torch and not ("cuda" in code and torch.cuda.is_available()))
    }
    of_a_job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", RAISE_ALL],
        input=json.dumps(list(made_by.values())),
        capture_output=True,
        text=True,
        env={**os.environ, **of_a_job},
    )
    assert ended.returncode == 0, ended.stderr
    errors = json.loads(ended.stdout.splitlines()[-1])
    for begin, error in zip(made_by, errors, strict=True):
        (text,) = [text for pattern, text in HINTS if pattern.startswith(begin)]
        assert hint(error, "a", {"a": "3.11.7"}).startswith(f"hint: {text.partition('{')[0]}"), error


def test_a_hint_comes_before_the_last_line(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(1, "import horovod", mpi=False)
    assert job.finish() == 1
    assert job.stderr.lines[-2].startswith("horovodish: hint: ")
    assert "failed with exit status 1: ModuleNotFoundError: No module named 'horovod'" in job.stderr.lines[-1]


def test_every_hint_is_tried() -> None:
    """All but one here. That one needs several hosts: test_run_on_hosts.py."""
    untried = [pattern for pattern, _ in HINTS if not any(pattern.startswith(begin) for begin in MADE_BY)]
    assert untried == ["No module named '([^']+)'"]


def test_a_missing_module_is_explained_where_hosts_can_differ() -> None:
    error = "ModuleNotFoundError: No module named 'flax'"
    assert hint(error, "a", {"a": "3.11.7"}) == ""
    told = hint(error, "f", {**dict.fromkeys("abcde", "3.11.7"), "f": "3.10.2"})
    assert told.startswith("hint: flax is not installed on f, or Python is another one there. ")
    assert told.endswith("; Python is 3.11.7 on a, b, c, d and 1 more; 3.10.2 on f")


def test_a_missing_file_is_explained_if_it_has_come_since(tmp_path: Path) -> None:
    errors = (
        f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/data.csv'",
        f"FileNotFoundError: [Errno 2] Unable to synchronously open file (unable to open file: name = "
        f"'{tmp_path}/data.csv', errno = 2, error message = 'No such file or directory')",
        f"ValueError: File not found: filepath={tmp_path}/data.csv. Please ensure the file is an accessible `.keras`",
    )
    assert {hint(error, "a", {"a": "3.11.7"}) for error in errors} == {""}
    (tmp_path / "data.csv").touch()
    (told,) = {hint(error, "a", {"a": "3.11.7"}) for error in errors}
    assert told.startswith(
        f"hint: by now there is a file {tmp_path}/data.csv. If another rank writes it, call hvd.barr"
    )


def test_an_iterator_without_an_item_is_explained() -> None:
    assert hint("StopIteration: ", "a", {"a": "3.11.7"}).startswith("hint: this rank may have no batch")


def test_other_exceptions_have_no_hint() -> None:
    for error in ("ValueError: no", "ModuleNotFoundError: No module named 'horovodish'", ""):
        assert hint(error, "a", {"a": "3.11.7"}) == ""
