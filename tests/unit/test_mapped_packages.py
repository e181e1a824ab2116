"""Folders that are installed under another name cannot be imported twice. Their links are relative and ignored."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

import horovodish
from support.sources import CLUSTERS, CORE, FRAMEWORKS, LAUNCHER, ROOT

SHIMS = sorted(path for folder in (FRAMEWORKS, CLUSTERS) for path in folder.iterdir() if path.is_dir())
MAPPED = {"launcher": LAUNCHER, **{path.name: path for path in SHIMS}}


@pytest.mark.parametrize("name", MAPPED)
def test_a_folder_refuses_to_be_imported_under_its_own_name(name: str) -> None:
    init = MAPPED[name] / "__init__.py"
    specification = importlib.util.spec_from_file_location(name, init)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.raises(ImportError, match=rf"horovodish\.{name}"):
        specification.loader.exec_module(module)


@pytest.mark.skipif(horovodish.__path__ != [str(CORE)], reason="nothing is compiled in this checkout: make dev")
@pytest.mark.parametrize("name", MAPPED)
def test_its_link_leads_to_it(name: str) -> None:
    link = CORE / name
    assert not Path(os.readlink(link)).is_absolute()
    assert link.resolve() == MAPPED[name].resolve()
    if (ROOT / ".git").exists():
        subprocess.run(["git", "check-ignore", "--quiet", str(link)], cwd=ROOT, check=True)
