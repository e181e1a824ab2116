"""What a few changed bytes make of messages and files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["mutations"]

REMARKABLE = (b"\0", b"\1", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\1", b"\n", b"-1", b":")


def mutations(seeds: Sequence[bytes], count: int) -> Iterator[bytes]:
    """`count` variants of the seeds, the same ones each time."""
    chance = random.Random(1)
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            at, other = chance.randint(0, len(data)), chance.choice(seeds)
            match chance.randrange(5):
                case 0:
                    data[at : at + 1] = chance.choice(REMARKABLE)
                case 1:
                    data[at:at] = chance.choice(REMARKABLE)
                case 2:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 3:
                    del data[at : at + chance.randint(1, 8)]
                case 4:
                    data[at:] = other[chance.randint(0, len(other)) :]
        yield bytes(data)
