"""Every command line of the documents has flags that exist, with values that they take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from horovodish.launcher import flags
from support.sources import ROOT

PARSERS = {
    "agent": flags.agent_parser,
    "check": flags.check_parser,
    "merge-traces": flags.merge_parser,
    "predict": flags.predict_parser,
    "report": flags.report_parser,
    "run": flags.run_parser,
    "status": flags.status_parser,
}
COMMAND = re.compile(rf"\s*(?:\$ )?(?:\w+=\S+ )*horovodish ((?:{'|'.join(PARSERS)})\b.*)")
FOLLOWS = re.compile(r"\s{2,}\S.*|\"? &$| #.*| > .*| \| .*| < .*")
"""What may come after a command on its line."""


def commands() -> list[tuple[str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        is_code = False
        for line in page.read_text().splitlines():
            is_code ^= line.startswith("```")
            if (is_code or line.startswith("    ")) and (command := COMMAND.fullmatch(line)):
                found.append((page.name, FOLLOWS.sub("", command[1])))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_can_be_parsed(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "hosts.sh"  # which a flag asks for
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    word, *arguments = shlex.split(command)
    if arguments[:1] == ["--calibrate"]:  # flags of `run` follow its file
        word, arguments = "run", [*arguments[2:], "python", "measures.py"]
    PARSERS[word]().parse(arguments)


def test_there_are_many_of_them() -> None:
    assert len(commands()) > 40 and {command.split()[0] for _, command in commands()} == {*PARSERS}
