"""Every knob of horovodish, in one table.

The fields of `Settings` are the table: name, type, default, accepted values and one sentence for each knob. A knob
`spin_us` is set with the variable HOROVODISH_SPIN_US or the launcher's flag `--spin-us`. Variables, flags, the
documentation and the engine's options are derived from this table, and nothing else reads the environment for knobs.
"""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from horovodish.errors import SettingError

__all__ = [
    "AGENT_SECRET_VARIABLE",
    "CALLER_VARIABLE",
    "NP_VARIABLE",
    "PREFIX",
    "RANK_PROCESS_VARIABLE",
    "RUN_DIR_VARIABLE",
    "START_VARIABLE",
    "STATE_FOLDER_VARIABLE",
    "SUPERVISOR_PROCESS_VARIABLE",
    "WITHOUT_EFFECT",
    "Setting",
    "Settings",
    "Value",
    "WithoutEffect",
    "load",
    "table",
]

PREFIX = "HOROVODISH_"
NP_VARIABLE = "HOROVODISH_NP"
"""Set by the launcher for the ranks: how many ranks it started."""
RUN_DIR_VARIABLE = "HOROVODISH_RUN_DIR"
"""Set by the launcher for the ranks: the private folder of this run, where a failing rank leaves its reason."""
SUPERVISOR_PROCESS_VARIABLE = "HOROVODISH_SUPERVISOR_PROCESS"
"""Set by the supervisor of a rank: its own process, whose child the rank is."""
AT_END = "at the end of the script"
"""The place that a rank reports to the launcher while it waits for operations that its script has not waited for."""
RANK_PROCESS_VARIABLE = "HOROVODISH_RANK_PROCESS"
"""Set by a rank for the processes that it starts: the rank's process and its job."""
START_VARIABLE = "HOROVODISH_START"
"""Set by the launcher for the ranks of an elastic job: how many times it started ranks before."""
STATE_FOLDER_VARIABLE = "HOROVODISH_STATE_FOLDER"
"""Set for the ranks of an elastic job: a folder in the memory of their host, deleted when the job ends."""
AGENT_SECRET_VARIABLE = "HOROVODISH_AGENT_SECRET"
"""Set by the user for `horovodish agent`, and for a launcher that waits for agents: a secret that both know."""
CALLER_VARIABLE = "HOROVODISH_CALLER"
"""Set for the ranks of `horovodish.run()`: a secret, a port and the addresses at which they reach the caller."""

_FOR_TESTS = ("HOSTS", "GPU", "CUDA", "NCCL", "SHARED_GPU")
_NOT_KNOBS = (
    *(NP_VARIABLE, RUN_DIR_VARIABLE, SUPERVISOR_PROCESS_VARIABLE, RANK_PROCESS_VARIABLE),
    *(START_VARIABLE, STATE_FOLDER_VARIABLE, CALLER_VARIABLE, AGENT_SECRET_VARIABLE),
    *(f"HOROVODISH_TEST_{name}" for name in _FOR_TESTS),
)

Value = int | float | str
T = TypeVar("T", bool, int, float, str, None)

