"""What a worker is, and why it does not take its part in a planned group: each reason in words, none where it can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.roles.device import GroupPlace, StagePlace
from services.worker.roles.role import Role, role_in, why_not_taken
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.plan import PlannedGroup, PlannedStage

NUM_LAYERS = 8
WHOLE = Role(LayerRange(0, NUM_LAYERS))
LEADER = Role(LayerRange(0, 4), "w0", 0, 2, 3)
MEMBER = Role(LayerRange(4, 8), "w1", 1, 2, 3)


def stage(
    name: str, layers: tuple[int, int], held: tuple[int, int] = (0, NUM_LAYERS), process: int = 5
) -> PlannedStage:
    return PlannedStage(worker_id=WorkerId(name), incarnation=Incarnation(process), held=held, layers=layers)


def group(*stages: PlannedStage) -> PlannedGroup:
    return PlannedGroup(stages=stages)


def why_not(role: Role, planned: PlannedGroup) -> str | None:
    return why_not_taken(role, planned, WorkerId("w0"), Incarnation(5), NUM_LAYERS)


@pytest.mark.parametrize(
    ("role", "planned"),
    [
        (WHOLE, group(stage("w0", (0, 4)), stage("w1", (4, 8)))),
        (WHOLE, group(stage("w1", (0, 7)), stage("w0", (7, 8)))),
        (LEADER, group(stage("w0", (0, 2), (0, 4)), stage("w1", (2, 4)), stage("w2", (4, 8)))),
        (MEMBER, group(stage("w1", (0, 4)), stage("w0", (4, 8), (4, 8)))),
        (LEADER, group(stage("w0", (0, 8), (0, 4)))),
        (MEMBER, group(stage("w0", (0, 8), (4, 8)))),
    ],
    ids=["drop", "last stage", "drop more", "all that it holds", "leader restores", "member restores"],
)
def test_a_part_of_what_is_held_is_taken_and_so_is_the_whole_model_by_a_stage(
    role: Role, planned: PlannedGroup
) -> None:
    assert why_not(role, planned) is None


@pytest.mark.parametrize(
    ("role", "planned", "reason"),
    [
        (WHOLE, group(stage("w1", (0, 4)), stage("w2", (4, 8))), "the group names this worker 0 times"),
        (WHOLE, group(stage("w0", (0, 4)), stage("w0", (4, 8))), "the group names this worker 2 times"),
        (
            WHOLE,
            group(stage("w0", (0, 4), process=6), stage("w1", (4, 8))),
            "the plan was made for another process of this worker",
        ),
        (
            WHOLE,
            group(stage("w0", (0, 2), (0, 4)), stage("w1", (2, 8))),
            "the plan was made for layers [0, 4), held are [0, 8)",
        ),
        (
            MEMBER,
            group(stage("w1", (0, 4)), stage("w0", (4, 8))),
            "the plan was made for layers [0, 8), held are [4, 8), as stage 2 of 2 in the group of w1",
        ),
        (
            LEADER,
            group(stage("w0", (0, 5), (0, 4)), stage("w1", (5, 8))),
            "layers [0, 5) are not all among those held, [0, 4), as stage 1 of 2 in the group of w0",
        ),
        (
            WHOLE,
            group(stage("w0", (0, 4)), stage("w1", (5, 8))),
            "layers [5, 8) do not begin where those before them end, at 4",
        ),
        (WHOLE, group(stage("w0", (0, 4)), stage("w1", (4, 7))), "the stages end at layer 7 of 8"),
        (WHOLE, group(stage("w0", (0, 8))), "it is a whole instance already"),
    ],
)
def test_whoever_cannot_take_its_part_says_why(role: Role, planned: PlannedGroup, reason: str) -> None:
    assert why_not(role, planned) == reason


def test_the_role_is_that_of_the_place() -> None:
    stages = tuple(
        StagePlace(WorkerId(f"w{i}"), "", LayerRange(first, end)) for i, (first, end) in enumerate([(0, 3), (3, 8)])
    )
    leader = role_in(GroupPlace(7, "", stages, 0))
    assert leader == Role(LayerRange(0, 3), "w0", 0, 2, 7)
    assert (leader.is_leader, leader.is_member) == (True, False)
    member = role_in(GroupPlace(7, "", stages, 1))
    assert member == Role(LayerRange(3, 8), "w0", 1, 2, 7)
    assert (member.is_leader, member.is_member) == (False, True)
    alone = replace(WHOLE, plan_id=7)
    assert (alone.is_leader, alone.is_member) == (False, False)
