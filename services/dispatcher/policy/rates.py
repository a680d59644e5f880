"""How much of a rate is left: a bucket that fills evenly. Pure; the caller keeps the bucket.

A limit of r per minute lets r through at once and then one every 60 / r seconds, so that no clock's minute matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_PERIOD_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""What sums of floats may miss: who has waited as long as was said is let in."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """How much may be taken, as of some time."""

    level: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Short:
    """It may not be taken now."""

    wait_s: float | None
    """Seconds until it may, if nobody else takes any; None: never, it is more than the bucket holds."""


def refilled(bucket: Bucket, per_minute: int, now_s: float) -> Bucket:
    """Return the bucket as of now; a limit that was lowered takes effect at once."""
    grown = bucket.level + max(0.0, now_s - bucket.at_s) * per_minute / _PERIOD_S
    return Bucket(min(float(per_minute), grown), now_s)


def take(bucket: Bucket, per_minute: int, amount: float, now_s: float) -> Bucket | Short:
    """Return the bucket after taking an amount, or why it cannot be taken."""
    if amount > per_minute:
        return Short(None)
    now = refilled(bucket, per_minute, now_s)
    missing = amount - now.level
    if missing > _ROUNDING:
        return Short(missing * _PERIOD_S / per_minute)
    return Bucket(max(0.0, now.level - amount), now_s)


def give_back(bucket: Bucket, per_minute: int, amount: float, now_s: float) -> Bucket:
    """Return the bucket after putting an amount back; it never holds more than a minute's."""
    now = refilled(bucket, per_minute, now_s)
    return Bucket(min(float(per_minute), now.level + amount), now_s)


def reset_s(bucket: Bucket, per_minute: int, now_s: float) -> float:
    """Return the seconds until the bucket is full."""
    return max(0.0, per_minute - refilled(bucket, per_minute, now_s).level) * _PERIOD_S / per_minute
