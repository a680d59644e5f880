"""From what is decided to what is asked of workers: steps, with the processes, addresses and layers they are made for.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.restoring.loaded_layers import LoadedLayersPlan
from services.planner.policy.restoring.restore import RestorePlan
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import (
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
            return Intent(DROP, order.reason, _forming(order, facts.model.block_size, workers))
        case RestorePlan():
            members = [name for group in order.groups for name in group.members]
            return Intent(RESTORE, order.reason, tuple(RestoreInstance(worker=workers.now(name)) for name in members))
        case LoadedLayersPlan():
            order.check_invariants(facts)
            kind = UnloadBeside if order.resident is None else LoadBeside
            steps = tuple(
                kind(stages=tuple(map(workers.now, group.members)), num_blocks=group.num_blocks)
                for group in order.groups
            )
            return Intent(UNLOAD if order.resident is None else LOAD, order.reason, steps)


def names_of(plan: Plan | Intent) -> str:
    """Return who takes part together, in words: `w0+w1, w2+w3`."""
    return ", ".join("+".join(worker.worker_id for worker in step.workers) for step in plan.steps)


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


def _forming(plan: DropPlan, block_size: int, workers: _Workers) -> tuple[FormGroup, ...]:
    return tuple(
        FormGroup(
            stages=tuple(workers.stage(stage.instance_id, stage.layers) for stage in group.stages),
            num_blocks=group.after_tokens // block_size,
        )
        for group in plan.groups
    )
