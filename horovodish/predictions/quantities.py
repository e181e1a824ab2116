"""Numbers with units, and YAML files of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LARGEST", "QuantityError", "bandwidth", "count", "read_yaml", "seconds", "size"]

_NUMBER = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_COUNTS = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}

_SMALLEST, LARGEST = 1e-12, 1e24
"""The limits of a quantity, in seconds, bytes or pieces."""

_LINES = "the file must consist of lines such as `latency: 20 us`"


class QuantityError(ValueError):
    """A file or a flag has a value that makes no sense. The message names the place and the remedy."""


def _parsed(given: Any, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(str(given).strip())
    try:
        value = float(found[1]) * units[found[2].strip()] if found else -1.0
    except (KeyError, ValueError):
        value = -1.0
    if value and not _SMALLEST <= value <= LARGEST:
        raise QuantityError(f"{given!r} is not accepted: write it with its unit, such as {example}")
    return value


def seconds(given: Any) -> float:
    """Return the seconds of "20 us" or "90 ms"."""
    return _parsed(given, _SECONDS, "20 us, 90 ms or 2 h")


def size(given: Any) -> float:
    """Bytes, of "80 GB"."""
    return _parsed(given, {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}, "4 MB or 80 GB")


def bandwidth(given: Any) -> float:
    """Bytes per second, of "25 Gbit/s" or "10 GB/s"."""
    units = {f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()}
    units |= {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()}
    return _parsed(given, units, "25 Gbit/s or 10 GB/s")


def count(given: Any) -> float:
    """Return the number that "25.6 M" or 8 stands for."""
    return _parsed(given, _COUNTS, "8, 25.6 M or 7 B")


def read_yaml(path: Path, keys: Mapping[str, Callable[[Any], Any]], needed: frozenset[str]) -> dict[str, Any]:
    """The values of a file of lines such as `latency: 20 us`.

    Args:
        path: of the file.
        keys: what makes a value of the text, by key.
        needed: keys that must be there.

    Raises:
        QuantityError: the file cannot be read, has an unknown key or a bad value, or lacks a key. The message names the
            line.
    """
    try:
        import yaml  # an extra
    except ModuleNotFoundError as missing:
        raise QuantityError("horovodish predict needs PyYAML; install it: pip install PyYAML") from missing
    try:
        top: Any = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as problem:
        raise QuantityError(f"{path} cannot be read: {getattr(problem, 'strerror', 'it is not UTF-8')}") from problem
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        what = str(getattr(problem, "problem", problem)).splitlines()[0]
        raise QuantityError(f"{path}{place} is not YAML: {what}") from problem
    except RecursionError as problem:
        raise QuantityError(f"{path} has too many brackets in brackets: {_LINES}") from problem
    if not isinstance(top, yaml.MappingNode):
        raise QuantityError(f"{path}, line 1: {_LINES}")
    values: dict[str, Any] = {}
    for name, node in top.value:
        key, place = name.value, f"{path}, line {name.start_mark.line + 1}"
        if not isinstance(name, yaml.ScalarNode):
            raise QuantityError(f"{place}: a key is one of {', '.join(keys)}")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            known = f"; did you mean {near[0]}?" if near else f"; the keys are {', '.join(keys)}"
            raise QuantityError(f"{place}: there is no key {key!r}{known}")
        if key in values:
            raise QuantityError(f"{place}: {key} is there twice")
        if not isinstance(node, yaml.ScalarNode):
            raise QuantityError(f"{place}: {key} takes one value")
        try:
            values[key] = keys[key](node.value)
        except QuantityError as problem:
            raise QuantityError(f"{place}: {key}: {problem}") from problem
    if missing_keys := sorted(needed - values.keys()):
        raise QuantityError(f"{path} lacks {', '.join(missing_keys)}")
    return values
