"""The planner's intent, and how it has the workers carry it out. JSON: operators read it.

    planner                                   workers that the plan names
       │ bucket: Plan, phase preparing            │
       ├── PreparePlan, with a step ─────────────►│ checks it against what it holds, stops between two steps of its own
       │◄──────────────────────────── prepared ───┤
       │ bucket: Plan, phase committing           │   from here on it is carried out
       ├── CommitPlan ───────────────────────────►│ changes its memory and its role
       │◄──────────────────────────────── done ───┤
       │ bucket: Plan, phase done                 │

A plan is made of *steps*, a union on `kind`. A worker is in one step of a plan, and in one plan at a time; plans of
other workers may be under way meanwhile.

    form      workers become the stages of one group; each drops layers
    load      the members of a group that stands make room for all parameters, and load them while they serve
    unload    they give that room back to KV
    restore   a stage of a group is a whole instance again; the members of a group that dissolves do it together

A worker that was prepared and hears nothing for `limit_s`, or for `MAX_HOLD_S`, goes on as it was. One whose group does
not come about, or breaks, loads what it lacks and is a whole instance again by itself: no group outlives one of its
members.

The leader of a group may use only blocks that every stage has, so it goes first where blocks go, and last where blocks
come. A step says so by its `waves`: once all of one wave are done the next ones are told, else AbortPlan to them:

    load     CommitPlan to the leader; once it is done, to the members
    unload   CommitPlan to the members; once all are done, to the leader
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from shared.ids import NOBODY, Incarnation, WorkerId
from shared.messages.base import MAX_EPOCH, ControlMessage, Epoch, MessagePart, Reason

PLAN_KEY: Final = "plan"
"""Key of the newest plan in `Subjects.plan_bucket`."""
FILLING_KEY: Final = "filling"
"""Key of `Filling` there."""
MAX_STAGES = 64
"""Of one group."""
MAX_STEPS = 4096
"""Of one plan."""
MAX_HOLD_S: Final = 5.0
"""Longest time for which a worker that serves stands still between prepare and commit, whatever it is asked."""
MAX_ASIDE_S: Final = 10.0
"""The same for a member of a group, which serves nobody itself: its leader may move KV meanwhile."""
_Layers = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]


class PlannedWorker(MessagePart):
    """A worker as it was when the plan was made; one that has changed meanwhile refuses."""

    worker_id: WorkerId
    incarnation: Incarnation = NOBODY
    """Of the process that the plan was made for; another one refuses it."""
    held: _Layers
    """Layers that it held: first, and one past the last."""


class PlannedStage(PlannedWorker):
    """One worker's place in a group that forms."""

    address: str = ""
    """Where it is reached by the other stages (`WorkerReport.stage_address`)."""
    layers: _Layers
    """Layers that it holds and computes afterwards: a part of those held."""


class PlanStep(MessagePart, ABC):
    """What some workers of a plan change together."""

    @property
    @abstractmethod
    def workers(self) -> tuple[PlannedWorker, ...]:
        """All that take part; of a group the first one leads."""

    @property
    def waves(self) -> tuple[tuple[PlannedWorker, ...], ...]:
        """Who is told to carry it out at the same time, and who only after them."""
        return (self.workers,)

    @property
    def movers(self) -> tuple[PlannedWorker, ...]:
        """Who moves KV while it serves, before it is prepared; the others wait for them."""
        return ()


