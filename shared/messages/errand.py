"""Errands: orders to one worker that need no gate, many of which are under way at once. JSON.

    planner                                   worker
       ├── one message, under an epoch ──────────►│ not one that it takes (`EpochFence`): not done
       │◄─────────────── its answer, or ErrandRefused ┤

What takes part in a plan is a *change* (`shared.messages.plan`): prepared, committed, alone at its worker.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.base import MAX_EPOCH, ControlMessage, Epoch, Reason


class Errand(ControlMessage):
    """What every errand says."""

    epoch: Epoch
    """The newest one that its sender holds."""


class ErrandRefused(ControlMessage):
    """Nothing was done."""

    kind: Literal["errand_refused"] = "errand_refused"
    reason: Reason
    """Why, in words."""
    newest_epoch: Annotated[int, Field(ge=0, le=MAX_EPOCH)] = 0
    """As in `PlanAnswer`."""
