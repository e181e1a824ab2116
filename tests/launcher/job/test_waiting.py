"""Who makes others wait outside of collectives, and what is said about it."""

from __future__ import annotations

from horovodish.launcher.job.waiting import (
    ANSWER_SECONDS,
    DESERTED_SECONDS,
    LEFT_SECONDS,
    Notice,
    Waiting,
    ranks_in_words,
)

WARNING, SHUTDOWN = 60.0, 150.0


def begun(np: int = 3, *, warning: float = WARNING, shutdown: float = 0.0) -> Waiting:
    waiting = Waiting(warning, shutdown)
    waiting.began({rank: ("a", 100 + rank) for rank in range(np)})
    return waiting


def ask(waiting: Waiting, now: float, states: dict[int, str]) -> Notice | None:
    """What is said when ranks have answered with the states of their processes; None also if they are not asked."""
    if not waiting.asks(now):
        return None
    for rank, state in states.items():
        waiting.answered(rank, 200 + rank, state)
    return waiting.notice(now)


def said(waiting: Waiting, now: float, states: dict[int, str]) -> str:
    notice = ask(waiting, now, states)
    assert notice is not None
    return notice.text


def test_a_rank_that_has_not_called_init() -> None:
    waiting = begun()
    assert ask(waiting, 1_000, {}) is None, "nobody waits"
    waiting.reached(0, "init", 200, now=1_000)
    waiting.reached(2, "init", 202, now=1_001)
    assert ask(waiting, 1_059, {}) is None
    text = said(waiting, 1_061, {0: "S", 1: "D", 2: "S"})
    assert text == (
        "ranks 0, 2 have waited in init() for 61 s: rank 1 on a has not called init(): its process 201 waits for a "
        "disk or a network file system"
    )
    assert ask(waiting, 1_120, {0: "S", 1: "R", 2: "S"}) is None, "it is said seldom"
    assert said(waiting, 1_121, {0: "S", 1: "R", 2: "S"}).endswith("its process 201 is computing")
    assert ask(waiting, 1_240, {0: "S", 1: "R", 2: "S"}) is None
    assert ask(waiting, 1_241, {0: "S", 1: "R", 2: "S"}) is not None
    waiting.reached(1, "init", 201, now=1_300)
    for rank in range(3):
        waiting.reached(rank, "running", 200 + rank, now=1_301)
    assert ask(waiting, 9_999, {}) is None


def test_a_stopped_rank_is_named_wherever_it_is() -> None:
    waiting = begun()
    for rank in range(3):
        waiting.reached(rank, "init", 200 + rank, now=0)
    text = said(waiting, 60, {0: "S", 1: "T", 2: "S"})
    assert text.endswith("rank 1 on a: its process 201 is stopped; kill -CONT 201 there lets it go on")
    waiting = begun()
    for rank in range(3):
        waiting.reached(rank, "running", 200 + rank, now=0)
    waiting.reached(0, "exit", 200, now=10)
    waiting.reached(2, "shutdown", 202, now=10)
    assert "rank 1 on a: its process 201 is stopped" in said(waiting, 70, {0: "S", 1: "T", 2: "S"})


def test_a_rank_that_is_done_with_shutdown_is_not_missing_there() -> None:
    waiting = begun(3)
    waiting.reached(0, "shutdown", 200, now=0)
    waiting.reached(1, "stopped", 201, now=0)
    waiting.reached(2, "running", 202, now=0)
    text = said(waiting, 60, {0: "S", 1: "S", 2: "S"})
    assert "rank 2" in text
    assert "rank 1" not in text


def test_nobody_is_missing_in_init() -> None:
    waiting = begun(2)
    for rank in range(2):
        waiting.reached(rank, "init", 200 + rank, now=0)
    assert "ranks 0-1 have waited in init() for 60 s, and no rank is missing" in said(waiting, 60, {0: "S", 1: "S"})


def test_a_supervisor_that_does_not_answer() -> None:
    waiting = begun(2)
    waiting.reached(0, "exit", 200, now=0)
    assert waiting.asks(60)
    waiting.answered(0, 200, "S")
    assert waiting.notice(60) is None, "it has some time"
    notice = waiting.notice(60 + ANSWER_SECONDS)
    assert notice is not None
    assert notice.text.endswith(
        "rank 1 on a does not answer: its supervisor, process 101 there, or the host is stopped"
    )


def test_ranks_that_work_for_long_while_others_have_ended_are_left_alone() -> None:
    waiting = begun(2, shutdown=SHUTDOWN)
    waiting.ended(0, now=0)
    for now in (60, 120, 180, 240, 300):
        assert ask(waiting, now, {1: "R"}) is None
    assert ask(waiting, 360, {1: "T"}) is not None, "unless one is stopped"