class FormGroup(PlanStep):
    """These workers serve one copy of the model together."""

    kind: Literal["form"] = "form"
    stages: Annotated[tuple[PlannedStage, ...], Field(min_length=2, max_length=MAX_STAGES)]
    """In the order of the pipeline; the first one leads."""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks that every stage will have, as the plan claims; 0: it claims nothing."""

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        """See `PlanStep`."""
        return self.stages


class _BesideStep(PlanStep):
    """The members of a group that stands change what they have beside the layers that they compute with."""

    stages: Annotated[tuple[PlannedWorker, ...], Field(min_length=2, max_length=MAX_STAGES)]
    """All of them, in the order of the pipeline."""
    num_blocks: Annotated[int, Field(ge=1)]
    """KV blocks that every stage has afterwards; the leader uses no others."""

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        """See `PlanStep`."""
        return self.stages


class LoadBeside(_BesideStep):
    """All parameters that a group's members lack are loaded beside serving, in memory that KV gives up."""

    kind: Literal["load"] = "load"

    @property
    def waves(self) -> tuple[tuple[PlannedWorker, ...], ...]:
        """The leader first: blocks go."""
        return self.stages[:1], self.stages[1:]

    @property
    def movers(self) -> tuple[PlannedWorker, ...]:
        """The leader, whose sequences make do with fewer blocks."""
        return self.stages[:1]


class UnloadBeside(_BesideStep):
    """The memory of parameters that a group's members do not compute with goes back to KV."""

    kind: Literal["unload"] = "unload"

    @property
    def waves(self) -> tuple[tuple[PlannedWorker, ...], ...]:
        """The leader last: blocks come."""
        return self.stages[1:], self.stages[:1]


class RestoreInstance(PlanStep):
    """A stage of a group is a whole instance again."""

    kind: Literal["restore"] = "restore"
    worker: PlannedWorker

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        """See `PlanStep`."""
        return (self.worker,)

    @property
    def movers(self) -> tuple[PlannedWorker, ...]:
        """It itself: KV goes ahead to where it will be."""
        return self.workers


Step = FormGroup | LoadBeside | UnloadBeside | RestoreInstance
_AnyStep = Annotated[Step, Field(discriminator="kind")]


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
    steps: Annotated[tuple[_AnyStep, ...], Field(max_length=MAX_STEPS)] = ()
    """No worker is in two of them; nothing changes for workers that are not named."""
    wanted: WantedInstances | None = None
    """None: there are instances enough, or nobody asks for more."""

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        """Every worker that takes part, step by step."""
        return tuple(worker for step in self.steps for worker in step.workers)


class FilledNext(MessagePart):
    """Who gets the next request that has so much KV, or more, up to what the next entry says."""

    min_tokens: Annotated[int, Field(ge=1)]
    worker_id: WorkerId


class Filling(ControlMessage):
    """Who is filled next by requests of each size, where the planner packs by size class; dispatchers go by it."""

    kind: Literal["filling"] = "filling"
    by_size: Annotated[tuple[FilledNext, ...], Field(max_length=16)] = ()
    """By size; what is smaller than the first, or finds no room there any more, goes wherever it fits."""


class PreparePlan(ControlMessage):
    """Be ready to carry a plan out: answered once the worker has stopped between two steps, or refused."""

    kind: Literal["prepare_plan"] = "prepare_plan"
    epoch: Epoch
    plan_id: Epoch
    """Not above the epoch: a plan is named by the one under which it was written first."""
    step: _AnyStep
    """The one that the worker takes part in."""
    limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds after which a worker that has heard nothing more goes on as it was: at most so many, see `MAX_HOLD_S`."""


class CommitPlan(ControlMessage):
    """Carry out what was prepared. Idempotent."""

    kind: Literal["commit_plan"] = "commit_plan"
    epoch: Epoch
    plan_id: Epoch


class AbortPlan(ControlMessage):
    """Go on as before: the plan is abandoned. Idempotent."""

    kind: Literal["abort_plan"] = "abort_plan"
    epoch: Epoch
    plan_id: Epoch


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
    reason: Reason = ""
    """In words, if it is not as asked."""
    newest_epoch: Annotated[int, Field(ge=0, le=MAX_EPOCH)] = 0
    """The newest epoch that the worker has taken. If it is newer than the question's, or more than `MAX_EPOCH_STEP`
    older, nothing is done: the asker claims a newer one, or brings the worker nearer."""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """Done: KV blocks that the worker has for its layers now."""


PlanMessage = PreparePlan | CommitPlan | AbortPlan
"""What a planner sends to a worker about a plan."""
