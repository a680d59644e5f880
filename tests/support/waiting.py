"""Wait for what a test cannot be told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

LIMIT_S: Final = 20.0
"""Far more than anything takes on a machine that is busy, or stands still for some seconds."""
MAX_ROUNDS: Final = 6
_LOOK_S: Final = 0.002


async def until(condition: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: it does not within the limit.
    """
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(_LOOK_S)


def rounds(what: str, count: int = MAX_ROUNDS) -> Iterator[int]:
    """Give the number of each round, from 0, until the caller ends the loop: what it waits for may pass unseen.

    Raises:
        AssertionError: it was not met in any round.
    """
    yield from range(count)
    raise AssertionError(f"not in {count} rounds: {what}")
