"""Opens the files that the user names for output: traces, logs, and what ranks write."""

import errno
import os
import stat

__all__ = ["is_link_of_another_user", "opener"]


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `os.open` does, but follow no link that another user has made.

    Where others can write, such as in /tmp, they may have put a link there that leads to a file of this user. Not every
    kernel looks at its owner (`fs.protected_symlinks`), and none does outside of folders with the sticky bit.

    Args:
        path: of the file.
        flags: as for `os.open`. New files can be read and written by all whom the umask lets.

    Returns:
        A descriptor.

    Raises:
        PermissionError: the name is such a link.
        OSError: the file cannot be opened.

    Example:
        >>> open("trace.json", "w", opener=opener)
    """
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as problem:
        if is_link_of_another_user(path):
            what = "another user has made this link; remove it or name another file"
            raise PermissionError(errno.EPERM, what, path) from None
        if problem.errno != errno.ELOOP:
            raise
    return os.open(path, flags, 0o666)


def is_link_of_another_user(path: str | os.PathLike[str]) -> bool:
    """True if this is a link that neither this user nor root has made."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid())
