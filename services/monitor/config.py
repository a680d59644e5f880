"""Settings of the monitor: flag > environment > sluice.toml > default (`shared.process.config`)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.monitor.policy.liveness import LivenessParams
from shared.process.config import ServiceSettings

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class MonitorSettings(ServiceSettings):
    """One monitor: the only writer of the cluster view."""

    view_period_s: _Seconds = 0.5
    """Seconds between two views; a change of a phase or a judgement is written at once."""
    suspect_after_s: _Seconds = 1.5
    """Age of the last report, in seconds, from which a worker is suspect."""
    dead_after_s: _Seconds = 3.0
    """Age of the last report, in seconds, from which a worker is dead."""
    forget_after_s: _Seconds = 60.0
    """Age of the last report, in seconds, from which a worker is no longer shown."""
    throttling_horizon_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    """Seconds ahead for which a worker's KV memory must suffice, or it is said to run short; higher warns earlier."""
    max_workers: Annotated[int, Field(ge=1, le=65_536)] = 8192
    """Workers kept at most; reports of more are refused, and counted in the view. Higher takes more memory."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        self.liveness()
        return self

    def liveness(self) -> LivenessParams:
        """Return the parameters of the judgement."""
        return LivenessParams(self.suspect_after_s, self.dead_after_s, self.forget_after_s)
