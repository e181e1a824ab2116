"""The program that mpirun runs in place of ssh: `python -I -S program.py MEETING HOST COMMAND...`

It asks the meeting of agents to run the command on the host, and ends as the command does.
"""

import os
import socket
import sys

LONGEST_MESSAGE = 1 << 16
FAILED = 255
"""The exit status of ssh if it cannot run a command."""


def connected(meeting: str) -> socket.socket:
    """A connection to a meeting of this user.

    Raises:
        OSError: there is none.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect("\0" + meeting)
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    if (user := int.from_bytes(credentials[4:8], sys.byteorder)) != os.geteuid():
        raise PermissionError(f"the socket {meeting} belongs to user {user}")
    return link


def main(meeting: str, words: "list[str]") -> int:
    while words and words[0].startswith("-"):  # flags for ssh
        words = words[1:]
    host, *command = words
    try:
        link = connected(meeting)
        link.send(f"start {host} {' '.join(command)}".encode(errors="surrogateescape"))
        while message := link.recv(LONGEST_MESSAGE):
            word, _, rest = message.decode(errors="replace").partition(" ")
            if word == "ended":
                return int(rest)
            sys.stderr.write(rest)
            sys.stderr.flush()
    except OSError as problem:
        sys.stderr.write(f"horovodish: {problem}\n")
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
