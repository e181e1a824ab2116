"""Exchanges of the states of elastic training where the ranks bring different ones."""

from __future__ import annotations

import horovodish as hvd
from horovodish.elastic.exchange import exchange
from support.expect import mismatch
from support.on_ranks import on_ranks


@on_ranks(2, 3)
def test_a_state_that_not_all_ranks_bring_waits_until_they_do() -> None:
    rank = hvd.rank()
    states = [hvd.elastic.ObjectState(step=number) for number in range(3)]
    for state in states:
        state.sync()
        if rank == hvd.size() - 1:
            state.step += 10
            state.save()  # newer than what the others have
    later = 1 if rank == 0 else 0  # rank 0 lacks the first state, the others lack the last one
    exchange(states[later : later + 2], in_recovery=True)
    assert states[1].is_synced
    assert not states[2 * later].is_synced
    for number in (0, 2):
        exchange([states[number]])
    assert [(state.is_synced, state.step) for state in states] == [(True, 10), (True, 11), (True, 12)]


@on_ranks(2)
def test_other_states_outside_of_a_recovery_are_an_error() -> None:
    states = [hvd.elastic.ObjectState(step=number) for number in range(2)]
    first = states[0]._number + 1
    with mismatch(f"rank 0: {first}; rank 1: {first + 1}"):
        exchange([states[hvd.rank()]])
