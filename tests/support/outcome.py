"""How one rank ended; what a rank process hands to the test that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its world rank.
        ended: "returned"; "raised", and `error` holds the traceback; "died" without a word, by a signal for example;
            "hung", and `output` shows where each of its threads was; or "ended", because another rank had failed.
        result: what the function returned.
        error: the traceback as text.
        error_class: the name of the exception's class.
        output: what the rank printed to stdout and stderr.
    """

    rank: int
    ended: Literal["returned", "raised", "died", "hung", "ended"]
    result: Any = None
    error: str = ""
    error_class: str = ""
    output: str = ""
