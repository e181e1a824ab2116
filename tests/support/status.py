"""What `horovodish status` says of a job."""

from __future__ import annotations

import re
import time

from horovodish.errors import LaunchError
from horovodish.launcher.status.diagnosis import diagnosis
from horovodish.launcher.status.jobs import JobStatus, ask

LIMIT_SECONDS = 60.0
"""How long a job may take to come to its hang, however busy the machine is."""


def asked(process: int, question: str = "status") -> JobStatus | None:
    """What a launcher answers; None if it does not listen yet."""
    try:
        return ask(str(process), question)[0]
    except LaunchError:
        return None


def wait_for_sentence(process: int, expected: str, count: int = 1) -> list[str]:
    """Asks until a sentence has this form, and there are as many as this; returns all sentences then."""
    ends_at = time.monotonic() + LIMIT_SECONDS
    sentences: list[str] = []
    while time.monotonic() < ends_at:
        job = asked(process)
        sentences = diagnosis(job) if job else []
        if len(sentences) >= count and any(re.fullmatch(expected, sentence) for sentence in sentences):
            return sentences
    raise AssertionError(f"{expected!r} is in none of {sentences}")
