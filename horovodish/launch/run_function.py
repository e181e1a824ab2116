"""`run()`: call a Python function on N ranks and bring back what it returns. The launcher does it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    hosts: str | None = None,
    hostfile: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    **flags: Any,
) -> list[T]:
    """Calls `func(*args, **kwargs)` on each of `num_proc` ranks, which are processes of their own, and waits for them.

    Works in scripts, notebooks and interactive interpreters, from any thread. The function goes to the ranks by value
    if it is defined in `__main__` or in a notebook, and else as the name of its module, which the ranks import. It
    calls `init()` itself. The output of the ranks appears here. Ctrl-C ends the ranks, and so does the end of this
    process.

    Args:
        func: what each rank calls.
        args: its positional arguments. They are pickled, like everything that travels.
        kwargs: its keyword arguments.
        num_proc: number of ranks.
        hosts: where they run, such as "a:2,b:4"; None is this host, or the hosts that a scheduler has allocated.
        hostfile: a file that names the hosts instead.
        env: variables to set for the ranks, besides the variables of this process.
        flags: any flag of `horovodish run` by its name, such as `fusion_threshold_mb=32`, `verbose=True`; except
            `config_file`, whose keys are such names.

    Returns:
        The function's results, by rank.

    Raises:
        Exception: the exception of the rank that failed first, with the traceback of that rank as its cause.
        RankLostError: a rank was lost before the function returned.
        LaunchError: the ranks could not be started, or a package is missing.
        SettingError: an argument has a value that is not accepted.
        TypeError: there is no such argument, or the function, its arguments or its result cannot be pickled.

    Example:
        >>> import horovodish as hvd
        >>> def train(rate):
        ...     hvd.init()
        ...     return hvd.rank() * rate
        >>> hvd.run(train, args=(0.5,), num_proc=2)
        [0.0, 0.5]
    """
    from horovodish.launcher.function import run_function  # ranks need no launcher

    flags = {"num_proc": flags.pop("np", num_proc), "hosts": hosts, "hostfile": hostfile, **flags}
    return run_function.run(func, tuple(args), dict(kwargs or {}), env or {}, flags)
