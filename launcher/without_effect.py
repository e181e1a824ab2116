"""Flags of Horovod's launcher that change nothing here: accepted so that command lines go on working, or refused."""

import argparse

from horovodish.settings import WITHOUT_EFFECT

__all__ = ["OF_ELASTIC_TRAINING", "add_to", "notices"]

# These are refused, because a job would not do what they ask for.
OF_ELASTIC_TRAINING = (
    "--min-np",
    "--min-num-proc",
    "--max-np",
    "--max-num-proc",
    "--slots",
    "--slots-per-host",
    "--elastic-timeout",
    "--reset-limit",
    "--host-discovery-script",
    "--blacklist-cooldown-range",
    "--cooldown-range",
)


def add_to(group: argparse._ArgumentGroup) -> None:
    """Adds the flags to a group of a parser; those that are not given are None."""
    for knob in WITHOUT_EFFECT:
        if knob.is_switch:
            group.add_argument(knob.flag, action=argparse.BooleanOptionalAction, help=knob.reason)
        else:
            group.add_argument(knob.flag, metavar="VALUE", help=knob.reason)


def notices(options: argparse.Namespace) -> list[str]:
    """One line for each of these flags that was given."""
    given = [knob for knob in WITHOUT_EFFECT if getattr(options, knob.name) is not None]
    return [f"{knob.flag} is accepted, but has no effect: {knob.reason}" for knob in given]
