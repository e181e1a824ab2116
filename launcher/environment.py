"""The environment that the ranks get."""

import re
from collections.abc import Iterable, Mapping, Sequence

from horovodish.errors import SettingError
from horovodish.launcher.installation import search_path
from horovodish.launcher.link import Arrival
from horovodish.settings import NP_VARIABLE, Value, table

__all__ = [
    "GPUS_VARIABLE",
    "THREADS_VARIABLE",
    "exported",
    "rank_environment",
    "rank_variables",
    "threads_notices",
    "with_settings",
]

THREADS_VARIABLE = "OMP_NUM_THREADS"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"

# What belongs to a host, a login or a process there. MPI passes on its own parameters itself.
_OF_ONE_HOST = re.compile(
    r"_|HOME|HOST|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|USER|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|LS_COLORS"
    r"|(BASH_FUNC|DBUS|HYDRA|HYDI|I_MPI_HYDRA|LSB|LSF|OMPI|PBS|PMI|PMIX|PRTE|SLURM|SSH|XDG)_.*"
)
_MOST_HOSTS_NAMED = 4


def with_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the settings that the user gave as flags are set. A flag counts more than a variable.

    Args:
        environ: the user's environment.
        flags: text by the name of the setting.
    """
    return {**environ, **{row.variable: flags[row.name] for row in table() if row.name in flags}}


def rank_environment(
    environ: Mapping[str, str], np: int, settings: Mapping[str, Value], *, unbuffered: bool
) -> dict[str, str]:
    """The variables of every rank.

    Args:
        environ: the user's environment, with the flags.
        np: number of ranks.
        settings: value by name. Those that came from a variable of Horovod are set under our name, so that the launcher
            alone gives notice of it.
        unbuffered: whether Python shall write what it prints at once, because nothing else makes a pipe live.
    """
    ours = {NP_VARIABLE: str(np), "PATH": search_path(environ)}
    for row in table():
        if row.horovod_variable in environ and row.variable not in environ:
            ours[row.variable] = str(settings[row.name])
    defaults = {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    return {**defaults, **environ, **ours}


def exported(environ: Mapping[str, str]) -> list[str]:
    """The names of the variables that ranks on other hosts get, in order: those that do not belong to this host."""
    names = (name for name in environ if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
    return sorted(name for name in names if not _OF_ONE_HOST.fullmatch(name))


def rank_variables(
    arrivals: Iterable[Arrival], *, with_threads: bool, gpus_per_rank: int | None = None
) -> dict[int, dict[str, str]]:
    """The variables that each rank gets alone, by rank.

    Args:
        arrivals: of all ranks.
        with_threads: whether to set with how many threads a rank computes, so that the ranks of a host together use
            each core once.
        gpus_per_rank: how many GPUs of its host each rank shall see; None lets it see all.

    Raises:
        SettingError: a host has fewer GPUs than that.
    """
    variables = {}
    for ranks in _by_host(arrivals):
        for local_rank, arrival in enumerate(ranks):
            own = variables[arrival.rank] = (
                {THREADS_VARIABLE: str(_threads(arrival, len(ranks)))} if with_threads else {}
            )
            if gpus_per_rank is not None:
                chosen = arrival.gpus[local_rank * gpus_per_rank :][:gpus_per_rank]
                if len(chosen) < gpus_per_rank:
                    raise SettingError(
                        f"--gpus-per-rank {gpus_per_rank} needs {len(ranks) * gpus_per_rank} GPUs on {arrival.host}, "
                        f"which has {len(arrival.gpus)} for its {_count(len(ranks), 'rank')}"
                    )
                own[GPUS_VARIABLE] = ",".join(chosen)
    return variables


def threads_notices(arrivals: Iterable[Arrival]) -> list[str]:
    """Tells the user about the threads that were chosen for the ranks: a line for all hosts that are alike."""
    alike: dict[str, list[str]] = {}
    hosts = _by_host(arrivals)
    for ranks in hosts:
        threads = sorted({_threads(arrival, len(ranks)) for arrival in ranks})
        counts = f"{_count(len(ranks), 'rank')} on {_count(ranks[0].cores, 'core')}"
        chosen = f"{THREADS_VARIABLE}={' or '.join(map(str, threads))} for each; set it to choose another number"
        alike.setdefault(f"{counts}{{}}: {chosen}", []).append(ranks[0].host)
    if len(hosts) == 1:
        return [text.format("") for text in alike]
    return [text.format(f" of {_names(names)}") for text, names in alike.items()]


def _by_host(arrivals: Iterable[Arrival]) -> list[list[Arrival]]:
    hosts: dict[tuple[str, str], list[Arrival]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.rank):
        hosts.setdefault(arrival.place, []).append(arrival)
    return list(hosts.values())


def _threads(arrival: Arrival, local_size: int) -> int:
    is_bound = arrival.own_cores < arrival.cores
    return arrival.own_cores if is_bound else max(1, arrival.cores // local_size)


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) > _MOST_HOSTS_NAMED:
        return f"each of {len(hosts)} hosts"
    return ("each of " if len(hosts) > 1 else "") + ", ".join(hosts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
