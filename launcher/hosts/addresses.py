"""The network addresses of this host."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from horovodish.errors import SettingError

SIOCGIFADDR = 0x8915


def addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """The addresses under which other hosts may reach this one.

    Args:
        interfaces: of these network interfaces; without any, of all but the loopback.

    Raises:
        SettingError: there is no such interface, or it has no address.
    """
    known = [name for _, name in socket.if_nameindex()]
    for name in interfaces:
        if name not in known:
            raise SettingError(f"--network-interfaces: there is no {name!r} on this host, only {', '.join(known)}")
    chosen = interfaces or [name for name in known if name != "lo"]
    found = [*_ipv4(chosen), *_ipv6(chosen)]
    if not found:
        raise SettingError(f"this host has no network address on {', '.join(chosen) or 'any interface'}")
    return found


def _ipv4(interfaces: Sequence[str]) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in interfaces:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _ipv6(interfaces: Sequence[str]) -> list[str]:
    """Global addresses, and the loopback's. For a link-local one the other host would have to name its link."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        for digits, _, _, scope, _, name in fields
        if name in interfaces and scope in ("00", "10")
    ]
