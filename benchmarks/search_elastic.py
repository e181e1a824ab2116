"""Looks for elastic jobs that break the rule of what a recovery continues from; see `horovodish/elastic/state.py`.

    python benchmarks/search_elastic.py --jobs 300 [--seed N] [--frameworks numpy,torch,tensorflow,keras,jax]

Each job is a random script with random faults, and has a seed of its own from which all of it follows; `elastic_plans`
makes it, and `elastic_scripts` is what its ranks run. They note what they see. It is compared with the rule:

1. Whenever ranks enter a function or block in a new world, all of them have the same bits.
2. These are the bits of a commit of that number, or of the beginning. Samples that are done have had their effect.
3. No newer commit was copied, or held by a rank that is left and has written to nothing since.
4. At the end the bits are the same as after an undisturbed run.
5. The job ends, with exit status 0, and leaves nothing behind.

`--seed N --jobs 1` runs a job again. What is found is printed with the seed and the script; `--keep` keeps it, too. The
exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_plans import FRAMEWORKS, Plan, plan_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.orphans import processes_with

LIMIT_SECONDS = 120.0
MARK = "SEARCH_ELASTIC"
SCRIPT = str(Path(__file__).with_name("elastic_scripts.py"))
LAUNCHER = """
from horovodish.launcher import cli
from horovodish.launcher.elastic import job, slots
for module in (job, slots):
    module.FIRST_COOLDOWN_SECONDS = module.LONGEST_COOLDOWN_SECONDS = 1.0
