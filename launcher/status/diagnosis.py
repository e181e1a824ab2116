"""The problems of a job, in sentences that name the rank, its host and the call."""

from collections.abc import Collection, Iterable

from horovodish.launcher.job.waiting import MOST_NAMED, ranks_in_words
from horovodish.launcher.status.answers import Pending, RankStatus
from horovodish.launcher.status.jobs import JobStatus

WORTH_SECONDS = 2.0
"""Ranks of a healthy job wait for each other, too, but not for so long."""


def diagnosis(job: JobStatus) -> list[str]:
    """The sentences, what matters most first. Empty if nothing is wrong."""
    if not job.command:
        what = f"is stopped. kill -CONT {job.process} lets it go on" if job.is_stopped else "does not answer"
        return [f"the launcher, process {job.process}, {what}"]
    if job.awaited:
        return [f"no rank has been started yet: {job.awaited}"]
    ranks = [each for each in job.ranks if not each.has_ended]
    stuck = [each for each in ranks if each.is_stopped or each.is_mute]
    outside = [text for seconds, text in sorted(job.waits, reverse=True) if seconds >= WORTH_SECONDS]
    is_waited_for = any(each.waits for each in ranks) or not outside
    sentences = ["the launcher is ending the ranks"] if job.is_ending else []
    sentences += _of_stuck(stuck, ranks) if is_waited_for else []
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
        return f"{where} {first.call} for {_seconds(first.seconds)}" + (
            f" (and in {len(others)} more)" if others else ""
        )
    if rank.transfers:
        return rank.transfers[0][1]
    return rank.does[0] if rank.does else "does not say what it does: its host has no room for its page"


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
    waiting = {each.rank: each.waits[0] for each in ranks if each.waits and each not in stuck}
    sentences = []
    for what in dict.fromkeys(map(_what_stops, stuck)):
        its = [each for each in stuck if _what_stops(each) == what]
        text = f"{named([each.rank for each in its], ranks)} {_plural(what) if len(its) > 1 else what}"
        if waiting and max(wait.seconds for wait in waiting.values()) >= WORTH_SECONDS:
            longest = max(waiting.values(), key=lambda wait: wait.seconds)
            have = "has" if len(waiting) == 1 else "have"
            text += f"; {ranks_in_words(waiting)} {have} waited in {longest.call} for {_seconds(longest.seconds)}"
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


def _of_slow_operations(ranks: list[RankStatus]) -> list[str]:
    slow = [(each, wait) for each in ranks for wait in each.waits if wait.seconds >= WORTH_SECONDS]
    if not slow:
        texts = [(each, text) for each in ranks for seconds, text in each.transfers if seconds >= WORTH_SECONDS]
        return [f"{named([each.rank], ranks)} {text}" for each, text in texts[:MOST_NAMED]]
    _, longest = max(slow, key=lambda its: its[1].seconds)
    who = {each.rank for each, wait in slow if wait.name == longest.name}
    known = "every rank has called it" if longest.is_decided else "who has not called it is not known"
    have = "has" if len(who) == 1 else "have"
    return [f"{named(who, ranks)} {have} waited in {longest.call} for {_seconds(longest.seconds)}: {known}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
