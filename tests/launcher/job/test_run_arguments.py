"""The arguments of the command: they arrive as the user has typed them, whatever mpirun would make of them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.flags import run_parser
from horovodish.launcher.mpirun.installation import candidates

# What Open MPI's mpirun knows; its help lists them only where its own files are found.
OF_OPEN_MPI = """--map-by --mapby --rank-by --bind-to --bind-to-core --bynode --by-slot --mca -mca --gmca --omca
--prtemca --pmixmca --np -np --n -n --c -c -N --npernode --ppr --pernode -x --x --host -host -H --hostfile -hostfile
--machinefile --app --am --tune --prefix --noprefix --output --output-filename --tag-output --timestamp-output
--merge-stderr-to-stdout --xml --stdin --xterm --wdir -wdir --set-cwd-to-session-dir --preload-binary --preload-files
--path --timeout --report-state-on-timeout --get-stack-traces --with-ft --enable-recovery --continuous --max-restarts
--disable-recovery --report-bindings --report-child-jobs-separately --oversubscribe --nooversubscribe
--use-hwthread-cpus --cpu-set --cpu-list --display --display-map --display-topo --do-not-launch --do-not-resolve
--runtime-options --rtos --personality --dvm --dvm-uri --allow-run-as-root --forward-signals --pset --rankfile
--initial-errhandler --fwd-mpirun-port --stop-on-exec --stop-in-init --daemonize --debug --debug-daemons
--leave-session-attached --launch-agent --no-ready-msg --report-pid --report-uri --singleton --keepalive
--system-server --test-suicide --default-hostfile -s -q -d -V --version --verbose -h -? --help -v"""
OF_NOBODY = r""": :: -- - --- = --= -=x --np=3 -np=3 -genv=x a=b=c \ \\ ' " "q" it's $HOME ${HOME} `id` * ~ %s %d%% {0}
@file # node core:overload 1 200 h:3 FOO=1"""
WITH_SPACES = ["", " ", "a b", "c\td", "x\ny", "\r", "\x01\x7f", "caf\u00e9"]
NOT_UTF8 = [os.fsdecode(word) for word in (b"\xff", b"--mca=\xfe", b"caf\xe9", b"\xed\xa0\x80")]
LONG = "y" * 100_000
"""Longer than any message of the link to a supervisor."""


def words() -> list[str]:
    """Each word twice, in a random order, and a long one."""
    found: set[str] = set()
    for mpirun in candidates(os.environ):
        helps = subprocess.run([mpirun, "--help"], capture_output=True, text=True, timeout=60, check=False)
        found.update(re.findall(r"(?<![\w-])-{1,2}[A-Za-z][\w-]*", helps.stdout + helps.stderr))
    found.update(OF_OPEN_MPI.split(), OF_NOBODY.split(), run_parser().flags, WITH_SPACES, NOT_UTF8)
    every = sorted(found) * 2
    random.Random(0).shuffle(every)
    return [*every, LONG]


@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["", "elastic"])
def test_arguments_arrive_unchanged(flags: list[str], launch: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    text = "import os, sys\nopen(sys.argv[1] + os.environ['HOROVODISH_SUPERVISOR_PROCESS'], 'wb')"
    script.write_text(f"{text}.write(b'\\0'.join(map(os.fsencode, sys.argv[2:])))\n")
    expected = words()
    job = launch("run", "-np", "2", *flags, sys.executable, str(script), str(tmp_path / "arguments-"), *expected)
    assert job.finish() == 0, job.stderr.lines
    written = list(tmp_path.glob("arguments-*"))
    assert len(written) == 2
    for file in written:
        assert [os.fsdecode(word) for word in file.read_bytes().split(b"\0")] == expected