job.SETTLED_SECONDS = {settled}
raise SystemExit(cli.main())
"""
FRAMEWORKS_FILES = ("torchinductor_", "__autograph_generated_file")
AT_ONCE = 2

Note = dict[str, Any]


class Undisturbed:
    """A process for each framework that runs scripts alone."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def of(self, plan: Plan) -> Note:
        """The digests of a plan's script."""
        with self._locks[plan.framework]:
            process = self._processes.get(plan.framework)
            if process is None:
                command = [sys.executable, SCRIPT, "--undisturbed", plan.framework]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                self._processes[plan.framework] = process
            assert process.stdin is not None and process.stdout is not None
            print(plan.seed, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

    def end(self) -> None:
        """The processes end."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def run(plan: Plan, folder: Path) -> tuple[int | None, list[str]]:
    """Run a job. Returns the exit status, None if it had to be ended, and what is wrong with how it ended."""
    mark, temporary = uuid.uuid4().hex, folder / "tmp"
    temporary.mkdir()
    flags = ["--host-timeout", "3"]
    if plan.slots:
        (folder / "slots").write_text(f"localhost:{plan.np}\n")
        program = folder / "hosts.sh"
        program.write_text(f"#!/bin/sh\ncat {folder}/slots\n")
        program.chmod(0o755)
        flags += ["--max-np", str(plan.np), "--host-discovery-script", str(program)]
    else:
        flags += ["-np", str(plan.np)]
    rank = [sys.executable, SCRIPT, plan.framework, str(plan.seed), str(folder)]
    launcher = LAUNCHER.format(settled=1.0 if plan.grows else 60.0)
    command = [sys.executable, "-c", launcher, "run", "--min-np", str(plan.least), *flags, *rank]
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w") as out:
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    status = _disturbed(plan, folder, job)
    problems = []
    if status is None:
        problems.append(f"5. nothing has happened for {LIMIT_SECONDS:.0f} s")
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(30)
        for pid in processes_with(MARK, mark):
            os.kill(pid, signal.SIGKILL)
        job.wait()
    give_up_at = time.monotonic() + 10
    while (left := list(processes_with(MARK, mark))) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    if left:
        problems.append(f"5. processes are left: {left}")
    places = {place for note in notes_in(folder) for place in [*note.get("folders", ()), *note.get("maps", ())]}
    behind = [place for place in places if Path(place.removesuffix(" (deleted)")).exists()]
    behind += [str(path) for path in temporary.iterdir() if not path.name.startswith(FRAMEWORKS_FILES)]
    if behind:
        problems.append(f"5. left behind: {sorted(behind)}")
    return status, problems


def _disturbed(plan: Plan, folder: Path, job: subprocess.Popen[bytes]) -> int | None:
    choice = random.Random(plan.seed)
    began = None
    to_come = sorted(
        [(seconds, "slots", count) for seconds, count in plan.slots] + [(s, k, c) for s, c, k in plan.kills]
    )
    latest, seen = time.monotonic(), 0
    while job.poll() is None:
        time.sleep(0.01)
        now, files = time.monotonic(), list(folder.glob("notes-*"))
        size = sum(file.stat().st_size for file in files)
        latest, seen = (now, size) if size != seen else (latest, seen)
        if now - latest > LIMIT_SECONDS:
            return None
        if began is None and any('"enter"' in file.read_text() for file in files):
            began = now
        while began is not None and to_come and now - began > to_come[0][0]:
            _, kind, count = to_come.pop(0)
            if kind == "slots":
                (folder / "slots.new").write_text(f"localhost:{count}\n")
                (folder / "slots.new").rename(folder / "slots")
                continue
            found = notes_in(folder)
            trains = {_who(note) for note in found if note["kind"] == "enter"}
            begun = [note for note in found if note["kind"] == "begin" and _who(note) in trains]
            alive = [note for note in begun if Path(f"/proc/{note['pid']}").exists()]
            for note in choice.sample(alive, min(count, len(alive))):
                with (folder / f"notes-{note['start']}-{note['process']}").open("a") as file:
                    file.write(json.dumps({"kind": "fault", "time": time.monotonic(), "fault": kind}) + "\n")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(note["pid"], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    return job.returncode


def notes_in(folder: Path) -> list[Note]:
    """All notes of the ranks of a job, the earliest first."""
    found = []
    for file in folder.glob("notes-*"):
        _, start, process = file.name.split("-")
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append({"start": int(start), "process": int(process), **json.loads(line)})
    return sorted(found, key=lambda note: note["time"])


def compared(plan: Plan, notes: list[Note], status: int | None, undisturbed: Note) -> list[str]:
    """What breaks the rule."""
    problems = []
    for phase in range(len(plan.phases)):
        of_phase = [note for note in notes if note.get("phase") == phase or note["kind"] in ("kept", "fault")]
        problems += _entries(plan, phase, of_phase, undisturbed["digests"][phase])
    for note in notes:
        finals = note.get("finals") or [note["digest"]] if note["kind"] in ("done", "final") else []
        expected = undisturbed["finals"] if note["kind"] == "done" else [undisturbed["finals"][note.get("phase", 0)]]
        for place, (one, other) in enumerate(zip(finals, expected, strict=False)):
            if not _equal(one, other):
                phase = note.get("phase", place)
                problems.append(
                    f"4. process {_who(note)} ends phase {phase} with {one}, an undisturbed run with {other}"
                )
    if status:
        # A rank that is lost when others have come to the end of their scripts gives its status.
        finals = [note["time"] for note in notes if note["kind"] == "final" and note["phase"] == len(plan.phases) - 1]
        ended = {_who(note) for note in notes if note["kind"] == "end"}
        killed = {_who(note) for note in notes if note["kind"] == "fault"} - ended
        latest = max((note["time"] for note in notes if _who(note) in killed), default=0.0)
        if not (status > 128 and finals and min(finals) < latest + 2.0):
            problems.append(f"5. the exit status is {status}")
    elif status == 0 and not any(note["kind"] == "done" for note in notes):
        problems.append("5. no rank has come to its end")
    return problems


def _entries(plan: Plan, phase: int, notes: list[Note], digests: dict[str, str]) -> Iterator[str]:
    """What is wrong with the states with which functions and blocks of a phase began."""
    worlds: dict[int, list[Note]] = defaultdict(list)
    for note in notes:
        if note["kind"] == "enter":
            worlds[note["world"]].append(note)
    candidates: dict[int, set[str]] = defaultdict(set)
    if worlds:
        candidates[0] = {digests["0"]} if plan.framework != "keras" else {min(worlds.items())[1][0]["digest"]}
    for note in notes:
        if note["kind"] == "will":
            found = note["digest"] or digests.get(str(note["at"]))
            if found:
                candidates[note["position"][2]].add(found)
    for world in sorted(worlds, key=lambda world: worlds[world][0]["time"]):
        entries = worlds[world]
        first = entries[0]
        for note in entries[1:]:
            for what in ("digest", "position", "sampler", "at"):
                if note[what] != first[what]:
                    yield (
                        f"1. in the world {world} phase {phase} begins with {what} {first[what]} on process "
                        f"{_who(first)}, and with {note[what]} on process {_who(note)}"
                    )
        position = first["position"]
        if first["digest"] not in candidates[position[2]]:
            yield (
                f"2. in the world {world} phase {phase} begins with {first['digest']} at action {first['at']}; it is "
                f"said to be commit {position[2]}, which was {sorted(candidates[position[2]])}"
            )
        for note in entries:
            epoch, done, of_state, counted = note["sampler"] or (0, 0, 0, 0)
            if (epoch, done) != (of_state, counted):
                yield (
                    f"2. process {_who(note)} begins phase {phase} with {done} samples of epoch {epoch} done, of which "
                    f"{counted} of epoch {of_state} have had their effect"
                )
        yield from _older_than_promised(plan, phase, notes, first, {(n["start"], n["process"]) for n in entries})


def _older_than_promised(
    plan: Plan, phase: int, notes: list[Note], entry: Note, members: set[tuple[int, int]]
) -> Iterator[str]:
    position = entry["position"]
    before = [note for note in notes if note["time"] < entry["time"]]
    sealed = [note["position"] for note in before if note["kind"] == "seal" and note["position"] < position]
    if sealed and max(sealed)[2] > position[2]:
        yield f"3. phase {phase} begins with commit {position[2]}, though {max(sealed)} was copied: {entry['position']}"
    by_process: dict[tuple[int, int], list[Note]] = defaultdict(list)
    for note in before:
        if note["position" if "position" in note else "kind"] != position:
            by_process[note["start"], note["process"]].append(note)
    for process, its_notes in by_process.items():
        kept = its_notes[-1]["kind"] == "kept"
        is_left = process in members or (kept and process[0] == entry["start"] - 1)
        relevant = [note for note in its_notes if note["kind"] in ("enter", "will", "did", "not", "write")]
        last = relevant[-1] if relevant else None
        # JAX computes the values later, unless somebody looks at them.
        is_sure = plan.framework != "jax" or plan.phases[phase].notes
        if not (is_left and is_sure and last and last["kind"] == "did" and last["held"]):
            continue
        if last["position"][2] > position[2] or last["at"] > entry["at"]:
            yield (
                f"3. phase {phase} begins with commit {position[2]}, though process {process[0]}.{process[1]} is left, "
                f"which held commit {last['position'][2]} at action {last['at']} and has written to nothing since"
            )


def _who(note: Note) -> str:
    return f"{note['start']}.{note['process']}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(math.isclose(each, its, rel_tol=1e-4, abs_tol=1e-5) for each, its in zip(one, other, strict=True))
    return bool(one == other)


def searched(plan: Plan, folder: Path, undisturbed: Undisturbed) -> tuple[list[str], Counter[str]]:
    """Run a job and compare it. Returns what was found, and what has happened."""
    status, problems = run(plan, folder)
    notes = notes_in(folder)
    problems += compared(plan, notes, status, undisturbed.of(plan))
    worlds = {note["world"]: note["start"] for note in notes if note["kind"] == "enter"}
    happened = Counter(
        jobs=1,
        faults=sum(note["kind"] == "fault" for note in notes),
        recoveries=max(len(worlds) - 1, 0),
        starts=len(set(worlds.values())),
        commits=sum(note["kind"] == "did" for note in notes),
    )
    return list(dict.fromkeys(problems)), happened


def main() -> None:
    """Runs jobs, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument(
        "--keep", type=Path, help="a folder for the notes and output of jobs in which something was found"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no job after so long")
    parser.add_argument("--first", action="store_true", help="begin no job after something was found")
    arguments = parser.parse_args()
    frameworks: Sequence[str] = arguments.frameworks.split(",")
    undisturbed, began = Undisturbed(), time.monotonic()
    found, happened = [], defaultdict[str, Counter[str]](Counter)
    lock = threading.Lock()

    def one(plan: Plan) -> None:
        if time.monotonic() - began > arguments.seconds or (found and arguments.first):
            return
        with tempfile.TemporaryDirectory(prefix="search-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            problems, counted = searched(plan, folder, undisturbed)
            with lock:
                happened[plan.framework] += counted
                print(f"{plan.framework} {plan.seed}: {dict(counted)}", flush=True)
                if not problems:
                    return
                found.append((plan.framework, plan.seed))
                command = f"--seed {plan.seed} --jobs 1 --frameworks {plan.framework}"
                said = (folder / "said").read_text()
                report = "\n".join([f"== found: {command}", *problems, plan.said(), said])
                print("\n".join([f"== found: {command}", *problems[:6]]), flush=True)
                if arguments.keep:
                    kept = arguments.keep / f"{plan.framework}-{plan.seed}"
                    kept.mkdir(parents=True, exist_ok=True)
                    (kept / "report").write_text(report)
                    lines = [json.dumps(note) for note in notes_in(folder)]
                    (kept / "notes").write_text("\n".join(lines) + "\n")
                else:
                    print(report, flush=True)

    seeds = range(arguments.seed, arguments.seed + arguments.jobs)
    plans = [plan_of(seed, framework) for seed, framework in zip(seeds, itertools.cycle(frameworks), strict=False)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, plans))
    undisturbed.end()
    for framework, counted in happened.items():
        print(f"{framework}: {dict(counted)}")
    if found:
        sys.exit(f"found something in {len(found)} jobs: {found}")


if __name__ == "__main__":
    main()
