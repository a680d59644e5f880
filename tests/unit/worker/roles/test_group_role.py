"""What a worker is, and why it is not what a step means, or can be no stage of it: each reason in words, or none."""

from __future__ import annotations

import pytest

from services.worker.kv_moves.places import GroupPlace, StagePlace
from services.worker.roles.role import Alone, Broken, Changing, Leading, Member, Role, group_of, reported, why_not_named
from services.worker.roles.steps.form import layers_of, why_no_stage
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.plan import FormGroup, PlannedStage, PlannedWorker, RestoreInstance, Step

NUM_LAYERS = 8
W0 = WorkerId("w0")
WHOLE = Role(LayerRange(0, NUM_LAYERS))
LEADER = Role(LayerRange(0, 4), "w0", 0, 2, 3)
MEMBER = Role(LayerRange(4, 8), "w1", 1, 2, 3)


def stage(
    name: str, layers: tuple[int, int], held: tuple[int, int] = (0, NUM_LAYERS), process: int = 5
) -> PlannedStage:
    return PlannedStage(worker_id=WorkerId(name), incarnation=Incarnation(process), held=held, layers=layers)


def group(*stages: PlannedStage) -> FormGroup:
    return FormGroup(stages=stages)


def restored(held: tuple[int, int]) -> RestoreInstance:
    return RestoreInstance(worker=PlannedWorker(worker_id=W0, incarnation=Incarnation(5), held=held))


def why_not(role: Role, step: Step) -> str | None:
    reason = why_not_named(role, step.workers, W0, Incarnation(5))
    if reason is None and isinstance(step, FormGroup):
        return why_no_stage(role, step, layers_of(step, W0), NUM_LAYERS)
    return reason


@pytest.mark.parametrize(
    ("role", "planned"),
    [
        (WHOLE, group(stage("w0", (0, 4)), stage("w1", (4, 8)))),
        (WHOLE, group(stage("w1", (0, 7)), stage("w0", (7, 8)))),
        (LEADER, group(stage("w0", (0, 2), (0, 4)), stage("w1", (2, 4)), stage("w2", (4, 8)))),
        (MEMBER, group(stage("w1", (0, 4)), stage("w0", (4, 8), (4, 8)))),
        (LEADER, restored((0, 4))),
        (MEMBER, restored((4, 8))),
    ],
    ids=["drop", "last stage", "drop more", "all that it holds", "leader restores", "member restores"],
)
def test_a_part_of_what_is_held_is_taken_and_so_is_the_whole_model_by_a_stage(role: Role, planned: Step) -> None:
    assert why_not(role, planned) is None


@pytest.mark.parametrize(
    ("role", "planned", "reason"),
    [
        (WHOLE, group(stage("w1", (0, 4)), stage("w2", (4, 8))), "the step names this worker 0 times"),
        (WHOLE, group(stage("w0", (0, 4)), stage("w0", (4, 8))), "the step names this worker 2 times"),
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
        (WHOLE, restored((0, 4)), "the plan was made for layers [0, 4), held are [0, 8)"),
    ],
)
def test_whoever_cannot_take_its_part_says_why(role: Role, planned: Step, reason: str) -> None:
    assert why_not(role, planned) == reason


def test_the_role_is_that_of_the_state_and_on_the_way_to_another_one_that_of_before() -> None:
    stages = tuple(
        StagePlace(WorkerId(f"w{i}"), "", LayerRange(first, end)) for i, (first, end) in enumerate([(0, 3), (3, 8)])
    )
    leading, member = Leading(GroupPlace(7, stages, 0), 20, 7), Member(GroupPlace(7, stages, 1), 20, 9)
    leader = reported(leading)
    assert leader == Role(LayerRange(0, 3), "w0", 0, 2, 7)
    assert leader.is_leader
    assert reported(member) == Role(LayerRange(3, 8), "w0", 1, 2, 9), "the last plan, not that of the pipeline"
    assert not reported(member).is_leader
    alone = Alone(LayerRange(0, NUM_LAYERS), plan_id=7)
    assert reported(alone) == Role(LayerRange(0, NUM_LAYERS), plan_id=7)
    assert not reported(alone).is_leader
    broken = Broken(leading, "a connection is lost")
    for state in (broken, Changing(broken), Changing(leading, joins=9)):
        assert (reported(state), group_of(state)) == (leader, leading)
    assert (reported(Changing(alone, 9)), group_of(Changing(alone, 9))) == (reported(alone), None)
