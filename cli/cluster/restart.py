"""When a child that ended by itself is started again, and when not. Pure: times in, decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartParams:
    """How patient the supervisor is."""

    first_delay_s: float = 0.2
    """Seconds before the first restart; it doubles with each further one of the window."""
    max_delay_s: float = 5.0
    max_exits: int = 5
    """Exits within the window after which the supervisor gives up."""
    window_s: float = 60.0


def restart_delay_s(params: RestartParams, exits_s: Sequence[float], now_s: float) -> float | None:
    """Return the seconds to wait before the next start, or None to give up.

    Args:
        params: limits.
        exits_s: times of the child's unexpected exits, the newest last.
        now_s: the present, on the same clock.
    """
    recent = sum(1 for exit_s in exits_s if now_s - exit_s < params.window_s)
    if recent >= params.max_exits:
        return None
    return float(min(params.max_delay_s, params.first_delay_s * 2 ** max(0, recent - 1)))
