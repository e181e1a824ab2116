"""Random elastic jobs for `search_elastic.py`: what their scripts do, and what happens to their ranks.

Everything follows from a seed. A script has phases, each with a state of its own. A phase is a list of actions, which
is the same on all ranks. The state says which action comes next, so a commit may stand anywhere. Neither the number of
ranks nor a repeated action changes the state at the end: sums across ranks are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FRAMEWORKS", "Action", "Fault", "Phase", "Plan", "plan_of"]

FRAMEWORKS = ("numpy", "torch", "tensorflow", "keras", "jax")

_SIMPLE = {
    "numpy": ("add", "mix", "reduce", "reduce in place", "broadcast in place", "metric", "count", "process set"),
    "torch": (
        *("add", "mix", "reduce", "reduce in place", "broadcast in place", "metric", "count", "process set"),
        *("average parameters", "statistics", "moving average", "second optimizer"),
    ),
    "tensorflow": ("add", "mix", "reduce", "broadcast in place", "metric", "count", "function", "tape"),
    "jax": ("add", "mix", "reduce", "metric", "count", "compiled", "compiled reduce"),
}


@dataclass(frozen=True)
class Action:
    """A step of a script.

    Attributes:
        name: what is done.
        number: a small integer, with which it is done.
        option: how it is done.
    """

    name: str
    number: int = 0
    option: str = ""


@dataclass(frozen=True)
class Phase:
    """A part of a script, with a state of its own.

    Attributes:
        actions: in this order. "block" ends a block of `attempt`.
        blocks: whether `attempt` is used, and not `run`.
        length: of arrays.
        passes: backwards for each step of the optimizer.
        counts: "commit" if the script sets its counter where it commits, "action" if after each action.
        swallows: whether the script catches the exceptions of actions and goes on.
        notes: whether ranks note digests at commits; else only where they are, and the digests of an undisturbed run
            count, so that nobody looks at the tensors.
        donates: whether programs take their arguments' memory (JAX).
        named: whether collectives have names.
        samples: of an epoch; 0 without a sampler.
    """

    actions: tuple[Action, ...]
    blocks: bool
    length: int
    passes: int
    counts: str
    swallows: bool
    notes: bool
    donates: bool
    named: bool
    samples: int


@dataclass(frozen=True)
class Fault:
    """A fault that a process meets when it comes to an action for the first time.

    Attributes:
        phase: the number of the phase.
        at: the number of the action.
        process: the number with which the process was started.
        kind: "kill", "abort" or "stop" there; "timer" or "line": it dies later.
        seconds: until then ("timer").
        lines: of the elastic code until then ("line").
    """

    phase: int
    at: int
    process: int
    kind: str
    seconds: float = 0.0
    lines: int = 0


@dataclass(frozen=True)
class Plan:
    """A job.

    Attributes:
        seed: from which all of it follows.
        framework: of the script.
        np: ranks.
        least: `--min-np`.
        phases: of the script.
        early: whether the script makes all states before its first phase.
        copies: "always": each commit is copied; "never": each is held; "": as users see it.
        faults: which ranks commit themselves.
        kills: the seconds after the begin of the training at which the driver kills ranks, how many, and how.
        slots: the seconds at which there are other slots, and how many.
        grows: whether new processes come soon after a loss, though those that are left could go on.
    """

    seed: int
    framework: str
    np: int
    least: int
    phases: tuple[Phase, ...]
    early: bool
    copies: str
    faults: tuple[Fault, ...]
    kills: tuple[tuple[float, int, str], ...] = ()
    slots: tuple[tuple[float, int], ...] = ()
    grows: bool = True

    def said(self) -> str:
        """The plan in words, for a report."""
        lines = [f"{self.framework}, -np {self.np} --min-np {self.least}, copies {self.copies or 'as users see them'}"]
        for number, phase in enumerate(self.phases):
            how = "attempt" if phase.blocks else "run"
            names = ("swallows", "notes", "donates", "named")
            flags = ", ".join(name for name in names if getattr(phase, name))
            lines.append(
                f"phase {number}: {how}, arrays of {phase.length}, {phase.passes} passes, counts at each "
                f"{phase.counts}, {phase.samples} samples, {flags}"
            )
            for at, action in enumerate(phase.actions):
                lines.append(f"  {at:3} {action.name} {action.number} {action.option}")
        lines += [str(fault) for fault in self.faults]
        lines += [f"after {seconds:.2f} s: {kind} {count}" for seconds, count, kind in self.kills]
        lines += [f"after {seconds:.2f} s: {count} slots" for seconds, count in self.slots]
        return "\n".join(lines)


def plan_of(seed: int, framework: str) -> Plan:
    """The job of a seed."""
    choice = random.Random(f"{seed} {framework}")
    np = choice.choice((2, 3, 3, 4))
    is_paced = choice.random() < (0.3 if framework == "numpy" else 0.15)
    # New processes import NumPy soon, and other frameworks late.
    is_quick = framework == "numpy"
    counts_of_phases = (1, 1, 2, 3) if is_quick else (2, 3, 4, 5)
    phases = tuple(_phase(choice, framework, is_paced) for _ in range(choice.choice(counts_of_phases)))
    kills: tuple[tuple[float, int, str], ...] = ()
    slots: tuple[tuple[float, int], ...] = ()
    if is_paced:
        kinds = ("kill", "kill", "kill", "stop")
        kills = tuple(
            (round(choice.uniform(0.0, 3.0), 3), choice.choice((1, 1, 2)), choice.choice(kinds))
            for _ in range(choice.randint(0, 2))
        )
        if choice.random() < 0.6:
            counts = [*(choice.randint(1, np) for _ in range(choice.randint(1, 2))), np]  # in the end there are enough
            times = sorted(round(choice.uniform(0.0, 4.0), 3) for _ in counts)
            slots = tuple(zip(times, counts, strict=True))
    return Plan(
        seed=seed,
        framework=framework,
        np=np,
        least=choice.choice((1, 1, min(2, np), np) if is_quick else (1, 1, 1, 1, np)),
        phases=phases,
        early=choice.random() < 0.5,
        copies=choice.choice(("", "", "always", "never")),
        faults=_faults(choice, phases, np, choice.choice((1, 1, 2, 2, 3) if is_quick else (2, 3, 4))),
        kills=tuple(sorted(kills)),
        slots=slots,
        grows=bool(slots) or choice.random() < (0.7 if is_quick else 0.2),
    )


def _faults(choice: random.Random, phases: tuple[Phase, ...], np: int, times: int) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(times):
        number = choice.randrange(len(phases))
        actions = len(phases[number].actions)
        # Where one phase ends and the next begins, ranks are in different ones.
        at = choice.choice((choice.randrange(actions), choice.randrange(actions), actions - 1 - choice.randrange(3), 0))
        at = max(at, 0)
        victims = choice.sample(range(np), choice.choice((1, 1, 1, min(2, np))))
        for place, victim in enumerate(victims):
            kind = choice.choice(("kill", "timer", "timer", "timer", "line", "line", "abort", "stop"))
            if kind == "stop" and choice.random() < 0.5:  # it takes long
                kind = "timer"
            longest = 0.3 if place else 0.02
            seconds = round(longest * 10 ** choice.uniform(-3, 0), 6)
            lines = round(10 ** choice.uniform(0, 3.3 if place else 2.7))
            faults.append(Fault(number, at, victim, kind, seconds, lines))
    return tuple(faults)


def _phase(choice: random.Random, framework: str, is_paced: bool) -> Phase:
    blocks, samples = choice.random() < 0.4, 0
    passes = choice.choice((1, 1, 2, 3)) if framework in ("torch", "jax") else 1
    # Which actions a script is made of.
    simple = _SIMPLE.get(framework, ())
    chosen = choice.sample(simple, min(len(simple), choice.randint(2, 5))) if simple else []
    optimizes = framework in ("torch", "jax") and choice.random() < 0.7
    is_local = framework in ("numpy", "torch") and choice.random() < 0.3
    if framework == "torch" and choice.random() < 0.3:
        samples = choice.randint(5, 40)
    commits = choice.choice(("step", "step", "some", "anywhere", "rare"))
    every = choice.randint(2, 5)
    actions: list[Action] = []

    def add(name: str, option: str = "") -> None:
        actions.append(Action(name, choice.randint(1, 9), option))
        if commits == "anywhere" and choice.random() < 0.3:
            actions.append(Action("commit"))

    for step in range(choice.randint(3, 12)):
        parts = [choice.choice(chosen) for _ in range(choice.randint(1, 3))] if chosen else ["fit"]
        if optimizes and choice.random() < 0.8:
            parts.insert(choice.randrange(len(parts) + 1), "optimizer")
        if is_local and choice.random() < 0.8:
            parts.append("local" if step % every else "average")
        if samples and choice.random() < 0.3:
            parts.append("epoch")
        if is_paced:
            parts.append("sleep")
        for part in parts:
            if part != "optimizer":
                add(part, choice.choice(("a", "b", "replace", "detach", "small")))
                continue
            suspends = framework == "torch" and choice.random() < 0.3
            add("zero")
            for left in reversed(range(passes)):
                add("quiet backward" if suspends and left else "backward")
                if choice.random() < 0.2:
                    add(choice.choice([each for each in chosen if each != "second optimizer"] or ["count"]), "a")
            add("step")
            if framework == "torch" and choice.random() < 0.3:
                add("schedule")
        if commits == "step" or (commits == "some" and step % every == every - 1):
            actions.append(Action("commit"))
            if choice.random() < 0.2:
                add("metric")
        if choice.random() < 0.1:
            actions.append(Action("save"))
        if blocks and choice.random() < 0.7:
            actions.append(Action("block"))
    if is_local:
        actions.append(Action("average", 1))
    return Phase(
        actions=tuple(actions),
        blocks=blocks,
        length=choice.choice((1, 37, 5_000, 100_000, 400_000)),
        passes=passes,
        counts=choice.choice(("commit", "action")),
        swallows=not blocks and choice.random() < 0.25,
        notes=bool(is_local or samples or framework == "keras" or choice.random() < 0.5),
        donates=choice.random() < 0.5,
        named=choice.random() < 0.5,
        samples=samples,
    )
