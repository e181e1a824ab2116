"""What a rank of a job of `search_elastic.py` does:  python elastic_scripts.py FRAMEWORK SEED FOLDER

It runs the script of the plan and commits faults. It notes what it sees in a file of its own: entries into functions
and blocks, commits, copies, writes to the state, and ends. `--undisturbed FRAMEWORK` reads seeds, runs their scripts
alone and answers with the digests of their states.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import elastic_actions
import elastic_frameworks
from elastic_plans import Fault, Phase, plan_of

from horovodish.elastic import loop, memory, state
from horovodish.runtime import basics

FAULTY_FOLDERS = ("horovodish/elastic/", "frameworks/")


class Notes:
    """A line for each thing that this process has seen; whole even if it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = int(os.environ["HOROVODISH_START"])
        launched = importlib.import_module("horovodish.launch.environment").launcher_environment()
        self.process = launched.rank
        path = folder / f"notes-{self.start}-{self.process}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, kind: str, **what: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.monotonic(), **what}) + "\n"
        os.write(self._file, line.encode())

    def is_first(self, name: str) -> bool:
        """Whether no process of the job has asked for this name before."""
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Faults:
    """The faults of this process."""

    def __init__(self, faults: tuple[Fault, ...], notes: Notes) -> None:
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.process == notes.process]
        self._notes = notes
        self._lines = 0

    def come_to(self, phase: int, at: int) -> None:
        """Commit what is due here."""
        for number, fault in self._faults:
            if (fault.phase, fault.at) == (phase, at) and self._notes.is_first(f"fired-{number}"):
                self._notes("fault", fault=fault.kind)
                self._commit(fault)

    def _commit(self, fault: Fault) -> None:
        if fault.kind == "abort":
            os.abort()
        elif fault.kind == "timer":
            signal.setitimer(signal.ITIMER_REAL, fault.seconds)  # whose signal ends the process, wherever it is
        elif fault.kind == "line":
            self._lines = fault.lines
            sys.settrace(self._trace)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Any:
        if not any(folder in frame.f_code.co_filename for folder in FAULTY_FOLDERS):
            return None
        self._lines -= event == "line"
        if self._lines <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


class Watched:
    """The states of a script, and what they have come to."""

    def __init__(self, notes: Any, phases: tuple[Phase, ...]) -> None:
        self.notes = notes
        self.phases = phases
        self.numbers: dict[int, int] = {}  # the phase, by the number of the state
        self.world: dict[int, int] = {}  # the last one in which a phase was entered

    def digest(self, number: int, its_state: Any) -> str | None:
        """Return a digest of the state if the phase notes digests."""
        return elastic_actions.digest(its_state) if self.phases[number].notes else None

    def watch(self) -> None:
        """Note commits and copies from now on."""
        commit, seal, keep = state.State._commit, memory.Memory.seal, loop._Loop._keep

        def noted_commit(its_state: Any, *, copies: bool) -> bool:
            phase = self.numbers.get(its_state._number)
            if phase is None:
                return commit(its_state, copies=copies)
            start, worlds, last = its_state._position
            its_notes = {"phase": phase, "position": (start, worlds, last + 1), "at": its_state.at}
            self.notes("will", **its_notes, digest=self.digest(phase, its_state))
            counts = commit(its_state, copies=copies)
            is_held = any(held.position == its_state._position for held in its_state._held)
            self.notes("did" if counts else "not", **its_notes, held=is_held)
            return counts

        def noted_seal(its_memory: Any, slot: int, position: Any, schedule: Any = None) -> None:
            seal(its_memory, slot, position, schedule)
            if its_memory._base is not None and (phase := self.numbers.get(int(its_memory._base.name))) is not None:
                self.notes("seal", phase=phase, position=position)

        def noted_keep(its_loop: Any) -> None:
            keep(its_loop)
            self.notes("kept")

        state.State._commit = noted_commit  # type: ignore[method-assign]
        memory.Memory.seal = noted_seal  # type: ignore[method-assign]
        loop._Loop._keep = noted_keep  # type: ignore[method-assign]

    def enter(self, phase: int, its_state: Any) -> None:
        """Note with what a function or block begins in a new world."""
        world = basics.running().begun_ns
        if self.world.get(phase) == world:
            return
        self.world[phase] = world
        its_digest = elastic_actions.digest(its_state)
        maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
        self.notes(
            "enter",
            phase=phase,
            world=world,
            size=basics.size(),
            position=its_state._position,
            digest=its_digest,
            at=its_state.at,
            sampler=elastic_actions.samples_of(its_state),
            maps=sorted(name for name in maps if name.startswith("/dev/shm/")),
        )


