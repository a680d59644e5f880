"""Names of the scheduling policies (`shared.systems.System.scheduler`) and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from services.worker.scheduling.andes import AndesScheduler
from services.worker.scheduling.andes_settings import Weighing
from services.worker.scheduling.bros import BrosScheduler
from services.worker.scheduling.chunked import ChunkedScheduler
from services.worker.scheduling.class_round_robin import ClassRoundRobinScheduler
from services.worker.scheduling.fcfs import FcfsScheduler
from services.worker.scheduling.lookahead import LookaheadScheduler
from services.worker.scheduling.round_robin import RoundRobinScheduler
from services.worker.scheduling.sluice import SluiceScheduler
from services.worker.scheduling.tokenflow import TokenflowScheduler
from services.worker.scheduling.view import Scheduler

SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "fcfs": FcfsScheduler,
    "chunked": ChunkedScheduler,
    "chunked-flex-last": partial(ChunkedScheduler, best_effort_gives_way=True),
    "round-robin": RoundRobinScheduler,
    "lookahead": LookaheadScheduler,
    "andes": AndesScheduler,
    "lqsf": partial(AndesScheduler, weighing=Weighing.GAIN),
    "sluice": SluiceScheduler,
    "tokenflow": TokenflowScheduler,
    "bros": BrosScheduler,
    "bros-whole": partial(BrosScheduler, swaps_whole=True),
    "class-round-robin": ClassRoundRobinScheduler,
}


def make_scheduler(name: str, **settings: Any) -> Scheduler:
    """Return a new scheduler of this name, with fresh private state.

    Args:
        name: of the policy.
        **settings: that it has, by name; what is left out is as the policy has it.

    Raises:
        KeyError: no scheduler has this name; the error lists those that exist.
        TypeError, ValueError: it has no such setting, or the value is not allowed.
    """
    if name not in SCHEDULERS:
        raise KeyError(f"no scheduler is called '{name}'; there are: {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name](**settings)
