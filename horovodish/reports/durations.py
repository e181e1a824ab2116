"""Durations and sizes in reports."""

__all__ = ["text_of_bytes", "text_of_hours", "text_of_seconds"]


def text_of_seconds(seconds: float) -> str:
    """Three digits and a unit: "2.38 s", "12.1 ms" or "92 us"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{seconds * 1e6:.0f} us"


def text_of_hours(seconds: float) -> str:
    """Three digits and a unit, for what takes long: "12.5 days", "8.25 h" or "40 min"."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return text_of_seconds(seconds)


def text_of_bytes(count: float) -> str:
    """Three digits and a unit: "31.5 MB" or "240 B"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