def play(framework: str, seed: int, folder: Path) -> None:
    """Run the script of a plan on this rank."""
    plan = plan_of(seed, framework)
    notes = Notes(folder)
    notes("begin", pid=os.getpid(), folders=[os.environ["HOROVODISH_RUN_DIR"], os.environ["HOROVODISH_STATE_FOLDER"]])
    faulthandler.register(signal.SIGTERM, chain=True)
    if plan.copies:
        memory.Schedule.is_due = lambda *_: plan.copies == "always"  # type: ignore[method-assign]
        state._Budget.allows = lambda _: plan.copies == "never"  # type: ignore[method-assign]
    hvd = elastic_frameworks.module_of(framework)
    hvd.init()
    notes("running")
    atexit.register(lambda: notes("end"))
    faults, watched = Faults(plan.faults, notes), Watched(notes, plan.phases)
    watched.watch()
    scripts = [elastic_frameworks.of(framework, hvd, phase, seed) for phase in plan.phases]
    states: list[Any] = []
    elastic_actions.set_of_world(hvd)

    def make(number: int) -> Any:
        while len(states) <= number:
            new = scripts[len(states)].make()
            watched.numbers[new._number] = len(states)
            if not states:
                new.register_reset_callbacks([lambda: elastic_actions.set_of_world(hvd)])
            states.append(new)
        return states[number]

    if plan.early:
        make(len(plan.phases) - 1)
    for number, phase in enumerate(plan.phases):
        its_state, script = make(number), scripts[number]
        script.writes = lambda number=number: notes("write", phase=number)

        def come_to(at: int, number: int = number) -> None:
            faults.come_to(number, at)

        def enter(number: int = number, its_state: Any = its_state) -> None:
            watched.enter(number, its_state)
            scripts[number].enter(its_state, basics.running().begun_ns)

        if phase.blocks:
            while True:
                with hvd.elastic.attempt(its_state):
                    enter()
                    if its_state.at == len(phase.actions):
                        break
                    script.play(its_state, come_to, until_block=True)
        else:

            @hvd.elastic.run
            def train(its_state: Any, script: Any = script, enter: Any = enter, come_to: Any = come_to) -> None:
                enter()
                script.play(its_state, come_to)

            train(its_state)
        notes("final", phase=number, digest=script.final(its_state))
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.settrace(None)
    notes("done", finals=[script.final(each) for script, each in zip(scripts, states, strict=True)])


def play_undisturbed(framework: str) -> None:
    """Answer each seed with the digests of its states: by phase and action, and at the end."""
    hvd = elastic_frameworks.module_of(framework)
    hvd.init()
    out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        plan = plan_of(int(line), framework)
        found: list[dict[str, str]] = []
        finals = []
        for phase in plan.phases:
            script = elastic_frameworks.of(framework, hvd, phase, plan.seed)
            its_state = script.make()
            digests: dict[str, str] = {}

            def commit(its_state: Any = its_state, digests: Any = digests) -> None:
                digests[str(its_state.at)] = elastic_actions.digest(its_state)

            script.commit = script.save = lambda _, commit=commit: commit()
            script.is_elastic = False
            commit()
            script.enter(its_state, 0)
            if phase.blocks:
                while its_state.at < len(phase.actions):
                    script.play(its_state, lambda _: None, until_block=True)
                    commit()
            else:
                script.play(its_state, lambda _: None)
            commit()
            found.append(digests)
            finals.append(script.final(its_state))
        os.write(out, (json.dumps({"digests": found, "finals": finals}) + "\n").encode())


if __name__ == "__main__":
    if sys.argv[1] == "--undisturbed":
        play_undisturbed(sys.argv[2])
    else:
        with contextlib.suppress(BrokenPipeError):
            play(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
