"""Flags of Horovod's launcher that change nothing here: accepted so that command lines go on working, or refused."""

import argparse

__all__ = ["OF_ELASTIC_TRAINING", "add_to", "notices"]

OVER_MPI = "ranks always find each other over MPI"

# Why there is nothing to do for a flag, by its name.
SWITCHES = {
    "hierarchical_allreduce": "the ranks of a host always share memory, with one ring for each of them between hosts",
    "hierarchical_allgather": "it goes straight from rank to rank, where a detour gains nothing",
    "mpi": OVER_MPI,
    "gloo": OVER_MPI,
    "mpi_threads_disable": "the engine's thread calls MPI",
    "log_with_timestamp": "the log has no timestamps",
    "log_without_timestamp": "the log has no timestamps",
}
WITH_VALUES = {
    "cycle_time_ms": "there are no cycles; the engine acts as soon as there is work",
    "num_nccl_streams": "each GPU has one stream, on which all ranks launch in one order",
    "gloo_timeout_seconds": OVER_MPI,
    "autotune_bayes_opt_max_samples": "autotune climbs, and ends by itself",
    "autotune_gaussian_process_noise": "autotune climbs; it fits no Gaussian process",
}

# These are refused, because a job would not do what they ask for.
OF_ELASTIC_TRAINING = (
    "--min-np",
    "--min-num-proc",
    "--max-np",
    "--max-num-proc",
    "--slots",
    "--slots-per-host",
    "--elastic-timeout",
    "--reset-limit",
    "--host-discovery-script",
    "--blacklist-cooldown-range",
    "--cooldown-range",
)


def add_to(group: argparse._ArgumentGroup) -> None:
    """Adds the flags to a group of a parser; those that are not given are None."""
    for name, reason in SWITCHES.items():
        group.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=reason)
    for name, reason in WITH_VALUES.items():
        group.add_argument(_flag(name), dest=name, metavar="VALUE", help=reason)


def notices(options: argparse.Namespace) -> list[str]:
    """One line for each of these flags that was given."""
    reasons = {**SWITCHES, **WITH_VALUES}
    given = [name for name in reasons if getattr(options, name) is not None]
    return [f"{_flag(name)} is accepted, but has no effect: {reasons[name]}" for name in given]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
