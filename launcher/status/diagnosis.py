"""The problems of a job, in sentences that name the rank, its host and the call."""

from collections.abc import Collection, Iterable

from horovodish.launcher.job.waiting import MOST_NAMED, ranks_in_words
from horovodish.launcher.status.answers import OnGpu, Pending, RankStatus
from horovodish.launcher.status.jobs import JobStatus

WORTH_SECONDS = 2.0
"""Ranks of a healthy job wait for each other, too, but not for so long."""
LONG_ON_GPU_SECONDS = 1.0
"""The row of a rank mentions its GPU if it has ended nothing for so long."""


def diagnosis(job: JobStatus) -> list[str]:
    """The sentences, what matters most first. Empty if nothing is wrong."""
    if not job.answers:
        what = f"is stopped. kill -CONT {job.process} lets it go on" if job.is_stopped else "does not answer"
        return [f"the launcher, process {job.process}, {what}"]
    if job.awaited:
        return [f"no rank has been started yet: {job.awaited}"]
    ranks = [each for each in job.ranks if not each.has_ended]
    stuck = [each for each in ranks if each.is_stopped or each.is_mute]
    outside = [text for seconds, text in sorted(job.waits, reverse=True) if seconds >= WORTH_SECONDS]
    is_waited_for = any(each.waited[1] for each in ranks) or not outside
    sentences = ["the launcher is ending the ranks"] if job.is_ending else []
    sentences += _of_stuck(stuck, ranks) if is_waited_for else []
    # A launched operation needs no script any more, so a late script may wait for a GPU, but no GPU waits for it.
    sentences += _of_gpus(ranks, is_any_stuck=bool(stuck))
    sentences += _of_missing(ranks, {each.rank for each in stuck})
    sentences += outside
    return sentences or _of_slow_operations(ranks)


def named(ranks: Collection[int], all_ranks: Iterable[RankStatus]) -> str:
    """For example "ranks 2, 3 on beta"."""
    hosts = dict.fromkeys(each.host for each in all_ranks if each.rank in ranks)
    return f"{ranks_in_words(ranks)} on {', '.join(hosts)}"


def what_it_does(rank: RankStatus) -> str:
    """What a rank does, as a sentence without its subject: "waits in allreduce 'x' for 41 s"."""
    if rank.has_ended:
        return "has ended"
    if rank.is_stopped or rank.is_mute:
        call = f"last called {rank.last_call} {_seconds(rank.last_call_seconds)} ago" if rank.last_call else ""
        has_not = "it has not ended" if rank.under_way == 1 else f"{rank.under_way} calls have not ended"
        return ", ".join(filter(None, (_what_stops(rank), call, has_not if rank.under_way else "")))
    if rank.phase not in ("running", "training"):
        words = {None: "has not called init()", "init": "waits in init()", "shutdown": "is in shutdown()"}
        words |= {"stopped": "has called shutdown()", "exit": "has come to the end of the script"}
        words |= {"regroup": "waits for the other ranks to leave", "anew": "waits for new processes"}
        seconds = f" for {rank.phase_seconds:.0f} s" if rank.phase in ("init", "shutdown", "regroup", "anew") else ""
        return words.get(rank.phase, "") + seconds
    if rank.waits:
        first, *others = rank.waits
        where = "is executing" if first.is_decided else "waits in"
        more = f" (and in {len(others)} more)" if others else ""
        text = f"{where} {first.call} for {_seconds(first.seconds)}{more}"
    elif rank.transfers:
        text = "waits in " + _transfer(*rank.transfers[0])
    else:
        text = rank.does[0] if rank.does else "cannot say what it does, because its host has no room for its page"
    if rank.gpu is None or rank.gpu.idle_seconds < LONG_ON_GPU_SECONDS:
        return text
    how = "has started it, and waits for another rank's GPU or hangs" if rank.gpu.has_started else "has not started it"
    launched = f"launched {rank.gpu.call} on its GPU {_seconds(rank.gpu.launched_seconds)} ago, and the GPU {how}"
    return "; ".join((text, launched) if rank.waits or rank.transfers else (launched, text))


def _what_stops(rank: RankStatus) -> str:
    if rank.is_stopped:
        return "is stopped" if rank.state == "T" else "is stopped by a debugger"
    return (
        "does not answer: the engine is stuck"
        if rank.state
        else "does not answer: the supervisor or the host is stopped"
    )


def _of_stuck(stuck: list[RankStatus], ranks: list[RankStatus]) -> list[str]:
    """Ranks that cannot go on by themselves, and who waits meanwhile: a sentence for each reason."""
    waiting = {each.rank: each.waited for each in ranks if each.waited[1] and each not in stuck}
    sentences = []
    for what in dict.fromkeys(map(_what_stops, stuck)):
        its = [each for each in stuck if _what_stops(each) == what]
        text = f"{named([each.rank for each in its], ranks)} {_plural(what) if len(its) > 1 else what}"
        seconds, call = max(waiting.values(), default=(0.0, ""))
        if seconds >= WORTH_SECONDS:
            have = "has" if len(waiting) == 1 else "have"
            text += f"; {ranks_in_words(waiting)} {have} waited in {call} for {_seconds(seconds)}"
        if its[0].state == "T":
            text += f". kill -CONT {its[0].process} there lets " + (
                "it go on" if len(its) == 1 else f"rank {its[0].rank} go on"
            )
        elif not its[0].state:
            processes = [str(each.supervisor) for each in its[:MOST_NAMED] if each.supervisor]
            text += (
                f". If it is the supervisor, kill -CONT {' '.join(processes)} there lets it go on" if processes else ""
            )
        sentences.append(text)
    return sentences


