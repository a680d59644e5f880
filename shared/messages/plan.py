"""The planner's intent: key `plan` of the plan bucket, as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.base import ControlMessage


class Plan(ControlMessage):
    """The newest plan. Its epoch only grows; a plan of an older epoch is refused everywhere."""

    kind: Literal["plan"] = "plan"
    epoch: Annotated[int, Field(ge=1)]
    lever: str = "none"
    """Which rung of the ladder was taken; `none` while the ladder is empty."""
    reason: str = ""
    """Why, in words."""