# The groups of the table's rows.
TUNING, AUTOTUNE, STALLS, TIMELINE, START, OUTPUT = "tuning", "autotune", "stalls", "timeline", "start", "output"
COMPATIBILITY = "compatibility"

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One knob: a row of the table.

    Attributes:
        name: its name, with the unit where it has one.
        default: its value when nothing sets it. The type of the default is the type of the knob. None: a number that
            depends on more; `usual_numbers` has the words.
        sentence: what it does, in one sentence.
        group: what it is about, a title among the launcher's flags.
        choices: the accepted words of a text knob. A text knob without choices accepts any text.
        horovods_words: Horovod's words that are accepted, too, each with the choice of the same meaning.
        least: the smallest accepted number.
        most: the largest accepted number.
        horovodrun_flag: the flag of Horovod's launcher with the same meaning, if the name differs from ours.
        horovod_variable: the variable of Horovod with the same meaning; empty if there is none.
        from_horovod: converts the text of that variable to the text of our variable.
        by_rank: True if ranks may have different values. Otherwise `init()` refuses different values.
        is_file: True if it names a file that ranks write.
        usual_numbers: the default in words, where it is None.
    """

    name: str
    default: Value | None
    sentence: str
    group: str
    choices: tuple[str, ...] = ()
    horovods_words: Mapping[str, str] = field(default_factory=dict)
    least: float = 0
    most: float = math.inf
    horovodrun_flag: str = ""
    horovod_variable: str = ""
    from_horovod: Callable[[str], str] = str
    by_rank: bool = False
    is_file: bool = False
    usual_numbers: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The launcher's flag that sets it."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return isinstance(self.default, bool)

    @property
    def usual(self) -> str:
        """The default, in words."""
        if self.is_switch:
            return "on" if self.default else "off"
        return self.usual_numbers or ("none" if self.default == "" else str(self.default))

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.is_switch:
            return "1 (on) or 0 (off)"
        number = "a whole number" if isinstance(self.default, int) else "a number"
        bounds = f" from {self.least}" + (f" to {self.most}" if self.most < math.inf else "")
        return number + bounds

    def parse(self, text: str, source: str) -> Value:
        """The value that `text` stands for.

        Args:
            text: what the user wrote.
            source: where it was written, for the message: a variable or a flag.

        Raises:
            SettingError: `text` is not an accepted value.
        """
        word = text.strip().lower()
        choices = {**{choice: choice for choice in self.choices}, **self.horovods_words}
        words: Mapping[str, Value] = _SWITCH if self.is_switch else choices
        if words:
            if word not in words:
                raise self._refusal(text, source)
            return words[word]
        if isinstance(self.default, str):
            return text
        try:
            number = float(word) if self.default is None else type(self.default)(word)
        except ValueError:
            raise self._refusal(text, source) from None
        if not self.least <= number <= self.most:  # refuses nan, too
            raise self._refusal(text, source)
        return number

    def _refusal(self, text: str, source: str) -> SettingError:
        return SettingError(f"{source}={text!r} is not accepted: {self.name} is {self.accepted} (default {self.usual})")


def _knob(group: str, default: T, sentence: str, **row: Any) -> T:
    """A row of the table; its columns are named as in `Setting`."""
    return field(default=default, metadata={"group": group, "sentence": sentence, **row})


def _mebibytes(count_of_bytes: str) -> str:
    return repr(int(count_of_bytes) / 2**20)


def _opposite(horovods: str) -> str:
    word = horovods.strip().lower()
    if word not in _SWITCH:
        raise ValueError(horovods)
    return str(int(not _SWITCH[word]))


def _timeline(horovods: str) -> str:
    return "" if horovods == "DYNAMIC" else horovods  # Horovod: start_timeline() may be called later


@dataclass(frozen=True)
class Settings:
    """The values of all knobs. The fields are the rows of the table."""

    fusion_threshold_mb: float | None = _knob(
        TUNING,
        None,
        "Gradients are packed into buckets of at most this many MiB; 0 sends each on its own.",
        most=65536,
        usual_numbers="4.0, and 32.0 on GPUs",
        horovod_variable="HOROVOD_FUSION_THRESHOLD",
        from_horovod=_mebibytes,
    )
    cache_capacity: int = _knob(
        TUNING,
        4096,
        "The response cache remembers this many tensors. Negotiating one of them then takes one bit. 0 turns it off.",
        most=2**20,
        horovod_variable="HOROVOD_CACHE_CAPACITY",
    )
    plane: str = _knob(
        TUNING,
        "auto",
        "How tensors move. auto: shared memory within a host, MPI between hosts. mpi_ring: MPI between all ranks, as "
        "if each had a host of its own. nccl: as auto, but a world of one rank also uses NCCL, for measurements.",
        choices=("auto", "mpi_ring", "nccl"),
    )
    chunk_kb: int = _knob(
        TUNING,
        256,
        "Tensors pass through shared memory in chunks of this many KiB. With several hosts, a chunk is enlarged to "
        "whole ring segments.",
        least=4,
        most=2**20,
    )
    ring_segment_kb: int = _knob(
        TUNING,
        0,
        "The MPI ring sends segments of this many KiB, so that reduction overlaps transfer. 0: 252 if init() starts "
        "Open MPI, otherwise 60.",
        most=2**20,
    )
    spin_us: int = _knob(
        TUNING,
        -1,
        "How many microseconds a waiting caller spins before it sleeps: at least 2000 while MPI moves its data, and "
        "none on a host with more ranks than cores. -1: eight times the wake-up time, which init() measures.",
        least=-1,
        most=10**6,
    )
    thread_affinity: str = _knob(
        TUNING,
        "",
        "Cores of the engine's threads, one for each rank of a host, such as 0,4. Without it they may use any core.",
        horovod_variable="HOROVOD_THREAD_AFFINITY",
    )
    stall_check: bool = _knob(
        STALLS,
        True,
        "Watch for ranks that make others wait; off is the same as setting both times to 0.",
        horovod_variable="HOROVOD_STALL_CHECK_DISABLE",
        from_horovod=_opposite,
    )
    stall_check_warning_time_seconds: float = _knob(
        STALLS,
        60.0,
        "After this many seconds of waiting for other ranks, a report names the late ranks and what they do; 0: never.",
        most=86400,
        horovod_variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_check_shutdown_time_seconds: float = _knob(
        STALLS,
        0.0,
        "After this many seconds of waiting for other ranks, every rank raises StallError; 0: never.",
        most=86400,
        horovod_variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    stall_check_stacks: bool = _knob(
        STALLS,
        False,
        "With a stall report, the ranks that others wait for print their Python stacks. This uses the signal SIGUSR2.",
    )
    timeline_filename: str = _knob(
        TIMELINE,
        "",
        "Every rank records a timeline from the start. With trace.json, rank 3 writes trace.rank-3.json. Ranks may "
        "have different names, or none.",
        by_rank=True,
        is_file=True,
        horovod_variable="HOROVOD_TIMELINE",
        from_horovod=_timeline,
    )
    timeline_mark_cycles: bool = _knob(
        TIMELINE,
        False,
        "Mark in the timeline when the engine learned that operations can start.",
        horovod_variable="HOROVOD_TIMELINE_MARK_CYCLES",
    )
    autotune: bool = _knob(
        AUTOTUNE,
        False,
        "During training, find the fusion threshold and the chunk sizes that move the most bytes per second.",
        horovod_variable="HOROVOD_AUTOTUNE",
    )
    autotune_log: str = _knob(
        AUTOTUNE,
        "",
        "CSV file for the measurements of autotune, written by rank 0.",
        is_file=True,
        horovodrun_flag="--autotune-log-file",
        horovod_variable="HOROVOD_AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = _knob(
        AUTOTUNE,
        3,
        "How many samples autotune ignores at the start of training.",
        most=10**6,
        horovod_variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = _knob(
        AUTOTUNE,
        10,
        "How many steps a sample has. Autotune takes the median of their times.",
        least=1,
        most=10**6,
        horovod_variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    start_timeout_seconds: int = _knob(
        START,
        30,
        "How many seconds the ranks may take to find each other.",
        least=1,
        most=86400,
        horovodrun_flag="--start-timeout",
        horovod_variable="HOROVOD_START_TIMEOUT",
    )
    collective_gradients: str = _knob(
        COMPATIBILITY,
        "exact",
        "Scale of the gradients of allgather, broadcast and reducescatter. exact: the gradient of the sum of all N "
        "ranks' losses. horovod: 1/N of this for allgather and broadcast, N times as much for reducescatter.",
        choices=("exact", "horovod"),
    )
    join_average: str = _knob(
        COMPATIBILITY,
        "auto",
        "The divisor of an averaging allreduce when some ranks have joined. present: the number of ranks that have not "
        "joined. size: the number of all ranks, as in Horovod. auto: size if a rank imported horovod before init(), "
        "otherwise present.",
        choices=("auto", "present", "size"),
    )
    log_level: str = _knob(
        OUTPUT,
        "warning",
        "Messages of this severity and above are logged to stderr.",
        choices=("debug", "info", "warning", "error"),
        horovods_words={"trace": "debug", "fatal": "error"},
        by_rank=True,
        horovod_variable="HOROVOD_LOG_LEVEL",
    )

    def bucket_mb(self, *, on_gpu: bool) -> float:
        """`fusion_threshold_mb`, for gradients that are reduced on a GPU or in host memory.

        On a host, a bucket of 4 MiB stays in the caches. Each operation of NCCL takes a time before its first byte, so
        buckets are larger there: of 4 and of 32 MiB, a step of two ranks on one H200 took 132 and 96 ms.
        """
        if self.fusion_threshold_mb is not None:
            return self.fusion_threshold_mb
        return 32.0 if on_gpu else 4.0


@dataclass(frozen=True)
class WithoutEffect:
    """A knob of Horovod's that changes nothing here.

    Attributes:
        name: its name. Horovod derives the name of a flag from it, as we do.
        reason: why it has no effect here.
        is_switch: whether it is on or off.
        values: how many values its flag takes if it is not a switch.
        variable: Horovod's variable for it; empty if there is none.
    """

    name: str
    reason: str
    is_switch: bool = False
    values: int = 1
    variable: str = ""

    @property
    def flag(self) -> str:
        """The flag of Horovod's launcher, which ours accepts."""
        return "--" + self.name.replace("_", "-")


