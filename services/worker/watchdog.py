"""Notices a step that never ends: a hung kernel, a stuck device. Such a worker ends, since nothing else can free it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOKS_PER_LIMIT: Final = 10
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


async def watch_steps(step_age_s: Callable[[], float], limit_s: float) -> None:
    """Look at the running step until cancelled.

    Raises:
        StuckStepError: it is older than the limit.
    """
    while True:
        await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
        age_s = step_age_s()
        if age_s > limit_s:
            raise StuckStepError(age_s, limit_s)
