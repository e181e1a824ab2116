"""Keeps `torch.compile` from tracing our Python functions, because they hand the memory of tensors to the engine."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import Any

import horovodish
from horovodish.runtime import basics

__all__: list[str] = []

_TRACED = {"process_api", "runtime"}  # rank(), size() and the like, which become constants of a graph

_told: list[Any] = []


def tell_dynamo(_: Any = None) -> None:
    """Have Dynamo leave our functions to Python, once Dynamo is imported.

    Dynamo traces every Python function that a compiled function runs, and the hooks that a `backward()` in it calls.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or rules in _told or not hasattr(rules, "SKIP_DIRS"):
        return
    _told.append(rules)
    root = Path(horovodish.__path__[0])
    modules = [module for module in pkgutil.iter_modules([str(root)]) if module.name not in _TRACED]
    rules.SKIP_DIRS += [str(root / module.name) + ("/" if module.ispkg else ".py") for module in modules]
    rules.add("horovodish.torch")  # makes one regular expression of all


# Dynamo is imported by torch.compile(), and by the first optimizer: hence also in DistributedOptimizer.
tell_dynamo()
basics.follow(started=tell_dynamo)