_OVER_MPI = "ranks always find each other over MPI"
_NO_TIMES = "the log has no timestamps"

WITHOUT_EFFECT = (
    WithoutEffect(
        "hierarchical_allreduce",
        "the ranks of a host always share memory, with one ring for each of them between hosts",
        is_switch=True,
        variable="HOROVOD_HIERARCHICAL_ALLREDUCE",
    ),
    WithoutEffect(
        "hierarchical_allgather",
        "an allgather sends directly from rank to rank",
        is_switch=True,
        variable="HOROVOD_HIERARCHICAL_ALLGATHER",
    ),
    WithoutEffect(
        "torus_allreduce",
        "the ranks of a host always share memory, with one ring for each of them between hosts",
        is_switch=True,
        variable="HOROVOD_TORUS_ALLREDUCE",
    ),
    WithoutEffect("mpi", _OVER_MPI, is_switch=True),
    WithoutEffect("gloo", _OVER_MPI, is_switch=True, variable="HOROVOD_CONTROLLER"),
    WithoutEffect("jsrun", "mpirun starts the ranks", is_switch=True),
    WithoutEffect(
        "mpi_threads_disable",
        "the engine's thread calls MPI",
        is_switch=True,
        variable="HOROVOD_MPI_THREADS_DISABLE",
    ),
    WithoutEffect("log_with_timestamp", _NO_TIMES, is_switch=True),
    WithoutEffect("log_without_timestamp", _NO_TIMES, is_switch=True),
    WithoutEffect("log_hide_timestamp", _NO_TIMES, is_switch=True, variable="HOROVOD_LOG_HIDE_TIME"),
    WithoutEffect(
        "cycle_time_ms",
        "there are no cycles; the engine acts as soon as there is work",
        variable="HOROVOD_CYCLE_TIME",
    ),
    WithoutEffect(
        "num_nccl_streams",
        "each GPU has one stream, and all ranks launch on it in one order",
        variable="HOROVOD_NUM_NCCL_STREAMS",
    ),
    WithoutEffect("gloo_timeout_seconds", _OVER_MPI, variable="HOROVOD_GLOO_TIMEOUT_SECONDS"),
    WithoutEffect(
        "autotune_bayes_opt_max_samples",
        "autotune uses hill climbing and ends by itself",
        variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    ),
    WithoutEffect(
        "autotune_gaussian_process_noise",
        "autotune uses hill climbing, not a Gaussian process",
        variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ),
    WithoutEffect("blacklist_cooldown_range", "a slot rests longer each time it loses a rank, up to 300 s", values=2),
)


