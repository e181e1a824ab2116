"""The reference of the site shows the signatures that functions and classes have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from horovodish.supported import FRAMEWORKS
from support.sources import ROOT

MODULES = ["horovodish", *(f"horovodish.{framework}" for framework in FRAMEWORKS)]
# Signatures are read before Sphinx runs, which may change them.
SIGNATURES_AND_SITE = f"""
import importlib, inspect, json, sys
from sphinx.cmd.build import main
found = {{}}
for module in {MODULES}:
    for name in importlib.import_module(module).__all__:
        value = getattr(sys.modules[module], name)
        if inspect.isroutine(value):
            found[f"{{module}}.{{name}}"] = list(inspect.signature(value).parameters)
pages = ["-D", "root_doc=reference/index", "-D", "include_patterns=reference/*"]
assert main(["-Q", "-b", "xml", *pages, {str(ROOT / "docs")!r}, sys.argv[1]]) == 0
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_reference_shows_all_parameters(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make dev")
    environ = {**os.environ, "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-c", SIGNATURES_AND_SITE, tmp_path]
    output = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    shown = {
        signature.attrib["ids"]: [name.text for name in parameters.iterfind("desc_parameter/desc_sig_name")]
        for page in (tmp_path / "reference").glob("*.xml")
        for signature in ET.parse(page).iter("desc_signature")
        for parameters in signature.iter("desc_parameterlist")
    }
    signatures = {name: found for name, found in json.loads(output).items() if name in shown}
    assert {name: shown[name] for name in signatures} == signatures
    assert {name.rpartition(".")[0] for name in signatures} == set(MODULES) and len(signatures) > 100
