"""Bytes and numbers as people read them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def describe_bytes(num_bytes: float) -> str:
    """Return a size with its unit: `512 B`, `1.5 MiB`; one digit behind the point from KiB on."""
    size, unit = float(num_bytes), 0
    while size >= 1023.95 and unit < len(_UNITS) - 1:  # 1023.95 would be shown as 1024.0
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if not unit else f"{size:.1f} {_UNITS[unit]}"


def describe_number(number: int) -> str:
    """Return the number, or how long it is if nobody would read it."""
    text = str(number)
    return text if len(text) <= 20 else f"a number of {len(text)} digits"
