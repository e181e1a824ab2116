"""The environment variables of the ranks."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from horovodish import version
from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.job.launcher_end import Hello
from horovodish.launcher.mpirun.installation import search_path
from horovodish.settings import NP_VARIABLE, Value, table

THREADS_VARIABLE = "OMP_NUM_THREADS"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
HOROVOD_FOLDER = str(Path(version.__file__).parent.resolve() / "as_horovod" / "on_path")
"""The folder that --as-horovod puts first on PYTHONPATH. It holds nothing but the module `horovod`."""

# Variables of a host, a login or a process. MPI passes on its own parameters itself.
_OF_ONE_HOST = re.compile(
    r"_|HOME|HOST|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|USER|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|LS_COLORS"
    r"|(BASH_FUNC|DBUS|HYDRA|HYDI|I_MPI_HYDRA|LSB|LSF|OMPI|PBS|PMI|PMIX|PRTE|SLURM|SSH|XDG)_.*"
)
_MOST_HOSTS_NAMED = 4


def with_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """The user's environment with the settings that were given as flags. A flag overrides a variable.

    Args:
        environ: the user's environment.
        flags: text by the name of the setting.
    """
    return {**environ, **{row.variable: flags[row.name] for row in table() if row.name in flags}}


def rank_environment(
    environ: Mapping[str, str], np: int, settings: Mapping[str, Value], *, unbuffered: bool
) -> dict[str, str]:
    """The variables of every rank. PYTHONFAULTHANDLER is one of them: Python then shows the line where a rank crashes.

    Args:
        environ: the user's environment, with the flags.
        np: number of ranks.
        settings: value by name. A setting that came from a variable of Horovod is set under our name, so that only the
            launcher prints a notice about it, and not every rank.
        unbuffered: whether Python writes at once what a rank prints. Otherwise a pipe delivers it in blocks.
    """
    ours = {NP_VARIABLE: str(np), "PATH": search_path(environ)}
    for row in table():
        if row.horovod_variable in environ and row.variable not in environ:
            ours[row.variable] = str(settings[row.name])
    defaults = {"PYTHONFAULTHANDLER": "1", **({"PYTHONUNBUFFERED": "1"} if unbuffered else {})}
    return {**defaults, **environ, **ours}


def with_horovods_names(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the folder of our module `horovod` in front of PYTHONPATH."""
    before = environ.get("PYTHONPATH")
    # An empty entry would mean the current folder.
    return {**environ, "PYTHONPATH": f"{HOROVOD_FOLDER}{os.pathsep}{before}" if before else HOROVOD_FOLDER}


def exported(environ: Mapping[str, str]) -> list[str]:
    """The sorted names of the variables to pass to other hosts: all but those that describe this host."""
    names = (name for name in environ if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
    return sorted(name for name in names if not _OF_ONE_HOST.fullmatch(name))


def rank_variables(
    hellos: Iterable[Hello], *, with_threads: bool, gpus_per_rank: int | None = None
) -> dict[int, dict[str, str]]:
    """The variables that differ between ranks, by rank.

    Args:
        hellos: of all ranks.
        with_threads: whether to set the number of threads. The ranks of a host share its cores evenly.
        gpus_per_rank: how many GPUs of its host each rank sees; None: all.

    Raises:
        SettingError: a host has fewer GPUs than that.
    """
    variables = {}
    for ranks in _by_host(hellos):
        for local_rank, hello in enumerate(ranks):
            own = variables[hello.rank] = {THREADS_VARIABLE: str(_threads(hello, len(ranks)))} if with_threads else {}
            if gpus_per_rank is not None:
                chosen = hello.gpus[local_rank * gpus_per_rank :][:gpus_per_rank]
                if len(chosen) < gpus_per_rank:
                    raise SettingError(
                        f"--gpus-per-rank {gpus_per_rank} needs {len(ranks) * gpus_per_rank} GPUs on {hello.host}, "
                        f"which has {len(hello.gpus)} for its {counted(len(ranks), 'rank')}"
                    )
                own[GPUS_VARIABLE] = ",".join(chosen)
    return variables


def torchs_variables(hellos: Collection[Hello], address: str, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """The variables that torchrun sets for each process, by rank, so that scripts for torchrun find the other ranks.

    Args:
        hellos: of all ranks.
        address: at which the hosts reach rank 0.
        environ: the user's environment; where he has set MASTER_ADDR or MASTER_PORT, they stay.
    """
    first = next(hello for hello in hellos if hello.rank == 0)
    master = {"MASTER_ADDR": address, "MASTER_PORT": str(first.port)}
    everywhere = {name: value for name, value in master.items() if name not in environ}
    variables = {}
    hosts = _by_host(hellos)
    for number, ranks in enumerate(hosts):
        for local_rank, hello in enumerate(ranks):
            own = {
                "RANK": hello.rank,
                "WORLD_SIZE": len(hellos),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(ranks),
                "GROUP_RANK": number,
                "GROUP_WORLD_SIZE": len(hosts),
                "ROLE_RANK": hello.rank,
                "ROLE_WORLD_SIZE": len(hellos),
            }
            variables[hello.rank] = {**{name: str(value) for name, value in own.items()}, **everywhere}
    return variables


def threads_notices(hellos: Iterable[Hello]) -> list[str]:
    """Messages about the chosen numbers of threads: one line for all hosts that are alike."""
    alike: dict[str, list[str]] = {}
    hosts = _by_host(hellos)
    for ranks in hosts:
        threads = sorted({_threads(hello, len(ranks)) for hello in ranks})
        counts = f"{counted(len(ranks), 'rank')} on {counted(ranks[0].cores, 'core')}"
        chosen = f"{THREADS_VARIABLE}={' or '.join(map(str, threads))} for each; set it to choose another number"
        alike.setdefault(f"{counts}{{}}: {chosen}", []).append(ranks[0].host)
    if len(hosts) == 1:
        return [text.format("") for text in alike]
    return [text.format(f" of {_names(names)}") for text, names in alike.items()]


def _by_host(hellos: Iterable[Hello]) -> list[list[Hello]]:
    hosts: dict[tuple[str, str], list[Hello]] = {}
    for hello in sorted(hellos, key=lambda hello: hello.rank):
        hosts.setdefault(hello.host_id, []).append(hello)
    return list(hosts.values())


def _threads(hello: Hello, local_size: int) -> int:
    is_bound = hello.own_cores < hello.cores
    return hello.own_cores if is_bound else max(1, hello.cores // local_size)


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) > _MOST_HOSTS_NAMED:
        return f"each of {len(hosts)} hosts"
    return ("each of " if len(hosts) > 1 else "") + ", ".join(hosts)
