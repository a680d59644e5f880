"""From a plan to what is asked of workers: groups with the processes, addresses and layers that the plan was made for.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.restoring.residence import ResidencePlan
from services.planner.policy.restoring.restore import RestorePlan
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import Plan, PlannedGroup, PlannedStage
from shared.messages.report import ClusterView, WorkerReport

DROP = "drop"
RESTORE = "restore"
LOAD = "load"
UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Intent:
    """What is to be carried out."""

    lever: str
    reason: str
    groups: tuple[PlannedGroup, ...]


def drop_intent(plan: DropPlan, facts: ClusterFacts, view: ClusterView) -> Intent:
    """Return the groups of a drop.

    Args:
        plan: made from the facts; checked once more here.
        facts: made from the view.
        view: names the workers' processes and addresses.
    """
    plan.check_invariants(facts)
    reports = _reports(view)
    groups = tuple(
        PlannedGroup(
            stages=tuple(_stage(reports[stage.instance_id], stage.held, stage.layers) for stage in group.stages),
            num_blocks=group.after_tokens // facts.model.block_size,
        )
        for group in plan.groups
    )
    return Intent(DROP, plan.reason, groups)


def restore_intent(plan: RestorePlan, facts: ClusterFacts, view: ClusterView) -> Intent:
    """Return the groups of a restore: each of one stage with all layers."""
    reports = _reports(view)
    held = {instance.instance_id: instance.layers for instance in facts.instances}
    members = [name for group in plan.groups for name in group.members]
    groups = tuple(
        PlannedGroup(stages=(_stage(reports[name], held[name], facts.model.all_layers),)) for name in members
    )
    return Intent(RESTORE, plan.reason, groups)


def residence_intent(plan: ResidencePlan, facts: ClusterFacts, view: ClusterView) -> Intent:
    """Return the groups of a residence plan: each as it stands, to load the whole model beside, or to give it back.

    Args:
        plan: made from the facts; checked once more here.
        facts: made from the view.
        view: names the workers' processes and addresses.
    """
    plan.check_invariants(facts)
    reports = _reports(view)
    held = {instance.instance_id: instance.layers for instance in facts.instances}
    groups = tuple(
        PlannedGroup(
            stages=tuple(_stage(reports[name], held[name], held[name], plan.resident) for name in group.members),
            num_blocks=group.num_blocks,
        )
        for group in plan.groups
    )
    return Intent(UNLOAD if plan.resident is None else LOAD, plan.reason, groups)


def stages_of(plan: Plan | Intent) -> tuple[PlannedStage, ...]:
    """Return every stage of a plan, group by group."""
    return tuple(stage for group in plan.groups for stage in group.stages)


def names_of(plan: Plan | Intent) -> str:
    """Return who forms which groups, in words: `w0+w1, w2+w3`."""
    return ", ".join("+".join(stage.worker_id for stage in group.stages) for group in plan.groups)


def _reports(view: ClusterView) -> Mapping[WorkerId, WorkerReport]:
    return {status.report.worker_id: status.report for status in view.workers}


def _stage(
    report: WorkerReport, held: LayerRange, layers: LayerRange, resident: LayerRange | None = None
) -> PlannedStage:
    return PlannedStage(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        address=report.stage_address,
        held=(held.first, held.end),
        layers=(layers.first, layers.end),
        resident=None if resident is None else (resident.first, resident.end),
    )
