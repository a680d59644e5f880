"""Settings of the planner: flag > environment > sluice.toml > default (`shared.config`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.planner.policy.ladder import LadderParams
from shared.config import ServiceSettings


class PlannerSettings(ServiceSettings):
    """One planner: the only writer of plans, for as long as its epoch is the newest."""

    tick_period_s: Annotated[float, Field(gt=0, le=3600)] = 0.5
    """Seconds between two decisions; shorter reacts faster."""
    max_view_age_s: Annotated[float, Field(gt=0, le=3600)] = 1.5
    """Seconds after which a cluster view is too old to act upon."""
    pressure_ratio: Annotated[float, Field(gt=0, le=100)] = 1.0
    """There is pressure when used and demanded KV blocks are above this share of all; lower acts earlier."""

    def ladder(self) -> LadderParams:
        """Return the parameters of the ladder."""
        return LadderParams(self.max_view_age_s, self.pressure_ratio)
