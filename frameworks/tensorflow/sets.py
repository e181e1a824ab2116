"""Process sets as attributes of operations, which may outlive the set: its number and its ranks."""

from __future__ import annotations

import tensorflow as tf

from horovodish.collectives.process_sets import ProcessSet, added, checked_id, global_process_set


def attribute_of(process_set: ProcessSet) -> str:
    """The attribute `process_set` of an operation, for a set that is in use and contains this rank.

    Number 0 is all ranks, also after another `init()`, so it stands without ranks.

    Raises:
        As `process_sets.checked_id`.
    """
    identity = checked_id(process_set)
    return f"{identity} {process_set.listed_ranks}" if identity else "0"


def set_of(attribute: str | bytes) -> ProcessSet:
    """The set itself.

    Raises:
        ValueError: its number stands for other ranks now, or for none.
    """
    number, _, ranks = tf.compat.as_str(attribute).partition(" ")
    if number == "0":
        return global_process_set
    try:
        process_set = added(int(number))
    except KeyError:
        process_set = None
    if process_set is None or attribute_of(process_set) != tf.compat.as_str(attribute):
        now = "none" if process_set is None else process_set.listed_ranks
        raise ValueError(
            f"process set {number} was one of the ranks {ranks}, and that number now stands for {now}. "
            "Remedy: trace it again after init(): make a new tf.function"
        )
    return process_set
