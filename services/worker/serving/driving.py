"""An engine, and what drives it through its steps."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.contract.executor import Executor
from services.worker.engine.engine import Engine
from services.worker.engine.loop import StepLoop
from services.worker.roles.device import GroupDevice


@dataclass(frozen=True, slots=True)
class Driving:
    """What computes, and for how long a step may."""

    engine: Engine
    executor: Executor
    loop: StepLoop
    device: GroupDevice | None
    """Of the executor, if its layers can be dropped."""
    step_limit_s: float
    """After which a step counts as stuck."""