def table() -> tuple[Setting, ...]:
    """The rows of the table, in order.

    Example:
        >>> [row.variable for row in table()][:2]
        ['HOROVODISH_FUSION_THRESHOLD_MB', 'HOROVODISH_CACHE_CAPACITY']
    """
    defaults = Settings()
    return tuple(Setting(row.name, getattr(defaults, row.name), **row.metadata) for row in fields(Settings))


def load(environ: Mapping[str, str] | None = None, warn: Callable[[str], object] = lambda notice: None) -> Settings:
    """The settings that the environment asks for. Any process can call it; it does not block.

    Only `init()` and the launcher call it. Everything else takes the settings of the running engine, which are the same
    on every rank: `basics.running().settings`.

    If our variable is not set, the HOROVOD_* variable of the same meaning counts, and `warn` gets a notice for each.
    `warn` also gets a notice for each HOROVODISH_* variable that does not exist, with the nearest name that exists, and
    for each HOROVOD_* variable of `WITHOUT_EFFECT`. Ranks of our launcher skip these: the launcher has reported them.

    Args:
        environ: the environment variables; None: the variables of this process.
        warn: gets each notice.

    Returns:
        The values of all knobs.

    Raises:
        SettingError: a variable has a value that is not accepted.

    Example:
        >>> load({"HOROVODISH_SPIN_US": "0"}).spin_us
        0
    """
    environ = os.environ if environ is None else environ
    rows = table()
    known = [row.variable for row in rows] + list(_NOT_KNOBS)
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0)
            warn(f"{variable} is set, but there is no such setting. Did you mean {nearest[0]}?")
    for knob in WITHOUT_EFFECT if NP_VARIABLE not in environ else ():
        if knob.variable in environ:
            warn(f"{knob.variable} is set, but has no effect: {knob.reason}")
    # The types agree because every value was parsed as the type of its row's default.
    return Settings(**{row.name: _value(row, environ, warn) for row in rows})  # type: ignore[arg-type]


def _value(row: Setting, environ: Mapping[str, str], warn: Callable[[str], object]) -> Value | None:
    if row.variable in environ:
        return row.parse(environ[row.variable], row.variable)
    if row.horovod_variable not in environ:
        return row.default
    theirs = environ[row.horovod_variable]
    try:
        ours = row.from_horovod(theirs)
        value = row.parse(ours, row.horovod_variable)
    except ValueError as refusal:
        raise SettingError(
            f"{row.horovod_variable}={theirs!r} is not accepted; unset it, "
            f"or set {row.variable} instead, which is {row.accepted}"
        ) from refusal
    warn(f"{row.horovod_variable} is honoured as {row.variable}={ours}; please set that instead")
    return value
