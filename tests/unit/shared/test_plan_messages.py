"""What the steps of a plan say of their workers: who is told when, who moves KV before, and what cannot be said."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shared.ids import WorkerId
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

NAMES = tuple(WorkerId(name) for name in ("a", "b", "c"))
MEMBERS = tuple(PlannedWorker(worker_id=name, held=(i, i + 1)) for i, name in enumerate(NAMES))
STAGES = tuple(PlannedStage(worker_id=name, held=(0, 3), layers=(i, i + 1)) for i, name in enumerate(NAMES))
FORM, RESTORE = FormGroup(stages=STAGES), RestoreInstance(worker=MEMBERS[1])
LOAD, UNLOAD = LoadBeside(stages=MEMBERS, num_blocks=7), UnloadBeside(stages=MEMBERS, num_blocks=7)


@pytest.mark.parametrize(
    ("step", "turns", "movers"),
    [(FORM, ["abc"], ""), (LOAD, ["a", "bc"], "a"), (UNLOAD, ["bc", "a"], ""), (RESTORE, ["b"], "b")],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_leader_goes_first_where_blocks_go_and_last_where_they_come(
    step: Step, turns: list[str], movers: str
) -> None:
    assert ["".join(worker.worker_id for worker in wave) for wave in step.waves] == turns
    assert "".join(worker.worker_id for worker in step.movers) == movers
    told = [worker for wave in step.waves for worker in wave]
    assert sorted(told, key=lambda worker: worker.worker_id) == list(step.workers), "everybody, and once"


def test_a_plan_is_of_all_workers_of_its_steps() -> None:
    plan = Plan(epoch=1, steps=(UNLOAD, RESTORE))
    assert [worker.worker_id for worker in plan.workers] == ["a", "b", "c", "b"]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan, "each step is of its kind again"


@pytest.mark.parametrize("kind", [LoadBeside, UnloadBeside])
def test_what_lies_beside_changes_in_a_group_whose_blocks_are_said(kind: type[LoadBeside | UnloadBeside]) -> None:
    for fields in ({"num_blocks": 0}, {"stages": MEMBERS[:1]}):
        with pytest.raises(ValidationError):
            kind.model_validate({"stages": MEMBERS, "num_blocks": 7} | fields)


def test_one_worker_is_no_group() -> None:
    with pytest.raises(ValidationError):
        FormGroup(stages=STAGES[:1])
