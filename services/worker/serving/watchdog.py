"""Notices a step that never ends: a hung kernel, a stuck device. Such a worker ends, since nothing else can free it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOKS_PER_LIMIT: Final = 10
LATE_FACTOR: Final = 2.0
"""A look that comes after this many times its period was kept from coming."""
SLOW_FACTOR: Final = 5.0
"""A step may take this many times what the largest step took when the worker was loaded."""


class StuckStepError(Exception):
    """A step has run for longer than any step of this worker can."""

    def __init__(self, age_s: float, limit_s: float) -> None:
        super().__init__(f"a step has been running for {age_s:.1f} s, the limit is {limit_s:g} s")
        self.age_s = age_s
        self.limit_s = limit_s


def step_limit(setting_s: float, dry_step_s: float) -> float:
    """Return the seconds after which a step counts as stuck: the setting, or more where large steps are slow."""
    return max(setting_s, SLOW_FACTOR * dry_step_s)


class AwakeAge:
    """How long a step has run while somebody could look: a machine that stood still has not computed either.

    A process that was stopped, or whose whole machine was, notices it by a look that comes much too late. So it does
    where a step keeps the interpreter's lock, which no kernel does.

    Args:
        period_s: from one look to the next.
        now_s: of the first.
    """

    def __init__(self, period_s: float, now_s: float) -> None:
        self._period_s = period_s
        self._looked_s = now_s
        self._still_s = 0.0

    def look(self, now_s: float, age_s: float) -> float:
        """Return how much of a step's age counts.

        Args:
            now_s: later than at the look before.
            age_s: since the step began, which may have been after the look before.
        """
        since_s = now_s - self._looked_s
        self._looked_s = now_s
        if age_s < since_s:
            self._still_s = 0.0
        if since_s > LATE_FACTOR * self._period_s:
            self._still_s += since_s - self._period_s
        self._still_s = min(self._still_s, age_s)
        return age_s - self._still_s


async def watch_steps(step_age_s: Callable[[], float], limit_s: float) -> None:
    """Look at the running step until cancelled.

    Raises:
        StuckStepError: it has run for longer than the limit.
    """
    now, period_s = asyncio.get_running_loop().time, limit_s / LOOKS_PER_LIMIT
    awake = AwakeAge(period_s, now())
    while True:
        await asyncio.sleep(period_s)
        age_s = awake.look(now(), step_age_s())
        if age_s > limit_s:
            raise StuckStepError(age_s, limit_s)