def test_the_shutdown_time() -> None:
    late = begun(2, shutdown=SHUTDOWN)
    late.reached(0, "init", 200, now=0)
    ends = [notice.ends_job for now in range(0, 151, 5) if (notice := ask(late, now, {0: "S", 1: "R"}))]
    assert ends == [False, False, True]
    working = begun(2, shutdown=SHUTDOWN)
    working.reached(1, "running", 201, now=0)
    working.reached(0, "exit", 200, now=0)
    notices = [notice for now in range(0, 400, 5) if (notice := ask(working, now, {0: "S", 1: "R"}))]
    assert notices
    assert not any(notice.ends_job for notice in notices), "a rank may evaluate when the others have ended"
    alone = begun(2, warning=0, shutdown=SHUTDOWN)
    alone.reached(0, "init", 200, now=0)
    assert [now for now in range(0, 151, 5) if ask(alone, now, {0: "S", 1: "R"})] == [150]
    never = begun(2, warning=0)
    never.reached(0, "init", 200, now=0)
    assert not never.asks(1e9)


def test_only_a_rank_that_stays_stuck_ends_the_job() -> None:
    waiting = begun(2, shutdown=SHUTDOWN)
    waiting.ended(0, now=0)
    answers = {now: "T" if now in (300, 305) or now >= 600 else "R" for now in range(0, 1_001, 5)}
    notices = {now: ask(waiting, now, {1: state}) for now, state in answers.items()}
    first_end = next(now for now, notice in notices.items() if notice and notice.ends_job)
    assert 600 + SHUTDOWN <= first_end <= 600 + 3 * SHUTDOWN


def test_a_rank_that_ends_without_init_while_others_wait_there() -> None:
    waiting = begun()
    waiting.ended(1, now=0)
    assert waiting.deserted(100) is None, "nobody waits"
    waiting.reached(2, "init", 202, now=100)
    assert waiting.deserted(100 + DESERTED_SECONDS / 2) is None
    text = waiting.deserted(100 + DESERTED_SECONDS)
    assert text is not None
    assert text.startswith("rank 1 on a ended with exit status 0 without init(), where rank 2 waits for it")
    assert "stdin" not in text
    from_stdin = begun(2)
    from_stdin.ended(1, now=0)
    from_stdin.reached(0, "init", 200, now=0)
    assert "(only rank 0 reads stdin: start a script from a file)" in str(from_stdin.deserted(DESERTED_SECONDS))
    used = begun(2)
    for phase in ("init", "running", "shutdown", "stopped", "exit"):
        used.reached(1, phase, 201, now=0)
    used.ended(1, now=0)
    used.reached(0, "init", 200, now=1)
    assert used.deserted(1_000) is None


def test_a_rank_whose_init_raised_goes_on_alone() -> None:
    for phases in ((), ("exit",)):  # while it computes, and when it has ended
        waiting = begun(2, shutdown=SHUTDOWN)
        for phase in ("init", "stopped", *phases):
            waiting.reached(0, phase, 200, now=0)
        assert not waiting.is_needed(0)
        if phases:
            waiting.ended(0, now=0)
        waiting.reached(1, "init", 201, now=0)
        assert waiting.deserted(1_000) is None, "it did come to init()"


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words({7, 0, 1, 2}) == "ranks 0-2, 7"


def test_a_rank_that_has_left_while_others_wait_to_begin_again() -> None:
    waiting = begun()
    for rank in range(3):
        waiting.reached(rank, "training", 200 + rank, now=0)
    waiting.reached(0, "stopped", 200, now=1_000)
    assert waiting.left_behind(2_000) == "", "nobody waits for it"
    waiting.reached(1, "regroup", 201, now=1_001)
    waiting.reached(2, "regroup", 202, now=1_001)
    assert waiting.left_behind(1_000 + LEFT_SECONDS) == ""
    assert waiting.left_behind(1_001 + LEFT_SECONDS) == (
        "rank 0 on a called shutdown() more than 10 s ago and still runs, as process 200. ranks 1-2 wait for it to end"
    )
    assert waiting.left_behind(2_000) == "", "once"


def test_a_firewall_is_blamed_between_hosts_alone() -> None:
    for hosts, is_blamed in ((("a", "a"), False), (("a", "b"), True)):
        waiting = Waiting(WARNING, 0.0)
        waiting.began({rank: (host, 100 + rank) for rank, host in enumerate(hosts)})
        for rank in range(2):
            waiting.reached(rank, "init", 200 + rank, now=0)
        text = said(waiting, 61, {0: "S", 1: "S"})
        assert ("and no rank is missing there" in text, "firewall" in text) == (True, is_blamed)
