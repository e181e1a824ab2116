"""The page of `horovodish predict -o`, in a browser: each control shows what the command prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from horovodish.predictions.steps import STRATEGIES
from horovodish.reports.prediction import run
from support.browser import asked, needs_browser

MODELS = {
    "a.yaml": "parameters: 100 M\nstep: 200 ms\nspread: 0.1\nsamples: 1 M\nbatch: 64\n",
    "b.yaml": "parameters: 300 B\ndtype: bfloat16\nstep: 0.9999 s\n",
}
CLUSTER = "ranks_per_host: 2\nrank_memory: 80 GB\n"
LINKS = {0: "bandwidth: 2.5 Gbit/s\nlatency: 45 us\n", 2: "link: ethernet-10g\n"}
"""By place in the chooser: as described, and the second of the links that have names."""
MOST = 3000

SHOW_ALL = """
const choose = (name, value) => {
  form.elements[name].value = value;
  form.dispatchEvent(new Event("input"));
};
const texts = (row) => [...row.children].map((cell) => cell.textContent);
const cells = (id) => [...document.querySelectorAll(`#${id} tr`)].map(texts);
const options = (name) => [...form.elements[name].options].map((option) => option.text);
const answers = [];
for (const model of [0, 1]) for (const link of [0, 2]) for (const scaling of [0, 1]) {
  for (const [name, value] of Object.entries({ model, link, scaling })) choose(name, value);
  for (const strategy of options("strategy").keys()) for (const precision of options("precision").keys()) {
    choose("strategy", strategy);
    choose("precision", precision);
    choose("ranks", (5 * strategy + 4 * precision + 2) % its.ranks.length);
    const name = (one) => options(one)[form.elements[one].value];
    answers.push({
      case: [name("model"), link, scaling], strategy: name("strategy"), precision: name("precision"),
      ranks: document.getElementById("many").value, said: document.getElementById("said").textContent,
      charts: [0, 1, 2, 3].map((number) => cells("table" + number)), strategies: cells("strategies"),
    });
  }
}
answer(answers);
"""


def printed(out: str) -> tuple[dict[tuple[str, str], list[str]], dict[str, list[str]], dict[str, str]]:
    """Step and efficiency by strategy and ranks, times to train by ranks, and memory by strategy."""
    cells, times, memory = {}, {}, {}
    for line in out.splitlines():
        ranks, *found = re.findall(r"\d[\d.]*(?: ?[a-z%]+)?(?= +\d| {2}|$)", line) or [""]
        if len(found) == 2 * len(STRATEGIES):
            for index, strategy in enumerate(STRATEGIES):
                cells[strategy.name, ranks] = found[2 * index : 2 * index + 2]
        elif len(found) == 2 and line.split()[0] == ranks:
            times[ranks] = found
        elif line.startswith("memory of a rank with"):
            memory = dict(each.split(" ", 1) for each in line.split(": ", 1)[1].split(", "))
    return cells, times, memory


def column(of: str, precision: str) -> str:
    """The column of the command: a precision is one of its own for an allreduce. Empty: it has none."""
    if precision == "as computed":
        return of
    return precision if of == "allreduce" else ""


@needs_browser
def test_every_control_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines, page, known = tmp_path / "cluster.yaml", tmp_path / "page.html", {}
    models = [str(tmp_path / name) for name in MODELS]
    plain: dict[str, Any] = {"ranks_per_host": None, "steps": None}
    for name, text in MODELS.items():
        (tmp_path / name).write_text(text)
    for place in (2, 0):
        machines.write_text(CLUSTER + LINKS[place])
        for name, path in zip(MODELS, models, strict=True):
            for strong in (False, True):
                assert run([path], str(machines), MOST, strong=strong, output=None, **plain) == 0
                known[name, place, int(strong)] = printed(capsys.readouterr().out)
    assert run(models, str(machines), MOST, strong=False, output=str(page), **plain) == 0
    answers = asked(page, SHOW_ALL)
    assert len(answers) == len(MODELS) * len(LINKS) * 2 * 6 * 3
    for its in answers:
        cells, times, memory = known[tuple(its["case"])]
        steps, efficiencies, memories, trained = (rows[1:] for rows in its["charts"])
        assert not re.search(r"\de\+", its["said"]), "no exponents"
        if its["strategy"] in memory:
            assert memories[-1][1] == memory[its["strategy"]]
        if name := column(its["strategy"], its["precision"]):
            shown = {
                (name, row[0]): [row[1], share[1].replace(" ", "")]
                for row, share in zip(steps, efficiencies, strict=True)
            }
            assert shown == {key: cell for key, cell in cells.items() if key[0] == name}
            assert f"a step takes {cells[name, its['ranks']][0]}:" in its["said"]
        if name == "allreduce" and times:
            assert {ranks: both for ranks, *both in trained} == times
            assert f"Training takes {times[its['ranks']][its['case'][2]]}." in its["said"]
        for strategy, step, *_, efficiency, _ in its["strategies"][1:]:
            of, refuses, _ = strategy.partition(" as computed")
            if name := column(of, "as computed" if refuses else its["precision"]):
                assert [step, efficiency.replace(" ", "")] == cells[name, its["ranks"]]
