"""What the launcher tells the ranks of an elastic job when some of them are lost: events in, orders out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from horovodish.launcher.elastic.events import Event
from horovodish.launcher.elastic.members import (
    ENDING,
    ENDING_SECONDS,
    FORMING,
    FORMING_SECONDS,
    GATHERING,
    INIT_SECONDS,
    TRAINING,
    Members,
    Orders,
)

GATHERING_SECONDS = 60.0
STOPPED_SECONDS = 5.0


def members(ranks: int = 4, least: int = 2, *, in_same_processes: bool = True) -> Members:
    """Ranks that train since 1 s."""
    made = Members(ranks, least, in_same_processes, GATHERING_SECONDS, STOPPED_SECONDS)
    made.take_orders(0.0)
    for rank in range(ranks):
        made.runs(rank, 1.0)
        made.trains(rank, 1.0)
    assert made.take_orders(1.0) == Orders()
    assert made.has_run
    return made


def said(made: Members) -> list[str]:
    return [event.text for event in made.events]


def leave(made: Members, ranks: Iterable[int], now: float) -> None:
    for rank in ranks:
        made.left_world(rank, now)


def form(made: Members, ranks: Iterable[int], now: float) -> Orders:
    """All leave, and the new world is complete."""
    left = list(ranks)
    leave(made, left, now)
    orders = made.take_orders(now)
    for rank in left:
        made.runs(rank, now)
        made.trains(rank, now)
    return orders


def test_those_that_are_left_make_a_new_world() -> None:
    made = members()
    made.lose(1, "b", "was killed", 10.0)
    assert made.take_orders(10.0) == Orders(news=[(rank, "lost 1") for rank in (0, 2, 3)])
    details = {"rank": 1, "host": "b", "why": "was killed", "left": 3}
    assert made.events == [Event("lost", "rank 1 on b was killed; 3 left", details)]
    assert made.phase == GATHERING
    leave(made, [0, 3], 10.1)
    assert made.take_orders(10.1) == Orders()
    made.left_world(2, 10.2)
    assert made.take_orders(10.2).news == [(rank, "world 0,2,3") for rank in (0, 2, 3)]
    assert made.phase == FORMING
    for rank in (0, 2, 3):
        made.runs(rank, 10.5)
        assert made.phase == TRAINING, "all ranks are in init() before it returns on one"
    assert made.take_orders(10.5) == Orders()
    assert len(made.events) == 1, "they have no state yet"
    made.trains(3, 10.5, 41, 2)
    made.trains(0, 10.6, 41, 2)
    details = {"ranks": 3, "seconds": 0.5, "processes": "the same", "commit": 41, "repeated": 2}
    text = "continuing with 3 ranks after 0.50 s, in the same processes, from commit 41; 2 steps are repeated"
    assert made.events[1:] == [Event("going on", text, details)]
    assert made.worlds == 2
    assert made.lost == [1]


def test_a_rank_that_has_left_already_is_not_told_of_the_next_loss() -> None:
    made = members()
    made.lose(1, "b", "was killed", 10.0)
    made.left_world(0, 10.0)
    made.take_orders(10.0)
    made.lose(3, "b", "was killed", 10.1)
    assert made.take_orders(10.1).news == [(2, "lost 3")]
    made.left_world(2, 10.2)
    assert made.take_orders(10.2).news == [(0, "world 0,2"), (2, "world 0,2")]


def test_ranks_that_leave_before_the_loss_is_seen() -> None:
    made = members()
    leave(made, [0, 1, 2], 10.0)
    assert made.phase == GATHERING
    assert made.take_orders(10.0) == Orders()
    made.lose(3, "b", "was killed", 10.1)
    orders = made.take_orders(10.1)
    assert orders.news == [(rank, "world 0,1,2") for rank in (0, 1, 2)]


def test_several_losses_after_each_other() -> None:
    made = members(5)
    for victim, left in ((0, [1, 2, 3, 4]), (4, [1, 2, 3]), (2, [1, 3])):
        made.lose(victim, "b", "was killed", 10.0)
        world = ",".join(map(str, left))
        assert form(made, left, 10.0).news[-len(left) :] == [(rank, f"world {world}") for rank in left]
        assert made.phase == TRAINING


@pytest.mark.parametrize(
    ("least", "in_same_processes", "why"),
    [(4, True, "3 ranks left, and --min-np is 4"), (2, False, "MPI cannot go on without a lost rank")],
)
def test_new_processes_where_these_cannot_go_on(least: int, in_same_processes: bool, why: str) -> None:
    made = members(least=least, in_same_processes=in_same_processes)
    made.lose(0, "b", "was killed", 10.0)
    made.take_orders(10.0)
    leave(made, [1, 2, 3], 10.1)
    orders = made.take_orders(10.1)
    assert orders.news == [(rank, "end") for rank in (1, 2, 3)]
    assert said(made)[1:] == [f"these processes end: {why}"]
    assert made.phase == ENDING
    for rank in (1, 2, 3):
        made.saved_state(rank)
    assert not made.alive
    assert not made.are_done, "their work is not done"
    assert made.lost == [0], "those that have left their state are not lost"
    assert not made.take_orders(10.2).ends


@pytest.mark.parametrize("is_lost", [False, True])
def test_new_processes_that_come_to_the_same_as_those_before(is_lost: bool) -> None:
    """The scripts of two ranks end early each time; where a rank was lost, new processes may come further."""
    earlier, again = members(), members()
    for made in (earlier, again):
        for rank in (0, 1):
            made.is_done(rank, 10.0)
            made.finish(rank)
        if is_lost:
            made.lose(2, "b", "was killed", 10.0)
        else:
            made.remove(2)
        leave(made, [3], 10.0)
        ends = made is earlier or is_lost
        assert (3, "end" if ends else "alone") in made.take_orders(10.1).news
        assert made.phase == (ENDING if ends else GATHERING)
        again.follow(earlier)
    assert is_lost or again.take_orders(10.2) == Orders(), "it was told once"


def test_a_loss_while_the_others_begin_again() -> None:
    made = members()
    made.lose(0, "b", "was killed", 10.0)
    leave(made, [1, 2, 3], 10.1)
    made.take_orders(10.1)
    made.lose(1, "b", "was killed", 10.2)
    orders = made.take_orders(10.2)
    assert [news for news in orders.news if news[1] == "end"] == [(2, "end"), (3, "end")]
    assert made.phase == ENDING
    made.lose(2, "b", "was killed", 10.3)
    assert made.take_orders(10.3).news == [], "the rest ends already"
    assert made.lost == [0, 1, 2]


def test_a_new_world_that_fails_at_once() -> None:
    made = members()
    made.lose(0, "b", "was killed", 10.0)
    leave(made, [1, 2, 3], 10.1)
    made.take_orders(10.1)
    made.left_world(1, 10.3)
    assert made.phase == ENDING
    assert said(made)[1:] == ["these processes end: the ranks lost touch while they began again"]


def test_a_new_world_that_loses_a_rank_before_all_know_that_it_is_complete() -> None:
    made = members()
    made.lose(0, "b", "was killed", 10.0)
    leave(made, [1, 2, 3], 10.1)
    made.take_orders(10.1)
    made.runs(1, 10.2)
    made.lose(3, "b", "was killed", 10.3)
    made.take_orders(10.3)
    leave(made, [1, 2], 10.4)
    assert made.take_orders(10.4).news == [(1, "world 1,2"), (2, "world 1,2")]


def test_every_wait_has_an_end() -> None:
    made = members()
    made.lose(0, "b", "was killed", 10.0)
    made.take_orders(10.0)
    leave(made, [1, 2], 10.0)
    assert made.take_orders(10.0 + GATHERING_SECONDS) == Orders()
    orders = made.take_orders(10.1 + GATHERING_SECONDS)
    assert orders.kill == [(3, "did not notice for 60 s that others had gone, and was ended")]
    made.lose(3, "b", "was killed", 71.0)
    assert made.take_orders(71.0).news == [(1, "world 1,2"), (2, "world 1,2")]
    assert made.take_orders(71.0 + FORMING_SECONDS) == Orders()
    made.take_orders(71.1 + FORMING_SECONDS)
    assert said(made)[-1] == "these processes end: the ranks did not come together within 10 s"
    made.saved_state(1)
    assert not made.take_orders(81.1 + ENDING_SECONDS).ends
    assert made.take_orders(81.2 + ENDING_SECONDS).ends


def test_a_rank_that_leaves_the_world_while_all_end_is_told_to_end() -> None:
    made = members()
    made.end(10.0, "mpirun's processes on b ended")
    assert made.take_orders(10.0).news == [
        *((rank, "lost") for rank in range(4)),
        *((rank, "end") for rank in range(4)),
    ]
    made.end(10.1, "once more")
    made.left_world(2, 10.2)
    orders = made.take_orders(10.2)
    assert orders.news == [(2, "end")]
    assert said(made) == ["these processes end: mpirun's processes on b ended"]


def test_a_rank_that_computes_has_time_to_leave_its_state() -> None:
    made = members()
    made.end(10.0, "mpirun's processes on b ended")
    leave(made, [0, 1, 2], 10.1)
    assert not made.take_orders(10.0 + GATHERING_SECONDS).ends
    made.left_world(3, 10.0 + GATHERING_SECONDS)
    orders = made.take_orders(10.1 + GATHERING_SECONDS)
    assert (3, "end") in orders.news
    assert not orders.ends
    assert made.take_orders(10.2 + GATHERING_SECONDS + ENDING_SECONDS).ends


def test_a_rank_that_does_not_end_when_it_is_told_to_is_ended() -> None:
    made = members()
    made.call_together(leaving=[3])
    made.take_orders(10.0)
    form(made, range(4), 10.5)
    assert made.take_orders(10.5 + ENDING_SECONDS).kill == []
    assert [rank for rank, _ in made.take_orders(10.6 + ENDING_SECONDS).kill] == [3]
    made.lose(3, "b", "was ended", 21.0)
    assert made.phase == TRAINING, "the others have gone on without it"
    assert made.lost == []


def test_a_rank_that_is_stopped_while_all_end_is_ended() -> None:
    made = members()
    made.end(10.0, "new slots are free")
    made.answered(2, "T", 10.0)
    made.take_orders(10.0)
    assert [rank for rank, _ in made.take_orders(10.1 + STOPPED_SECONDS).kill] == [2]


def test_a_stopped_rank_is_lost() -> None:
    made = members()
    made.answered(2, "T", 10.0)
    made.answered(1, "S", 10.0)
    assert made.take_orders(10.0 + STOPPED_SECONDS).kill == []
    made.answered(2, "T", 11.0)
    assert made.take_orders(10.1 + STOPPED_SECONDS).kill == [(2, "was stopped for 5 s, and was ended")]
    made.lose(2, "b", "was killed", 16.0)
    assert made.take_orders(16.0).kill == []


def test_a_rank_that_was_continued_in_time_is_not_lost() -> None:
    made = members()
    for now in range(10, 40, 4):
        made.answered(2, "T", now)
        made.answered(2, "R", now + 1.0)
        made.answered(2, "T", now + 2.0)
        assert made.take_orders(now + 2.5).kill == []
        made.answered(2, "S", now + 3.0)


def test_ranks_that_finish() -> None:
    made = members()
    made.finish(0)
    assert not made.are_done
    made.lose(1, "b", "was killed", 10.0)
    made.take_orders(10.0)
    leave(made, [2, 3], 10.0)
    assert made.take_orders(10.0).news == [(2, "world 2,3"), (3, "world 2,3")], "the finished one is not among them"
    made.runs(2, 10.1)
    made.runs(3, 10.1)
    made.finish(2)
    made.finish(3)
    assert made.are_done
    assert made.finished == 3


def test_work_is_not_done_if_a_rank_is_lost_and_the_others_do_not_go_on() -> None:
    made = members(2, 1)
    made.finish(0)
    made.lose(1, "b", "was killed", 10.0)
    assert not made.are_done
    assert made.last_loss == "rank 1 on b was killed"
    made = members(3, 1)
    made.finish(0)
    made.lose(1, "b", "was killed", 10.0)
    made.finish(2)
    assert not made.are_done


def test_a_rank_whose_script_has_ended_is_waited_for_because_it_may_have_failed() -> None:
    for is_stuck in (False, True):
        made = members()
        made.is_done(1, 10.0)
        leave(made, [0, 2, 3], 10.0)
        assert made.take_orders(10.0 + ENDING_SECONDS) == Orders()
        if not is_stuck:
            made.finish(1)
        orders = made.take_orders(10.0 + ENDING_SECONDS + is_stuck)
        assert orders.news == [(rank, "world 0,2,3") for rank in (0, 2, 3)]


def test_nothing_is_done_when_none_is_left() -> None:
    made = members(2, 1)
    made.lose(0, "b", "was killed", 10.0)
    made.lose(1, "b", "was killed", 10.0)
    made.take_orders(10.0)
    assert said(made) == ["rank 0 on b was killed; 1 left", "rank 1 on b was killed; 0 left"]
    assert made.take_orders(10.0 + GATHERING_SECONDS) == Orders()
    assert not made.are_done


def test_ranks_that_are_called_together_go_on_without_those_that_leave() -> None:
    made = members()
    made.call_together(leaving=[3])
    assert made.take_orders(10.0).news == [(rank, "hosts") for rank in range(4)]
    assert made.phase == TRAINING
    leave(made, range(4), 10.5)
    assert made.take_orders(10.5).news == [*((rank, "world 0,1,2") for rank in range(3)), (3, "end")]
    made.saved_state(3)
    for rank in range(3):
        made.runs(rank, 10.6)
    assert made.phase == TRAINING
    assert made.lost == []


def test_ranks_that_are_called_together_make_room() -> None:
    made = members()
    made.call_together()
    made.take_orders(10.0)
    leave(made, range(4), 10.5)
    orders = made.take_orders(10.5)
    assert orders.news == [(rank, "end") for rank in range(4)]
    assert said(made) == ["restarting with more ranks: new slots are free"]


def test_ranks_that_are_held_go_on_when_they_are_released() -> None:
    made = Members(2, 1, True, GATHERING_SECONDS, STOPPED_SECONDS, held=True)
    assert made.take_orders(1.0) == Orders()
    made.arrives(0)
    assert not made.have_arrived
    made.arrives(1)
    assert made.have_arrived
    earlier = members()
    earlier.end(3.0, "new slots are free")
    made.follow(earlier)
    made.release()
    assert made.take_orders(2.0).news == [(0, "go 1"), (1, "go 1")]
    assert made.take_orders(3.0) == Orders()
    made.runs(0, 3.5)
    made.trains(0, 4.5)
    assert said(made) == ["continuing with 2 ranks after 1.50 s, in new processes, from the beginning"]


def test_a_loss_while_ranks_take_the_state_belongs_to_the_same_break() -> None:
    made = members()
    made.lose(1, "b", "was killed", 10.0)
    leave(made, [0, 2, 3], 10.1)
    made.take_orders(10.1)
    made.runs(0, 10.2)
    made.lose(2, "b", "was killed", 10.3)
    form(made, [0, 3], 10.5)
    assert said(made)[2:] == ["continuing with 2 ranks after 0.50 s, in the same processes, from the beginning"]


def test_a_world_that_was_never_complete_has_not_run() -> None:
    made = Members(2, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    made.lose(1, "b", "was killed", 2.0)
    assert made.phase == ENDING
    assert not made.has_run
    assert not made.are_done


def test_ranks_in_init_are_killed_at_once_when_one_of_them_is_lost() -> None:
    """Nobody can tell them anything, and they hold no state."""
    for held in (False, True):
        made = Members(3, 1, True, GATHERING_SECONDS, STOPPED_SECONDS, held=held)
        made.take_orders(0.0)
        for rank in range(3):
            made.arrives(rank)
        made.lose(1, "b", "was killed", 2.0)
        assert made.take_orders(2.0) == Orders(ends=True, at_once=True)
        assert not made.have_arrived, "these do not go on"
        assert made.has_begun
        made.runs(0, 2.1)  # the news was under way
        assert not made.has_run
        assert made.last_loss == "rank 1 on b was killed"


def test_a_script_that_has_come_to_init_can_be_started_again() -> None:
    made = Members(3, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    made.arrives(1)
    assert made.can_spare(1)
    assert not made.can_spare(2), "it may never come to init()"
    made.lose(1, "b", "was killed", 2.0)
    assert made.has_begun and made.can_spare(2)
    again = Members(3, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    assert not again.can_spare(0)
    again.follow(made)
    assert again.can_spare(0), "the script came to init() before"
    third = Members(3, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    third.follow(again)
    assert third.can_spare(0)


def test_a_rank_that_stays_in_init_after_a_loss() -> None:
    """It waits there for the lost one, though init() has returned on others."""
    made = Members(4, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    made.take_orders(0.0)
    for rank in (0, 1, 2):
        made.runs(rank, 1.0)
    made.lose(1, "b", "was killed", 10.0)
    leave(made, [0, 2], 10.1)
    assert made.take_orders(10.0 + INIT_SECONDS).news == [(rank, "lost 1") for rank in (0, 2, 3)]
    assert made.phase == GATHERING, "the news that init() has returned may be under way"
    orders = made.take_orders(10.1 + INIT_SECONDS)
    assert said(made)[1:] == ["these processes end: a rank was lost while others were in init()"]
    assert (orders.ends, orders.at_once) == (True, True)


def test_a_rank_that_stays_in_init_after_a_loss_and_has_the_state() -> None:
    """It hears the launcher, because it has trained before."""
    made = members()
    made.lose(0, "b", "was killed", 10.0)
    leave(made, [1, 2, 3], 10.1)
    made.take_orders(10.1)
    made.runs(1, 10.2)
    made.lose(1, "b", "was killed", 10.3)
    assert made.take_orders(10.3 + INIT_SECONDS).news == [(2, "lost 1"), (3, "lost 1")]
    orders = made.take_orders(10.4 + INIT_SECONDS)
    assert [news for news in orders.news if news[1] == "end"] == [(2, "end"), (3, "end")]
    assert not orders.ends


def test_ranks_in_init_are_killed_when_mpirun_ends() -> None:
    made = Members(2, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    made.take_orders(0.0)
    made.end(1.0, "mpirun's processes on b ended")
    assert made.take_orders(1.0) == Orders(ends=True, at_once=True)


def untrained(ranks: int) -> Members:
    made = Members(ranks, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
    made.take_orders(0.0)
    for rank in range(ranks):
        made.runs(rank, 1.0)
    return made


@pytest.mark.parametrize("is_known", [True, False])
def test_scripts_that_fail_because_of_a_loss_begin_again_if_none_has_trained(is_known: bool) -> None:
    made = untrained(3)
    if is_known:
        made.lose(1, "b", "was killed", 2.0)
    assert made.strand(0, 2.0)
    made.remove(0)
    if not is_known:
        assert made.none_shall_go_on, "the launcher knows of no loss"
        made.lose(1, "b", "was killed", 2.1)
    assert not made.none_shall_go_on
    assert made.take_orders(2.1).at_once
    assert said(made)[1:] == ["these processes end: a rank was lost before training had begun"]
    following = untrained(3)
    following.follow(made)
    assert not following.strand(0, 3.0), "a script that never trains in a block would begin again for ever"
    assert not members(3).strand(0, 2.0), "they have trained"


def test_new_processes_begin_where_a_rank_cannot_go_on_in_its_process() -> None:
    made = untrained(3)
    made.lose(1, "b", "was killed", 2.0)
    leave(made, [0], 2.1)
    assert made.take_orders(2.1).news == [(0, "lost 1"), (2, "lost 1")]
    made.left_world(2, 2.2, anew=True)
    assert made.take_orders(2.2).news == [(0, "end"), (2, "end")]
    assert said(made)[1:] == ["these processes end: not all ranks can repeat what has to be repeated"]


def test_a_call_is_taken_back_before_anybody_has_left() -> None:
    made = members(2, 1)
    made.call_together()
    made.take_orders(10.0)
    made.call_off()
    assert made.take_orders(10.1).news == [(0, "stay"), (1, "stay")]
    assert made.phase == TRAINING
    assert made.events == []
    made.call_together()
    assert made.take_orders(11.0).news == [(0, "hosts"), (1, "hosts")]
    leave(made, [0, 1], 11.1)
    made.take_orders(11.1)
    assert said(made) == ["restarting with more ranks: new slots are free"]


def test_a_call_is_taken_back_after_a_rank_has_left() -> None:
    made = members(2, 1)
    made.call_together()
    made.take_orders(10.0)
    made.left_world(1, 10.1)
    made.call_off()
    assert made.take_orders(10.2) == Orders()
    assert form(made, [0], 10.3).news == [(0, "world 0,1"), (1, "world 0,1")]
    made.runs(1, 10.4)
    assert said(made) == ["continuing with 2 ranks after 0.20 s, in the same processes, from the beginning"]


def test_a_call_cannot_be_taken_back_where_mpi_does_not_begin_again() -> None:
    made = members(2, 1, in_same_processes=False)
    made.call_together()
    leave(made, [0], 10.1)
    made.call_off()
    leave(made, [1], 10.2)
    orders = made.take_orders(10.2)
    assert [news for news in orders.news if news[1] == "end"] == [(0, "end"), (1, "end")]
    assert said(made) == ["these processes end: MPI cannot begin again in the same processes"]


def test_ranks_whose_scripts_have_ended_are_ended_if_they_wait_for_a_lost_one() -> None:
    """Ranks that have trained end by themselves, and may take their time."""
    for have_state in (False, True):
        made = Members(2, 1, True, GATHERING_SECONDS, STOPPED_SECONDS)
        made.take_orders(0.0)
        for rank in range(2):
            made.runs(rank, 1.0)
            if have_state:
                made.trains(rank, 1.0)
        made.is_done(0, 10.0)
        made.lose(1, "b", "was killed", 10.0)
        assert not made.take_orders(10.0 + ENDING_SECONDS).ends
        assert made.take_orders(10.1 + ENDING_SECONDS).ends != have_state


def test_a_rank_that_is_about_to_leave_is_not_in_init() -> None:
    made = members()
    made.call_together(leaving=[3])
    leave(made, range(4), 10.0)
    made.take_orders(10.0)
    for rank in range(3):
        made.runs(rank, 10.1)
        made.trains(rank, 10.1)
    made.lose(0, "b", "was killed", 10.2)
    made.take_orders(10.3 + INIT_SECONDS)
    assert made.phase == GATHERING