def _plural(what: str) -> str:
    return what.replace("is stopped", "are stopped", 1) if what.startswith("is") else what.replace("does", "do", 1)


def _of_missing(ranks: list[RankStatus], stuck: set[int]) -> list[str]:
    """Collectives that some ranks have called and others have not, a sentence for each group of those."""
    calls = {each.rank: {(wait.process_set, wait.name) for wait in each.waits} for each in ranks}
    found: dict[frozenset[int], tuple[float, Pending, set[int]]] = {}
    for pending in (pending for each in ranks for pending in each.pending):
        key = (pending.process_set, pending.name)
        called = {rank for rank, its in calls.items() if key in its}
        # The root has not heard of a rank that has called it if the rank between the two is stopped.
        missing = frozenset(pending.missing - called - stuck)
        since = [wait.seconds for each in ranks for wait in each.waits if (wait.process_set, wait.name) == key]
        seconds = max([pending.seconds, *since])
        if missing and seconds >= WORTH_SECONDS and seconds > found.get(missing, (0.0,))[0]:
            found[missing] = seconds, pending, called or set(pending.submitted)
    sentences = []
    for missing, (seconds, pending, called) in sorted(found.items(), key=lambda its: -its[1][0])[:MOST_NAMED]:
        has, have = ("has" if len(each) == 1 else "have" for each in (missing, called))
        text = f"{named(missing, ranks)} {has} not called {pending.call}: "
        text += f"{ranks_in_words(called)} {have} waited for it for {_seconds(seconds)}"
        one = next((each for each in ranks if missing == {each.rank}), None)
        sentences.append(text + (f". Rank {one.rank} {what_it_does(one)}" if one else ""))
    return sentences


def _of_gpus(ranks: list[RankStatus], *, is_any_stuck: bool) -> list[str]:
    """Operations that GPUs have not ended, a sentence for each group of GPUs that others wait for."""
    started: dict[tuple[int, str], dict[int, OnGpu]] = {}
    behind: dict[tuple[int, str], dict[int, OnGpu]] = {}
    for rank in ranks:
        if (gpu := rank.gpu) and gpu.idle_seconds >= WORTH_SECONDS:
            groups = started if gpu.has_started else behind
            groups.setdefault((gpu.process_set, gpu.name), {})[rank.rank] = gpu
    sentences = []
    for (process_set, _), its in behind.items():
        text = f"{_gpus(named(its, ranks), its, 'has', 'have')} not started {_launched(its)}: " + (
            "it still computes earlier work, or hangs" if len(its) == 1 else "they still compute earlier work, or hang"
        )
        waiting = [rank for (of, _), group in started.items() if of == process_set for rank in group]
        text += f"; {_gpus(ranks_in_words(waiting), waiting, 'waits', 'wait')} for it" if waiting else ""
        sentences.append(text)
    if started and not behind and not is_any_stuck:
        its = max(started.values(), key=lambda group: max(gpu.launched_seconds for gpu in group.values()))
        text = f"{_gpus(named(its, ranks), its, 'has', 'have')} started {_launched(its)}, and not ended it: " + (
            "it hangs, or waits for another rank's GPU" if len(its) == 1 else "one of them hangs, or the network does"
        )
        sentences.append(text)
    return sentences


def _gpus(whose: str, ranks: Collection[int], verb: str, plural: str) -> str:
    return f"the GPU of {whose} {verb}" if len(ranks) == 1 else f"the GPUs of {whose} {plural}"


def _launched(gpus: dict[int, OnGpu]) -> str:
    oldest = max(gpus.values(), key=lambda gpu: gpu.launched_seconds)
    return f"{oldest.call}, launched {_seconds(oldest.launched_seconds)} ago"


def _of_slow_operations(ranks: list[RankStatus]) -> list[str]:
    slow = [(each, wait) for each in ranks for wait in each.waits if wait.seconds >= WORTH_SECONDS]
    if not slow:
        texts = [(each, _transfer(*its)) for each in ranks for its in each.transfers if its[0] >= WORTH_SECONDS]
        return [f"{named([each.rank], ranks)} waits in {text}" for each, text in texts[:MOST_NAMED]]
    _, longest = max(slow, key=lambda its: its[1].seconds)
    who = {each.rank for each, wait in slow if wait.name == longest.name}
    known = "every rank has called it" if longest.is_decided else "it is not known which rank has not called it"
    have = "has" if len(who) == 1 else "have"
    return [f"{named(who, ranks)} {have} waited in {longest.call} for {_seconds(longest.seconds)}: {known}"]


def _transfer(seconds: float, call: str) -> str:
    return f"{call}, for {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
