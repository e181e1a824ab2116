"""`horovodish run --metrics-port`: what Prometheus reads of a job."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from support.processes import wait_until

pytest.importorskip("prometheus_client")

STEPS = """
begin()
for step in range(10 ** 9):
    basics.engine().begin_step()
    if rank == 2: time.sleep(0.02)
    call(f"x{step % 3}")
"""
HANGS = "begin()\nif rank == 1: time.sleep(1000)\ncall()\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def figures(port: int) -> dict[str, list[float]]:
    """By the name of a metric: the value of each of 3 ranks. One that has not begun has not all of them."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    found: dict[str, dict[int, float]] = {}
    for name, rank, value in re.findall(r'^horovodish_rank_(\w+)\{host=".+",rank="(\d+)"\} (\S+)$', text, re.MULTILINE):
        found.setdefault(name, {})[int(rank)] = float(value)
    return {name: [values[rank] for rank in sorted(values)] for name, values in found.items() if len(values) == 3}


def test_figures_of_each_rank(hang: Callable[..., Any]) -> None:
    port = free_port()
    job = hang(STEPS, flags=["--metrics-port", str(port)])
    wait_until(lambda: min(figures(port).get("steps_total", [0])) > 20)
    wait_until(lambda: len(figures(port)) == 7)
    its = figures(port)
    assert its["up"] == [1, 1, 1] and min(its["memory_bytes"]) > 1 << 20
    assert min(its["reduced_bytes_total"]) >= 20 * 24 and min(its["sent_bytes_total"]) >= 20 * 24
    assert its["waited_for_seconds_total"][2] > max(its["waited_for_seconds_total"][:2])
    before = its["steps_total"]
    wait_until(lambda: all(now > then for now, then in zip(figures(port)["steps_total"], before, strict=True)))
    job.process.terminate()
    job.finish()
    assert not figures(port)


def test_no_other_path_answers(hang: Callable[..., Any]) -> None:
    port = free_port()
    hang("time.sleep(1000)\n", flags=["--metrics-port", str(port)])
    wait_until(lambda: bool(figures(port)))
    for path in ("", "nosuch", "metrics/nosuch"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20)


def test_a_rank_that_waits(hang: Callable[..., Any]) -> None:
    port = free_port()
    hang(HANGS, flags=["--metrics-port", f"127.0.0.1:{port}"])

    def waiting() -> list[bool]:
        return [seconds > 0.5 for seconds in figures(port).get("waits_seconds", [])]

    wait_until(lambda: waiting() == [True, False, True])


def test_a_port_that_is_taken(launch: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        job = launch("run", "-np", "1", "--metrics-port", str(port), "python", "-c", "print(1)")
        assert job.finish() == 1
    assert f"--metrics-port 127.0.0.1:{port}: Address already in use" in job.stderr.lines[-1]
    assert not job.stdout.lines
