"""What the benchmarks of training steps share, whatever the framework: their options and their tables."""

import argparse
from collections.abc import Callable, Collection, Mapping

from rounds import alternate, percentile, say, timed

import horovodish as hvd

OURS = "horovodish"

_WARM_UP_STEPS = 5

Parts = Mapping[str, Callable[[], float]]
"""By name, something that does one unit of work and returns the seconds that it took."""


def options_of(about: str | None, models: Collection[str], *, rounds: int = 6, steps: int = 6) -> argparse.Namespace:
    """What the command line asks for: `rounds`, `steps` and `models`.

    Args:
        about: what `--help` prints first.
        models: their names.
        rounds: when it does not say.
        steps: likewise.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="blocks of everything that is timed")
    parser.add_argument("--steps", type=int, default=steps, help="steps of a block")
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))
    return parser.parse_args()


def warm_up(parts: Parts) -> None:
    """Does a few units that do not count."""
    for part in parts.values():
        for _ in range(_WARM_UP_STEPS):
            part()


def waiting(alone: Callable[[], float]) -> Callable[[], float]:
    """The step without communication, after which the ranks meet: what it costs that the faster one waits."""
    meet = timed(hvd.barrier)
    return lambda: alone() + meet()


def compare_steps(options: argparse.Namespace, contenders: Callable[[str], Parts]) -> None:
    """Times the steps of every model, and prints one line for each contender and one for `waiting`.

    Args:
        options: from `options_of`.
        contenders: gives the contenders for a model, OURS and "alone" among them.
    """
    say(f"{'model':<12} {'contender':<11} {'min ms':>9} {'p50 ms':>9} {'p99 ms':>9}  ours/peer (p50)")
    for model in options.models:
        training = dict(contenders(model))
        training["waiting"] = waiting(training["alone"])
        warm_up(training)
        seconds = alternate(training, options.rounds, dict.fromkeys(training, options.steps))
        ours = percentile(seconds[OURS], 50)
        for contender, values in seconds.items():
            median = percentile(values, 50)
            figures = [min(values) * 1e3, median * 1e3, percentile(values, 99) * 1e3]
            ratio = "" if contender == OURS else f"  {ours / median:.2f}"
            say(f"{model:<12} {contender:<11} " + " ".join(f"{figure:>9.2f}" for figure in figures) + ratio)


def compare_overlaps(options: argparse.Namespace, computation: str, parts_of: Callable[[str], Parts]) -> None:
    """Times the parts of every model's steps, and prints how much of each contender's communication is hidden.

    Args:
        options: from `options_of`.
        computation: the part of the step without communication that communication can hide behind.
        parts_of: gives the parts of a model, which have been warmed up: "alone", `computation`, and "NAME step" and
            "NAME communication" for each contender.
    """
    say(f"milliseconds  contender      step   alone {computation:>9} exposed communication  overlap  at most")
    for model in options.models:
        parts = parts_of(model)
        seconds = alternate(parts, options.rounds, dict.fromkeys(parts, options.steps))
        median = {part: percentile(values, 50) for part, values in seconds.items()}
        for contender in (part.removesuffix(" step") for part in parts if part.endswith(" step")):
            step, communication = median[f"{contender} step"], median[f"{contender} communication"]
            exposed = step - median["alone"]
            say(
                f"{model:<13} {contender:<11} {step * 1e3:>7.1f} {median['alone'] * 1e3:>7.1f} "
                f"{median[computation] * 1e3:>9.1f} {exposed * 1e3:>7.1f} {communication * 1e3:>13.1f} "
                f"{1 - exposed / communication:>8.2f} {min(1.0, median[computation] / communication):>8.2f}"
            )
