"""Pages in headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")


def asked(page: Path, script: str) -> Any:
    """What a script at the end of the page answers, on a dark screen.

    Args:
        page: a file, to which the script is added.
        script: calls `answer(value)` once, with a value that JSON can hold. `until(condition, then)` calls `then` as
            soon as `condition()` holds.
    """
    helpers = """const answer = (value) => fetch("/", { method: "POST", body: JSON.stringify(value) });
      const until = (condition, then) => condition() ? then() : setTimeout(until, 10, condition, then);"""
    text = page.read_text().replace("</body>", f"<script>{helpers}{script}</script></body>")
    answers: Queue[str] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
        command += ["--blink-settings=preferredColorScheme=0", f"--user-data-dir={folder}/profile"]
        browser = subprocess.Popen(
            [*command, f"http://127.0.0.1:{server.server_port}"],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return json.loads(answers.get(timeout=60))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
