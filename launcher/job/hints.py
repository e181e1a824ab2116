"""Remedies for exceptions of ranks that do not name one: one table."""

import os
import re
from collections.abc import Mapping

from horovodish.launcher.hosts.allocation import listed

HINTS = (
    (
        r"No module named 'horovod'",
        "the script is written for Horovod: start it with `horovodish run --as-horovod`, or import horovodish in it",
    ),
    (
        r"No module named '([^']+)'",
        "{0} is not installed on {host}, or Python is another one there. The same environment must be at the same "
        "place on every host; Python is {pythons}",
    ),
    (
        r"No module named 'tensorflow'",
        "install tensorflow; if the script uses Keras with another backend, KERAS_BACKEND=jax or KERAS_BACKEND=torch "
        "chooses it",
    ),
    (
        r"_cuda_setDevice|not compiled with CUDA|no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device",
        "there is no GPU on {host} that the framework can use; `horovodish check` on {host} says why",
    ),
    (
        r"Default process group has not been initialized",
        "torch.distributed has no process group. For DistributedDataParallel, call "
        'torch.distributed.init_process_group("horovodish") first. With hvd.DistributedOptimizer none is needed: '
        "give a DistributedSampler num_replicas=hvd.size(), rank=hvd.rank()",
    ),
    (
        r"Unknown backend type horovodish\b",
        "this PyTorch does not know the backend by itself: import horovodish.torch.backend before init_process_group()",
    ),
    (
        r"Unknown backend type (horovod\w*|hvd)\b",
        "there is no backend {0}: it is called horovodish",
    ),
    (
        r"Unable to import backend : (\S+)",
        "KERAS_BACKEND is {0}; Keras has the backends tensorflow, torch and jax",
    ),
    (
        r"DistStoreError: Timed out .* clients joined",
        "a rank has not called init_process_group(): every rank must call it, within its timeout",
    ),
    (
        r"unexpected keyword argument '(experimental_run_tf_function)'",
        "leave {0} out: Keras 3 has no such argument, and needs none",
    ),
    (
        r"DataLoader worker .* (?:is killed by signal|exited unexpectedly)",
        "if the code of the data set crashes, num_workers=0 shows its line. Workers are also killed where memory or "
        "/dev/shm is full",
    ),
    (
        r"\bStopIteration:?\s*$|num_samples should be a positive integer value, but got num_samples=0",
        "this rank may have no batch: its data set or its part of it is empty. Give every rank at least one batch, for "
        "example with fewer ranks or a smaller batch size",
    ),
    (
        r"(?:No such file or directory: '|unable to open file: name = '|File not found: filepath=)(?P<file>[^']+?)"
        r"(?:'|\. Please|$)",
        "by now there is a file {0}. If another rank writes it, call hvd.barrier() on every rank between writing it "
        "and reading it",
    ),
)
"""A pattern in the text of the exception, and the hint. `{pythons}` keeps a hint to jobs on several hosts, and a group
`file` keeps it to files that exist by now."""


def hint(error: str, host: str, pythons: Mapping[str, str]) -> str:
    """The remedy for an exception; empty if none is known.

    Args:
        error: class and message.
        host: where it was raised.
        pythons: the version of Python by host.
    """
    for pattern, text in HINTS:
        found = re.search(pattern, error)
        if not found or not os.path.exists(found.groupdict().get("file", os.curdir)):
            continue
        if "{pythons}" not in text or len(pythons) > 1:
            return "hint: " + text.format(*found.groups(), host=host, pythons=_in_words(pythons))
    return ""


def _in_words(pythons: Mapping[str, str]) -> str:
    hosts: dict[str, list[str]] = {}
    for host, version in sorted(pythons.items()):
        hosts.setdefault(version, []).append(host)
    return "; ".join(f"{version} on {listed(names)}" for version, names in hosts.items())
