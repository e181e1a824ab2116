"""Sphinx directives whose content comes from the code: the API, settings, errors, flags and examples."""

from __future__ import annotations

import html
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util.docutils import SphinxDirective

import horovodish
from horovodish import elastic, errors, process_api, settings
from horovodish.gradients import compression, sync

ROOT = Path(__file__).parents[2]
SECTIONS = ("Args:", "Attributes:", "Example:", "Raises:", "Returns:", "Yields:")
DEFAULTS = {
    repr(compression.NoneCompressor): "Compression.none",
    repr(horovodish.global_process_set): "global_process_set",
    "ReduceOp.AVERAGE": "Average",
}
GROUPS = {
    settings.TUNING: "Tuning",
    settings.AUTOTUNE: "Autotune",
    settings.STALLS: "Stalls",
    settings.TIMELINE: "Timeline",
    settings.START: "Start",
    settings.COMPATIBILITY: "Compatibility with Horovod",
    settings.OUTPUT: "Output",
}


class FromCode(SphinxDirective):
    """A directive whose `text()` is read as Markdown, with headings."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(self.text(), allow_section_headings=True)

    def text(self) -> str:
        raise NotImplementedError


_PUBLIC = {"horovodish.process_api": "horovodish", "horovodish.gradients.sync": "horovodish.torch"}
"""Where users find the names of a module."""


class Api(FromCode):
    """The public names of a module; of a shim, without those that are the core's own."""

    def text(self) -> str:
        path = self.arguments[0]
        with mock(["pyspark", "ray"]):  # which are too large to install for a page
            module = importlib.import_module(path)
        names = [name for name in module.__all__ if self.is_own(module, name)]
        return "\n\n".join(self.entry(path, name, getattr(module, name)) for name in sorted(names, key=str.lower))

    @staticmethod
    def is_own(module: ModuleType, name: str) -> bool:
        if module is process_api:
            return name not in errors.__all__
        value = getattr(module, name)
        if (
            inspect.isclass(value)
            and value.__module__.startswith("horovodish.keras.")
            and "keras" not in module.__name__
        ):
            return False  # TensorFlow's shim has a layer of Keras
        cores = (process_api, horovodish, elastic, sync)
        of_core = [getattr(core, name, None) for core in cores if core is not module]
        return not any(value is each for each in of_core)

    def entry(self, path: str, name: str, value: Any) -> str:
        if inspect.ismodule(value):  # of Keras's callbacks, whose methods Keras calls
            return "\n\n".join(f"```{{eval-rst}}\n.. autoclass:: {path}.{name}.{each}\n```" for each in value.__all__)
        if isinstance(value, horovodish.ReduceOp):
            return ""  # a member of ReduceOp
        public = _PUBLIC.get(path, path)
        kind, options = "py:data", f"\n   An instance of `{type(value).__name__}`."
        if inspect.isclass(value):
            kind, options = "autoexception" if issubclass(value, Exception) else "autoclass", "   :members:"
        elif callable(value):
            kind, options = "autofunction", ""
        return f"```{{eval-rst}}\n.. {kind}:: {public}.{name}\n{options}\n```"


class CoreCollectives(Api):
    """The collectives on arrays, and those on objects."""

    def text(self) -> str:
        names = {*horovodish.__all__} - {*process_api.__all__, "__version__"}
        entries = (self.entry("horovodish", name, getattr(horovodish, name)) for name in sorted(names, key=str.lower))
        return "\n\n".join(["```{eval-rst}\n.. automodule:: horovodish.collectives\n   :no-members:\n```", *entries])


class SettingsTables(FromCode):
    """Every row of the table of settings, one group after the other."""

    def text(self) -> str:
        parts = []
        for group, title in GROUPS.items():
            rows = [row for row in settings.table() if row.group == group]
            parts.append(f"## {title}\n")
            parts += [self.entry(row) for row in rows]
        return "\n".join(parts)

    @staticmethod
    def entry(row: settings.Setting) -> str:
        accepted = "a text" if isinstance(row.default, str) and not row.choices else row.accepted
        usual = row.usual if row.usual in ("on", "off", "none") else f"`{row.usual}`"
        text = f"### {row.name}\n\n{row.sentence}\n\n- Flag `{row.flag}`, variable `{row.variable}`"
        text += f"\n- Accepted: {accepted}. Default: {usual}."
        if row.horovod_variable:
            text += f"\n- Horovod: `{row.horovod_variable}`"
        return text + "\n"


