"""The file of `--config-file`: flags by their names, in YAML, at the top or in the sections of Horovod's config files.

np: 8
fusion-threshold-mb: 32
autotune:
  enabled: true
  log-file: autotune.csv
"""

import argparse
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.flags import Parser, did_you_mean
from horovodish.settings import table

# How the flags of a section begin; its keys leave that out.
SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
ENABLED = "enabled"
"""The key in a section for the flag that has the section's name."""


def read(path: str, parser: Parser) -> dict[str, Any]:
    """The settings of the file, as defaults for the parser: values by the `dest` of the flags.

    Raises:
        SettingError: the file cannot be read, or has an unknown key, a key twice or a value that is not accepted; the
            message names the line.
        LaunchError: PyYAML is not installed.
    """
    flags = parser.named
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for section, key, node in _entries(path, _yaml()):
        line = node.start_mark.line + 1
        prefix = SECTIONS.get(section, "")
        name = section if key == ENABLED else prefix + key
        if name not in flags:
            known = [flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)]
            inside = f" in {section}" if section else ""
            raise SettingError(f"{path}, line {line}: there is no key {key}{inside}{did_you_mean(key, known)}")
        action = flags[name]
        if action.dest in lines:
            raise SettingError(f"{path}, line {line}: {key} is set in line {lines[action.dest]} already")
        lines[action.dest] = line
        values[action.dest] = _value(action, node, f"{path}, line {line}: {key}")
    return values


def _entries(path: str, yaml: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """Section (empty at the top), key and node of every entry. Names have dashes, whatever the file has."""
    try:
        with open(path, encoding="utf-8") as file:
            top = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as problem:
        raise SettingError(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise SettingError(f"{path} cannot be read: it is not UTF-8") from problem
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise SettingError(f"{path}{place} is not YAML: {getattr(problem, 'problem', problem)}") from problem
    if top is None or _kind(top) == "null":
        return
    if not isinstance(top, yaml.MappingNode):
        raise SettingError(f"{path}, line 1: the file must consist of lines such as `np: 4`")
    for name, node in top.value:
        key = str(name.value).replace("_", "-")
        if isinstance(node, yaml.MappingNode) and key in SECTIONS:
            yield from ((key, str(inner.value).replace("_", "-"), value) for inner, value in node.value)
        else:
            yield "", key, node


def _kind(node: Any) -> str:
    """The type that YAML sees in a node, such as "bool" or "seq"."""
    return str(node.tag).rpartition(":")[2]


def _value(action: argparse.Action, node: Any, place: str) -> Any:
    text, kind = node.value, _kind(node)
    if kind in ("map", "seq", "null"):
        what = {"map": "further keys", "seq": "a list", "null": "no value"}[kind]
        raise SettingError(f"{place} has {what}, but takes one value")
    row = next((row for row in table() if row.name == action.dest), None)
    if row is not None and action.const is None:
        value = row.parse(text, place)
        return value if row.is_switch else text
    if action.nargs == 0:
        if kind != "bool":
            raise SettingError(f"{place}={text!r} is not accepted: it is true or false")
        on = text.lower() in ("true", "yes", "on")
        return on if isinstance(action, argparse.BooleanOptionalAction) else action.const if on else action.default
    try:
        return action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError) as problem:
        raise SettingError(f"{place}: {problem}") from problem


def _yaml() -> ModuleType:
    try:
        import yaml  # only those who have such a file need it
    except ModuleNotFoundError as missing:
        raise LaunchError("--config-file needs PyYAML; install it: pip install PyYAML") from missing
    module: ModuleType = yaml
    return module
