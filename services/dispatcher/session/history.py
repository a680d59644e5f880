"""What became of a session's attempts at workers. Only its methods change it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.dispatcher.policy.loads import Counted
from shared.ids import NOBODY, Incarnation, WorkerId

MAX_BLAMES = 2
"""Workers that one request may take with it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One at a worker that has accepted it."""

    worker_id: WorkerId
    number: int
    counted: Counted
    """As it was counted there."""
    incarnation: Incarnation


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
    num_preemptions: int = 0
    """How often it was preempted, by what workers have said."""
    on_progress: asyncio.Event | None = None
    """Set when the present attempt has given a token, or the session has ended; None: nobody waits for that."""

    def next_number(self) -> int:
        """Return the number of the next attempt."""
        self.num_attempts += 1
        return self.num_attempts

    def learn_number(self, attempt: int) -> None:
        """Another dispatcher, or the process before, gave an attempt this number."""
        self.num_attempts = max(self.num_attempts, attempt)

    def learn_preemptions(self, count: int) -> None:
        """A worker says how often it has been preempted by now; who has heard of fewer says less."""
        self.num_preemptions = max(self.num_preemptions, count)

    def begin(self, num_tokens: int) -> None:
        """An attempt begins when there are so many output tokens."""
        self.num_at_start = num_tokens
        self.has_started = self.is_released = False
        self.incarnation = NOBODY

    def accept(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """A process of the worker runs the present attempt; NOBODY: it did not say which one."""
        self.worker_id, self.incarnation = worker_id, incarnation

    def start(self) -> None:
        """Its worker computes something for the present attempt."""
        self.has_started = True

    def release(self) -> None:
        """Its worker has given the present attempt up."""
        self.is_released = True

    def blame(self) -> bool:
        """A worker died as it took the attempt; return whether that has now happened too often."""
        self.num_blames += 1
        return self.num_blames >= MAX_BLAMES

    def lose_worker(self, *, has_progressed: bool) -> bool:
        """Its worker died while it had the present attempt; return whether the request is the cause."""
        if has_progressed:
            self.num_blames, self.on_probation = 0, False
            return False
        if self.has_started or self.on_probation:
            self.num_blames += 1
        self.on_probation = True
        return self.num_blames >= MAX_BLAMES

    def recover(self) -> None:
        """It goes on elsewhere."""
        self.num_recoveries += 1

    def progress(self) -> None:
        """The present attempt has given a token, or it is over."""
        if self.on_progress is not None:
            self.on_progress.set()

    def watch(self) -> asyncio.Event:
        """Return what is set with each `progress` from now on, until `unwatch`."""
        self.on_progress = asyncio.Event()
        return self.on_progress

    def unwatch(self, *, has_progressed: bool) -> None:
        """Nobody waits any more. An attempt that has given a token ends the probation."""
        self.on_progress = None
        self.on_probation = self.on_probation and not has_progressed
