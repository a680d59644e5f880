"""How long after its end a child is started again, and when it counts as failing. Pure: times in, decision out."""

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
    """Exits within the window from which on a child is failing."""
    window_s: float = 60.0


def restart_delay_s(params: RestartParams, exits_s: Sequence[float], now_s: float) -> float:
    """Return the seconds to wait before the next start.

    Args:
        params: limits.
        exits_s: times of the child's unexpected exits, the newest last.
        now_s: the present, on the same clock.
    """
    return float(min(params.max_delay_s, params.first_delay_s * 2 ** max(0, _num_recent(params, exits_s, now_s) - 1)))


def is_failing(params: RestartParams, exits_s: Sequence[float], now_s: float) -> bool:
    """Return whether the child has ended so often that it cannot be relied on; arguments as of `restart_delay_s`."""
    return _num_recent(params, exits_s, now_s) >= params.max_exits


def _num_recent(params: RestartParams, exits_s: Sequence[float], now_s: float) -> int:
    return sum(1 for exit_s in exits_s if now_s - exit_s < params.window_s)
