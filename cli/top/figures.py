"""Numbers in few cells: counts, GiB, times. Pure."""

from __future__ import annotations

from typing import Final

_GIB: Final = 1024**3
NONE: Final = "-"
"""Stands where there is nothing to say."""


def count(number: float) -> str:
    """Return a count in at most five cells up to a hundred million millions: `999`, `12.3k`, `4.5M`."""
    if number < 1000:
        return f"{number:.0f}"
    for unit in "kMG":
        number /= 1000
        if number < 999.5:
            return f"{number:.1f}{unit}" if number < 99.95 else f"{number:.0f}{unit}"
    return f"{number / 1000:.0f}T"


def gib(num_bytes: float) -> str:
    """Return a size in GiB, three digits of it, and thousandths."""
    size = num_bytes / _GIB
    if size < 0.9995:
        return f"{size:.3f}" if num_bytes else "0"
    return f"{size:.2f}" if size < 9.995 else f"{size:.1f}" if size < 99.95 else f"{size:.0f}"


def rate(per_s: float) -> str:
    """Return tokens per second: one digit behind the point below a thousand."""
    return f"{per_s:.1f}" if per_s < 999.95 else count(per_s)


def seconds(time_s: float) -> str:
    """Return a time as people read it: `0.4s`, `42s`, `12m05s`, `3h02m`."""
    if time_s < 9.95:
        return f"{time_s:.1f}s"
    whole = round(time_s)
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 1000 else f"{hours // 24}d"


def slack(time_s: float) -> str:
    """Return a slack with its sign."""
    return f"{'-' if time_s < 0 else '+'}{seconds(abs(time_s))}"


def share(part: float, whole: float) -> str:
    """Return a share in per cent."""
    return f"{part / whole:.0%}" if whole else NONE


def quality(qoe: float | None) -> str:
    """Return a QoE with two digits; 1.00 only if it is no less."""
    return NONE if qoe is None else f"{int(qoe * 100 + 1e-9) / 100:.2f}"
