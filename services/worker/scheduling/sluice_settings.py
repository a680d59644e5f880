"""What can be set of the policy `sluice`, for ablations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.worker.scheduling.andes_settings import AndesSettings


class SluiceSettings(AndesSettings):
    """Those of `andes`, and what becomes of best effort."""

    keeps_limits: bool = True
    reserve_ratio: Annotated[float, Field(ge=0)] = 15.0
    """Memory stays free for readers who come while best effort that gave way would be back so many times; 0: none."""
    reserve_s: Annotated[float, Field(ge=0)] = 2.0
    """But for no more than so long: after that as many go as come."""
    best_effort_step_s: Annotated[float, Field(gt=0)] = 0.1
    """A step takes prompts of best effort until it takes so long, while readers come."""
    patience_s: Annotated[float, Field(gt=0)] = 60.0
    """The oldest best-effort request here, after it has been the oldest for so long, comes first."""
