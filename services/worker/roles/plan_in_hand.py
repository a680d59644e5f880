"""A plan at one worker, from its prepare to its outcome. Data only; the plan agent writes it."""

from __future__ import annotations

import asyncio
from asyncio import Future
from dataclasses import dataclass, field

from services.worker.roles.steps.change import Change
from shared.messages.plan import PlanState, PreparePlan


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """What became of a plan here."""

    plan_id: int
    state: PlanState
    reason: str = ""
    num_blocks: int = 0


@dataclass(slots=True)
class PlanInHand:
    """A plan on its way, from its prepare to its outcome."""

    ask: PreparePlan
    change: Change
    """What the worker does of its step."""
    limit_s: float
    """After which it is given up: what it asks for, but no more than this worker grants."""
    until_s: float
    is_ready: Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True once the gate is held, False if that took too long or the worker stops."""
    decision: Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Whether it is carried out."""
    outcome: Future[ChangeOutcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_to_be_done(self) -> bool:
        """The word was to carry it out."""
        return self.decision.done() and self.decision.result()

    def decide(self, *, commit: bool) -> None:
        """Take the first word; later ones change nothing."""
        if not self.decision.done():
            self.decision.set_result(commit)
