"""The programs for sanitizers and fuzzers, which `make test` does not run."""

from __future__ import annotations

import subprocess

import pytest

from support.sources import CSRC, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("program", ["native/engines", "native/endings", "native/failing_calls", "fuzz/negotiation"])
def test_it_goes_with_the_engine(program: str) -> None:
    source = ROOT / "tests" / f"{program}.cc"
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", f"-I{CSRC}", str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
