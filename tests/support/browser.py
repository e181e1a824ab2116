"""Pages in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")


def asked(page: Path, script: str) -> Any:
    """What a script at the end of the page answers, on a dark screen.

    Args:
        page: a file, to which the script is added.
        script: calls `answer(value)` once, with a value that JSON can hold.
    """
    answers = "const answer = (value) => { document.title = JSON.stringify(value); };"
    page.write_text(page.read_text().replace("</body>", f"<script>{answers}{script}</script></body>"))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
    command += ["--blink-settings=preferredColorScheme=0", f"--user-data-dir={page.with_suffix('.browser')}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search("<title>(.*?)</title>", shown, re.DOTALL)
    assert found
    return json.loads(html.unescape(found[1]))