class Errors(Api):
    """The classes of errors as a nested list below Python's own, and an entry for each in that order."""

    def text(self) -> str:
        classes = [getattr(errors, name) for name in errors.__all__]
        roots = dict.fromkeys(next(base for base in each.__mro__ if base.__module__ == "builtins") for each in classes)
        self.in_order: list[type] = []
        tree = "".join(f"- `{root.__name__}`\n{self.below(root, classes, 1)}" for root in roots)
        entries = (self.entry("horovodish", each.__name__, each) for each in self.in_order)
        return "\n\n".join([tree, *entries])

    def below(self, parent: type, classes: list[type], depth: int) -> str:
        text = ""
        for each in classes:
            if each.__bases__[0] is parent:
                self.in_order.append(each)
                text += f"{'  ' * depth}- {{py:exc}}`~horovodish.{each.__name__}`\n"
                text += self.below(each, classes, depth + 1)
        return text


class Flags(FromCode):
    """`horovodish run --help-all`."""

    def text(self) -> str:
        from horovodish.launcher.flags import run_parser

        return f"```text\n{run_parser().format_help()}```"


class Examples(FromCode):
    """Every script of examples/, with its source."""

    def text(self) -> str:
        page = Path(self.env.doc2path(self.env.docname)).read_text()
        parts = []
        for script in sorted((ROOT / "examples").glob("*.py")):
            if f"(../examples/{script.name})" not in page:
                raise self.error(f"{script.name} is missing in the table of this page")
            parts.append(f"## {script.name}\n\n```{{literalinclude}} ../examples/{script.name}\n:language: python\n```")
        return "\n\n".join(parts)


def as_napoleon_reads(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text, but napoleon reads some of their lines as markup. Escape these lines."""
    section, margin = "", 0
    for number, line in enumerate(lines):
        words, indent = line.strip(), len(line) - len(line.lstrip())
        if words in SECTIONS:
            section, margin = words, indent + 4
        elif section == "Returns:" and words:
            lines[number] = f"{line[:indent]}: {words}"  # what stands before a colon is no type
            section = ""
        elif section == "Raises:" and words and indent == margin and not re.match(r"[A-Z]\w+(, [A-Z]\w+)*: ", words):
            is_first = lines[number - 1].strip() == section
            lines[number - 1] = "" if is_first else lines[number - 1] + "\n"
            lines[number] = ("**Raises:** " if is_first else "") + line[margin:]  # a sentence, which ends the section
            section = "a sentence"
        elif section == "a sentence" and words:
            lines[number] = line[margin:]
        elif line.endswith(":") and len(lines) > number + 2 and not lines[number + 1].strip():
            block = lines[number + 2]
            if len(block) - len(block.lstrip()) >= indent + 4:
                lines[number] = line + ":"  # what is indented below it stays as it is
    lines[:] = "\n".join(lines).split("\n")


def as_users_write(
    app: Sphinx, what: str, name: str, item: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Nobody makes a handle but the engine, and the default of an option has a public name."""
    if name.endswith(".Handle"):
        return "", ""
    for value, shown in DEFAULTS.items():
        signature = signature and signature.replace(value, shown)
    return signature, result


def reference_to_error(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Docstrings name errors without their module."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or target not in errors.__all__:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "exc", f"horovodish.{target}", node, content)


def pictures_by_theme(app: Sphinx, document: nodes.document) -> None:
    """Put an SVG into the page, so that it takes the colours of the theme. A PNG has a second file, NAME.dark.png."""
    for image in list(document.findall(nodes.image)):
        if image["uri"].endswith(".png") and "://" not in image["uri"]:
            dark = image.deepcopy()
            dark["uri"] = image["uri"].removesuffix("png") + "dark.png"
            image["classes"].append("only-light")
            dark["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, dark)
        elif image["uri"].endswith(".svg") and "://" not in image["uri"]:
            svg = (ROOT / "docs" / image["uri"]).read_text()
            frame = f'<div class="picture-frame" role="img" aria-label="{html.escape(image["alt"])}">{svg}</div>'
            image.parent.parent.replace(image.parent, nodes.raw("", frame, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in {
        "api": Api,
        "core-collectives": CoreCollectives,
        "settings-tables": SettingsTables,
        "errors": Errors,
        "flags": Flags,
        "examples": Examples,
    }.items():
        app.add_directive(name, directive)
    app.connect("autodoc-process-docstring", as_napoleon_reads, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", as_users_write)
    app.connect("missing-reference", reference_to_error)
    app.connect("doctree-read", pictures_by_theme, priority=100)  # before images are collected
    return {"parallel_read_safe": True}
