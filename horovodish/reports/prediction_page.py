"""The page of `horovodish predict -o prediction.html`: what was computed, with sliders and choosers over it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from horovodish.predictions.cluster import Cluster
from horovodish.predictions.presets import LINKS
from horovodish.predictions.steps import PRECISIONS, STRATEGIES, Case, Precision, Strategy, predicted, steps_to_train
from horovodish.predictions.workload import Workload
from horovodish.reports.document import PageData, document, drawn

__all__ = ["WEAK_SCALING", "prediction_page"]

WEAK_SCALING = "With weak scaling, the batch grows with the ranks. Each sample counts as much as in a small batch."
LEFT_OUT = (
    "Left out are: other traffic on the network, switches that cannot carry all hosts at once, processors that both "
    "compute and reduce, and a batch that becomes too small for a processor."
)

STRATEGIES_SHOWN = [strategy for strategy in STRATEGIES if strategy.precision is PRECISIONS[0]]
SCALINGS = ("weak: a batch for each rank", "strong: one batch for all")
CHARTS = ("Step time", "Efficiency", "Memory of a rank", "Time to train")


def prediction_page(
    workloads: Mapping[str, Workload], about: Sequence[str], cluster: Cluster, numbers: Sequence[int], *, strong: bool
) -> str:
    """The text of the page.

    Args:
        workloads: by name of the model.
        about: the assumptions.
        cluster: the machines.
        numbers: of ranks.
        strong: which scaling the page shows first.
    """
    links = {_as_described(cluster): cluster} | {
        name: replace(cluster, bandwidth=link.bandwidth, latency=link.latency) for name, link in LINKS.items()
    }
    models = [_computed(workload, list(links.values()), numbers) for workload in workloads.values()]
    data = PageData(
        prediction={
            "ranks": numbers,
            "strategies": [strategy.name for strategy in STRATEGIES_SHOWN],
            "rank_memory": cluster.rank_memory,
            "models": models,
        }
    )
    names = [os.path.basename(name) for name in workloads]
    names = names if len(set(names)) == len(names) else list(workloads)  # files of one name in several folders
    choosers = [
        _chooser("model", "model", names) if len(names) > 1 else "",
        _chooser("strategy", "strategy", (strategy.name for strategy in STRATEGIES_SHOWN)),
        _chooser("precision", "gradients between hosts", (precision.name for precision in PRECISIONS)),
        _chooser("link", "link between hosts", links),
        _chooser("scaling", "scaling", SCALINGS, chosen=int(strong)),
    ]
    keys = (("own", "own work"), ("late", "waits for late ranks"), ("exposed", "waits for communication"))
    key = "".join(f'<span class="key {kind}"></span>{text}' for kind, text in keys)
    body = (
        "<h1>What more ranks would give</h1>"
        f"<p class=soft>{'<br>'.join(map(escape, about))}</p>"
        "<noscript>The choosers need JavaScript. The command prints the same as a table.</noscript>"
        f'<form id="choices" class="choices"><label class="wide">ranks <output id="many" for="number"></output>'
        f'<input id="number" name="ranks" type="range" min="0" max="{len(numbers) - 1}" value="{len(numbers) // 2}" '
        f'aria-label="ranks"></label>{"".join(choosers)}</form><p id="said" aria-live="polite"></p>'
        f'<h2>Parts of a step, by strategy</h2><figure><div id="bars"></div><figcaption>{key}</figcaption>'
        f"</figure>{_as_table('strategies')}"
    )
    for number, title in enumerate(CHARTS):
        of_time = title == CHARTS[-1]
        chart = {"unit": "", "x": "ranks", "log": 2, "series": [], "data": [numbers], "top": 0, "logarithmic": of_time}
        name, note = (' id="time"', f"<p class=soft>{WEAK_SCALING}</p>") if of_time else ("", "")
        figure = f"<figure>{drawn(data, chart)}</figure>{_as_table(f'table{number}')}"
        body += f"<div{name}><h2>{title}</h2>{figure}{note}</div>"
    body += f"<p class=soft>{LEFT_OUT}</p>"
    return document("What more ranks would give", body, data, "prediction")


def _as_described(cluster: Cluster) -> str:
    return f"{cluster.bandwidth * 8 / 1e9:g} Gbit/s, as described"


def _chooser(name: str, label: str, options: Iterable[str], chosen: int = 0) -> str:
    inner = "".join(
        f'<option value="{index}"{" selected" * (index == chosen)}>{escape(option)}</option>'
        for index, option in enumerate(options)
    )
    return f'<label>{label} <select name="{name}">{inner}</select></label>'


def _as_table(name: str) -> str:
    return f'<details><summary>as a table</summary><div class=scroll id="{name}"></div></details>'


def _computed(workload: Workload, links: Sequence[Cluster], numbers: Sequence[int]) -> dict[str, Any]:
    """Lists by number of ranks. The lists of `exposed` are nested by scaling, link, strategy and precision.

    Those of `late` and `memory` are nested by scaling and strategy: ranks that meet less often wait less.
    """

    def cases(strategy: Strategy, precision: Precision, link: Cluster, strong: bool) -> list[Case]:
        return [Case(link, ranks, replace(strategy, precision=precision), strong) for ranks in numbers]

    each = itertools.product(STRATEGIES_SHOWN, PRECISIONS, links, (False, True))
    asked = [case for which in each if which[0].takes(which[1]) for case in cases(*which)]
    known = dict(zip(asked, predicted(workload, asked), strict=True))
    plain = [
        [[known[case] for case in cases(strategy, PRECISIONS[0], links[0], strong)] for strategy in STRATEGIES_SHOWN]
        for strong in (False, True)
    ]
    return {
        "own": [[_short(its.step - its.exposed - its.late) for its in one[0]] for one in plain],
        "late": [[[_short(its.late) for its in of_strategy] for of_strategy in one] for one in plain],
        "exposed": [
            [
                [
                    [
                        [_short(known[case].exposed) for case in cases(strategy, precision, link, strong)]
                        if strategy.takes(precision)
                        else None
                        for precision in PRECISIONS
                    ]
                    for strategy in STRATEGIES_SHOWN
                ]
                for link in links
            ]
            for strong in (False, True)
        ],
        "memory": [[[_short(its.memory) for its in of_strategy] for of_strategy in one] for one in plain],
        "steps": [[steps_to_train(workload, ranks, strong=strong) for ranks in numbers] for strong in (False, True)],
    }


def _short(value: float) -> float:
    """Seven digits keep the page small. The page rounds their sums to three, as the command does."""
    return float(f"{value:.7g}")
