"""How the bytes of a pipe become lines."""

from __future__ import annotations

from horovodish.launcher.output import LONGEST_LINE_BYTES, STDOUT, Line


def test_only_whole_lines_are_passed_on() -> None:
    line = Line(STDOUT, b"")
    assert line.take(b"one\ntw") == b"one\n"
    assert line.take(b"") == b""
    assert line.take(b"o\nthree") == b"two\n"
    assert line.flush() == b"three"
    assert line.flush() == b""


def test_each_line_gets_the_prefix() -> None:
    line = Line(STDOUT, b"[3] ")
    assert line.take(b"one\n\ntw") == b"[3] one\n[3] \n"
    assert line.take(b"o\n") == b"[3] two\n"
    assert line.take(b"end") == b""
    assert line.flush() == b"[3] end\n"


def test_a_progress_bar_is_live() -> None:
    line = Line(STDOUT, b"[0] ")
    assert line.take(b" 10%\r 20%\r 3") == b"[0]  10%\r[0]  20%\r"
    assert line.take(b"0%\r\n") == b"[0]  30%\r\n"


def test_bytes_are_not_changed() -> None:
    data = bytes(range(256)) + b"\x0b\x0c\x1c\xe2\x80\xa8\n"
    line = Line(STDOUT, b"")
    assert line.take(data) + line.flush() == data


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    line = Line(STDOUT, b"")
    assert line.take(b"x" * LONGEST_LINE_BYTES) == b"x" * LONGEST_LINE_BYTES
