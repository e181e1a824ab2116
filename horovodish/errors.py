"""The exceptions of horovodish.

    BaseException
      HostsUpdatedInterrupt       the set of hosts has changed
    RuntimeError
      HorovodInternalError        a collective failed
        MismatchError             the ranks disagree about a tensor
        RankLostError             a rank died, raised or left while others needed it
        StallError                ranks waited for another one for longer than the shutdown time
        EngineStoppedError        shutdown() was called while the operation was pending
      ForkedProcessError          the engine was used in a forked child
      LaunchError                 the ranks could not be started, or MPI is missing or the wrong one
    ValueError
      NotInitializedError         used before init() or after shutdown()
      DuplicateNameError          a name was enqueued again before its first use completed
      SettingError                a HOROVODISH_* variable or a flag has a value that is not accepted
    TypeError
      UnsupportedTensorError      a dtype, device or memory layout that the engine cannot take

Every message says what happened, to which tensor and on which rank where that is known, and what to do.
"""

__all__ = [
    "DuplicateNameError",
    "EngineStoppedError",
    "ForkedProcessError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "RankLostError",
    "SettingError",
    "StallError",
    "UnsupportedTensorError",
]


class HorovodInternalError(RuntimeError):
    """A collective failed. Elastic training can recover from it."""


class MismatchError(HorovodInternalError):
    """The ranks disagree about a tensor: operation, dtype, shape, root rank or scale. Every rank raises it."""


class RankLostError(HorovodInternalError):
    """A rank died, raised or left while other ranks needed it for a collective."""


class StallError(HorovodInternalError):
    """Ranks waited for another one for longer than HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS."""


class EngineStoppedError(HorovodInternalError):
    """`shutdown()` was called while the operation was pending."""


class HostsUpdatedInterrupt(BaseException):
    """The set of hosts has changed; elastic training starts over with the new one.

    It is no Exception, so that a script which skips batches that raise one does not skip what it interrupts.
    """


class ForkedProcessError(RuntimeError):
    """The engine was used in a child of a rank, such as a data-loader worker; only the process of `init()` can."""


class LaunchError(RuntimeError):
    """The ranks could not be started, or MPI is missing, or its launcher and its library do not belong together."""


class NotInitializedError(ValueError):
    """The call needs `init()` first, or came after `shutdown()`."""


class DuplicateNameError(ValueError):
    """A tensor name was enqueued a second time before the first operation of that name had completed."""


class SettingError(ValueError):
    """A HOROVODISH_* variable or a launcher flag has a value that is not accepted."""


class UnsupportedTensorError(TypeError):
    """The engine cannot take this tensor: its dtype, its device or its memory layout (outputs must be contiguous)."""


_RAISED_BY_THE_ENGINE: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        HorovodInternalError,
        MismatchError,
        RankLostError,
        StallError,
        EngineStoppedError,
        NotInitializedError,
        ForkedProcessError,
        DuplicateNameError,
        UnsupportedTensorError,
    )
}


def from_native(kind: str, message: str) -> Exception:
    """The exception for an error that the native engine reported, ready to be raised.

    Args:
        kind: the name of a class of this module.
        message: the engine's message.

    Returns:
        An instance of that class; of `HorovodInternalError`, with the kind in its message, when the name is unknown.

    Example:
        >>> from_native("MismatchError", "tensor w: rank 0 has shape (2), rank 1 has shape (3)")
        MismatchError('tensor w: rank 0 has shape (2), rank 1 has shape (3)')
    """
    error = _RAISED_BY_THE_ENGINE.get(kind)
    return error(message) if error else HorovodInternalError(f"{kind}: {message}")
