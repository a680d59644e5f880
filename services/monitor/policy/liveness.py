"""Judges a worker by the age of its last report.

Pure: ages in, judgement out. Reports come every half second, so that two may be lost before a worker is suspect.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.report import Liveness

ROUNDING_S = 1e-6
"""An age this little below a limit has reached it: who sleeps until the limit may wake at an age rounded down."""


@dataclass(frozen=True, slots=True)
class LivenessParams:
    """Ages of the last report, in seconds, at which the judgement changes; they must grow in this order."""

    suspect_after_s: float = 1.5
    """From this age on the worker is suspect: shown as such; nothing is done about it yet."""
    dead_after_s: float = 3.0
    """From this age on it is dead: its requests end there. Lower notices a loss sooner, and errs more often."""
    forget_after_s: float = 60.0
    """From this age on it is no longer shown."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_s < self.dead_after_s < self.forget_after_s:
            raise ValueError("suspect_after_s < dead_after_s < forget_after_s must hold, and all be positive")


def judge(params: LivenessParams, age_s: float) -> Liveness | None:
    """Return the judgement of a worker whose last report is this old; None means that it is forgotten."""
    age_s += ROUNDING_S
    if age_s >= params.forget_after_s:
        return None
    if age_s >= params.dead_after_s:
        return Liveness.DEAD
    return Liveness.SUSPECT if age_s >= params.suspect_after_s else Liveness.ALIVE


def next_change_age_s(params: LivenessParams, age_s: float) -> float | None:
    """Return the next age at which the judgement changes if no report comes; None when there is no further change."""
    bounds = (params.suspect_after_s, params.dead_after_s, params.forget_after_s)
    return next((bound for bound in bounds if bound > age_s + ROUNDING_S), None)
