"""What makes a plan one that changes memory only, and what a stage cannot be told."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from services.planner.policy.plans.drop import plan_drop
from services.planner.policy.plans.drop_facts import DropParams
from services.planner.policy.plans.drop_plan import DropPlan
from shared.ids import WorkerId
from shared.messages.plan import PlannedGroup, PlannedStage
from tests.support.drop_builders import random_facts

Range = tuple[int, int]


def stage(name: str, held: Range, layers: Range, resident: Range | None = None) -> PlannedStage:
    return PlannedStage(worker_id=WorkerId(name), held=held, layers=layers, resident=resident)


@pytest.mark.parametrize("resident", [(0, 4), (1, 4), (0, 3), (1, 3)])
def test_what_is_resident_contains_what_is_computed(resident: Range) -> None:
    assert stage("w0", (0, 4), (1, 3), resident).resident == resident


@pytest.mark.parametrize("resident", [(2, 4), (0, 2), (3, 9), (0, 1)])
def test_what_is_computed_cannot_be_missing(resident: Range) -> None:
    with pytest.raises(ValidationError, match="do not contain those that are computed"):
        stage("w0", (0, 4), (1, 3), resident)


@pytest.mark.parametrize(
    ("stages", "is_residence", "loads"),
    [
        ((stage("a", (0, 2), (0, 2), (0, 4)), stage("b", (2, 4), (2, 4), (0, 4))), True, True),
        ((stage("a", (0, 2), (0, 2)), stage("b", (2, 4), (2, 4))), True, False),
        ((stage("a", (0, 4), (0, 2)), stage("b", (0, 4), (2, 4))), False, False),
        ((stage("a", (0, 4), (0, 2), (0, 4)), stage("b", (0, 4), (2, 4), (0, 4))), False, False),
        ((stage("a", (0, 2), (0, 2)), stage("b", (1, 4), (2, 4))), False, False),
        ((stage("a", (0, 2), (0, 4)),), False, False),
        ((stage("a", (0, 4), (0, 4)),), False, False),
    ],
    ids=["load", "unload", "drop", "drop and keep", "half a drop", "restore", "whole already"],
)
def test_a_plan_by_which_all_compute_what_they_did_changes_memory_only(
    stages: tuple[PlannedStage, ...], is_residence: bool, loads: bool
) -> None:
    group = PlannedGroup(stages=stages, num_blocks=7)
    assert (group.is_residence, group.loads_beside) == (is_residence, loads)


@pytest.mark.parametrize("seed", range(60))
def test_in_every_group_that_forms_somebody_drops_layers(seed: int) -> None:
    """So no drop is taken for a residence plan."""
    rng = np.random.default_rng(seed)
    plan = plan_drop(random_facts(rng, num_drops=3), DropParams(), int(rng.integers(1, 500)))
    for group in plan.groups if isinstance(plan, DropPlan) else ():
        assert any(part.held != part.layers for part in group.stages)
