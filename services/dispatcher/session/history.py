"""What became of a session's attempts at workers. Data only; the session and those who place it write it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.ids import NOBODY, Incarnation, WorkerId


@dataclass(slots=True)
class History:
    """What became of the attempts so far."""

    num_attempts: int = 0
    """The highest number that was ever given to one: none is used twice."""
    worker_id: WorkerId | None = None
    """The last one that accepted it."""
    num_at_start: int = 0
    """Output tokens when the present attempt began."""
    has_started: bool = False
    """Its worker has said that it computes something for the present attempt."""
    is_released: bool = False
    """Its worker has given the present attempt up, before its answer to the submission came."""
    incarnation: Incarnation = NOBODY
    """Process of the worker that accepted the present attempt."""
    num_blames: int = 0
    """Workers in a row that died while they worked on it and before it had a token of them: it may be what kills."""
    on_probation: bool = False
    """It lost its worker before it had a token, so it is placed by itself: if it kills, it is seen."""
    num_recoveries: int = 0
    """How often it went on elsewhere."""
    on_progress: asyncio.Event | None = None
    """Set when the present attempt has given a token, or the session has ended."""
