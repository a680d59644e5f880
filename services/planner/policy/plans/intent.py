"""From what is decided to what is asked of workers: steps, with the processes, addresses and layers they are made for.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.restoring.loaded_layers import LoadedLayersPlan
from services.planner.policy.restoring.restore import RestorePlan
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.base import cut_reason
from shared.messages.plan import (
    MAX_STEPS,
    FormGroup,
    LoadBeside,
    Plan,
    PlannedStage,
    PlannedWorker,
    RestoreInstance,
    Step,
    UnloadBeside,
)
from shared.messages.report import ClusterView

MAX_PLAN_BYTES: Final = 512 * 1024
"""Of the steps of one plan, as JSON: a plan is one value of the bus, which ends at 1 MiB."""
MAX_NAMED: Final = 32
"""Steps that are named in words."""
DROP = "drop"
RESTORE = "restore"
LOAD = "load"
UNLOAD = "unload"

Order = DropPlan | RestorePlan | LoadedLayersPlan
"""What a policy may have workers do."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What is to be carried out."""

    lever: str
    reason: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What became of it."""

    is_done: bool
    """Every worker has carried it out."""
    reason: str
    plan_id: int = 0
    latency_s: float = 0.0
    """From the publication of the plan, or since it was taken up, to the last worker's answer."""
    lever: str = ""
    steps: tuple[Step, ...] = ()
    done: tuple[WorkerId, ...] = ()
    """Workers that said so, in the plan's order."""


def intent_of(order: Order, facts: ClusterFacts, view: ClusterView) -> Intent:
    """Return the steps of an order, for the workers as they are.

    Args:
        order: made from the facts; checked once more here.
        facts: made from the view.
        view: names the workers' processes and addresses.
    """
    workers = _Workers(facts, view)
    match order:
        case DropPlan():
            order.check_invariants(facts)
            return _intent(DROP, order.reason, _forming(order, facts.model.block_size, workers))
        case RestorePlan():
            return _intent(
                RESTORE,
                order.reason,
                (tuple(RestoreInstance(worker=workers.now(name)) for name in group.members) for group in order.groups),
            )
        case LoadedLayersPlan():
            order.check_invariants(facts)
            kind = UnloadBeside if order.resident is None else LoadBeside
            return _intent(
                UNLOAD if order.resident is None else LOAD,
                order.reason,
                (
                    (kind(stages=tuple(map(workers.now, group.members)), num_blocks=group.num_blocks),)
                    for group in order.groups
                ),
            )


def _intent(lever: str, reason: str, groups: Iterable[tuple[Step, ...]]) -> Intent:
    """Return the steps of as many whole groups as one plan can hold; the others follow once it is done."""
    steps: list[Step] = []
    num_bytes = num_left = 0
    for group in groups:
        num_bytes += sum(len(step.model_dump_json()) for step in group)
        if num_left or (steps and (num_bytes > MAX_PLAN_BYTES or len(steps) + len(group) > MAX_STEPS)):
            num_left += 1
        else:
            steps += group
    reason = cut_reason(reason)
    if num_left:
        reason = f"{reason}; {num_left} more groups do not fit this plan, and follow with the next one"
    return Intent(lever, reason, tuple(steps))


def names_of(plan: Plan | Intent) -> str:
    """Return who takes part together, in words: `w0+w1, w2+w3`; of many the first ones."""
    named = ["+".join(worker.worker_id for worker in step.workers) for step in plan.steps[:MAX_NAMED]]
    num_more = len(plan.steps) - len(named)
    return ", ".join([*named, f"{num_more} more"] if num_more else named)


class _Workers:
    """Names the workers as they are now."""

    def __init__(self, facts: ClusterFacts, view: ClusterView) -> None:
        self._reports = {status.report.worker_id: status.report for status in view.workers}
        self._held: Mapping[WorkerId, LayerRange] = {each.instance_id: each.layers for each in facts.instances}

    def now(self, name: WorkerId) -> PlannedWorker:
        """Return a worker as it was when the plan was made."""
        held = self._held[name]
        incarnation = self._reports[name].incarnation
        return PlannedWorker(worker_id=name, incarnation=incarnation, held=(held.first, held.end))

    def stage(self, name: WorkerId, layers: LayerRange) -> PlannedStage:
        """Return a worker's part in a group: the layers that it keeps, and where the others reach it."""
        address = self._reports[name].stage_address
        return PlannedStage(**self.now(name).model_dump(), address=address, layers=(layers.first, layers.end))


def _forming(plan: DropPlan, block_size: int, workers: _Workers) -> Iterable[tuple[FormGroup]]:
    for group in plan.groups:
        stages = tuple(workers.stage(stage.instance_id, stage.layers) for stage in group.stages)
        yield (FormGroup(stages=stages, num_blocks=group.after_tokens // block_size),)
