"""The planner's intent, and how it has the workers carry it out. JSON: operators read it.

    planner                                   workers that the plan names
       │ bucket: Plan, phase preparing            │
       ├── PreparePlan ──────────────────────────►│ checks it against what it holds, stops between two steps
       │◄──────────────────────────── prepared ───┤
       │ bucket: Plan, phase committing           │   from here on it is carried out
       ├── CommitPlan ───────────────────────────►│ changes its memory and its role
       │◄──────────────────────────────── done ───┤
       │ bucket: Plan, phase done                 │

A worker that was prepared and hears nothing for `limit_s` goes on as it was. One whose group does not come about, or
breaks, loads what it lacks and is a whole instance again by itself: no group outlives one of its members.

A *residence plan* (`PlannedGroup.is_residence`) changes the memory of a group that stands, and not who computes what:
its members make room for parameters beside those that they compute with, or give that room back to KV. The leader may
use only blocks that every stage has, so it goes first where blocks go, and last where blocks come:

    load     CommitPlan to the leader; once it is done, to the members; else AbortPlan to them
    unload   CommitPlan to the members; once all are done, to the leader; else AbortPlan to it
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from shared.ids import NOBODY, Incarnation, WorkerId
from shared.messages.base import ControlMessage, MessagePart

PLAN_KEY: Final = "plan"
"""Key of the newest plan in `Subjects.plan_bucket`."""
MAX_STAGES = 64
"""Of one group."""
MAX_GROUPS = 4096
"""Of one plan."""
_Layers = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]


class PlannedStage(MessagePart):
    """One worker's part of a plan."""

    worker_id: WorkerId
    incarnation: Incarnation = NOBODY
    """Of the process that the plan was made for; another one refuses it."""
    address: str = ""
    """Where it is reached by the other stages (`WorkerReport.stage_address`)."""
    held: _Layers
    """Layers that it held when the plan was made: first, and one past the last."""
    layers: _Layers
    """Layers that it holds and computes afterwards: a part of those held, or all layers where it stands alone."""
    resident: _Layers | None = None
    """Layers whose parameters it has afterwards, or loads beside serving: `layers` and more. None: just `layers`."""

    @model_validator(mode="after")
    def _check_resident(self) -> Self:
        if self.resident is None:
            return self
        if not self.resident[0] <= self.layers[0] < self.layers[1] <= self.resident[1]:
            raise ValueError("the layers that are resident do not contain those that are computed")
        return self


class PlannedGroup(MessagePart):
    """Workers that serve one copy of the model together; of one worker: a whole instance again."""

    stages: Annotated[tuple[PlannedStage, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """In the order of the pipeline; the first one leads."""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks that every stage will have, as the plan claims; 0: it claims nothing. Of a residence plan it is above
    0, and the leader uses no others."""

    @property
    def is_residence(self) -> bool:
        """Whether it changes memory only: every stage computes what it computed before.

        Only a group that stands has such stages: where one forms, somebody drops layers.
        """
        return len(self.stages) > 1 and all(stage.held == stage.layers for stage in self.stages)

    @property
    def loads_beside(self) -> bool:
        """Whether it is a residence plan by which parameters come, and KV blocks go."""
        return self.is_residence and any(stage.resident is not None for stage in self.stages)


class PlanPhase(StrEnum):
    """How far a plan is."""

    PREPARING = "preparing"  # may still be abandoned
    COMMITTING = "committing"  # is carried out, whoever is the planner
    DONE = "done"  # nothing is left to do


class WantedInstances(MessagePart):
    """How many instances there should be, until a planner takes it back; whoever is the planner goes on with it."""

    num_instances: Annotated[int, Field(ge=1)]
    """In all."""
    num_before: Annotated[int, Field(ge=0)]
    """That there were when more were wanted first: when demand fits those again, it is taken back."""
    lacking_tokens: Annotated[int, Field(ge=0)]
    """KV for which there was no room when it was last raised."""
    reason: str
    """Why, in words."""


class Plan(ControlMessage):
    """The newest plan. Its epoch only grows; a plan of an older epoch is refused everywhere."""

    kind: Literal["plan"] = "plan"
    epoch: Annotated[int, Field(ge=1)]
    """Grows with every write of the key, so it also says which planner writes."""
    lever: str = "none"
    """Which rung of the ladder was taken; `none` while the ladder is empty."""
    reason: str = ""
    """Why, in words."""
    plan_id: Annotated[int, Field(ge=0)] = 0
    """Names what is carried out: the epoch under which it was written first; 0: nothing."""
    phase: PlanPhase = PlanPhase.DONE
    groups: Annotated[tuple[PlannedGroup, ...], Field(max_length=MAX_GROUPS)] = ()
    """Groups that come about; nothing changes for workers that are not named."""
    wanted: WantedInstances | None = None
    """None: there are instances enough, or nobody asks for more."""


class PreparePlan(ControlMessage):
    """Be ready to carry a plan out: answered once the worker has stopped between two steps, or refused."""

    kind: Literal["prepare_plan"] = "prepare_plan"
    epoch: Annotated[int, Field(ge=1)]
    plan_id: Annotated[int, Field(ge=1)]
    group: PlannedGroup
    """The one that the worker belongs to."""
    token: Annotated[str, Field(max_length=128)] = ""
    """What the stages of the group show each other when they connect."""
    limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds after which a worker that has heard nothing more goes on as it was."""


class CommitPlan(ControlMessage):
    """Carry out what was prepared. Idempotent."""

    kind: Literal["commit_plan"] = "commit_plan"
    epoch: Annotated[int, Field(ge=1)]
    plan_id: Annotated[int, Field(ge=1)]


class AbortPlan(ControlMessage):
    """Go on as before: the plan is abandoned. Idempotent."""

    kind: Literal["abort_plan"] = "abort_plan"
    epoch: Annotated[int, Field(ge=1)]
    plan_id: Annotated[int, Field(ge=1)]


class PlanState(StrEnum):
    """What became of a plan at a worker."""

    PREPARED = "prepared"
    DONE = "done"
    ABORTED = "aborted"  # nothing was changed, and nothing of it will be
    REFUSED = "refused"  # nothing was changed: the reason says what does not fit
    FAILED = "failed"  # it was begun and did not come about: the worker is a whole instance again


class PlanAnswer(ControlMessage):
    """The worker's answer to all three."""

    kind: Literal["plan_answer"] = "plan_answer"
    worker_id: WorkerId
    plan_id: int
    state: PlanState
    reason: str = ""
    """In words, if it is not as asked."""
    newest_epoch: int = 0
    """The newest epoch that the worker has heard of; one newer than the question's has superseded the asker."""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """Done: KV blocks that the worker has for its layers now."""


PlanMessage = Annotated[PreparePlan | CommitPlan | AbortPlan, Field(discriminator="kind")]
"""What a planner sends to a worker."""
