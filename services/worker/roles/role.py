"""What a worker is in the cluster: an explicit state, what is reported of it, and whom a plan may name. Pure.

                 form                     the pipeline ends
    Alone ────────────────► Leading ───────────────────────► Broken ──┐
      ▲   ────────────────► Member  ───────────────────────►          │
      │                        │ form, restore                        │ by itself, or by a plan
      └──── Changing ◄─────────┴──────────────────────────────────────┘

A worker is `Changing` on the way from any of them to the next, and reported as what it was until it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.kv_moves.places import GroupPlace
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.plan import PlannedWorker


@dataclass(frozen=True, slots=True)
class Role:
    """As reported."""

    layers: LayerRange
    group: str = ""
    """Id of the group's leader; empty: it is alone."""
    stage: int = 0
    num_stages: int = 1
    plan_id: int = 0
    """The last plan that was carried out here."""

    @property
    def is_leader(self) -> bool:
        """It owns the sequences of a group."""
        return self.num_stages > 1 and self.stage == 0


@dataclass(frozen=True, slots=True)
class Alone:
    """A whole instance."""

    layers: LayerRange
    plan_id: int = 0
    """See `Role`; so it is below."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """A stage of a group that stands."""

    place: GroupPlace
    num_blocks: int
    """KV blocks of the layers that are held."""
    plan_id: int
    """That of the place, or of a later one that changed only what lies beside."""


@dataclass(frozen=True, slots=True)
class Leading(InGroup):
    """The first stage: it owns the group's sequences."""


@dataclass(frozen=True, slots=True)
class Member(InGroup):
    """Another stage."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The pipeline is over, and the worker has not left its group yet."""

    was: InGroup
    reason: str


@dataclass(frozen=True, slots=True)
class Changing:
    """On its way to be something else; the gate is held."""

    was: Alone | InGroup | Broken
    joins: int | None = None
    """Plan of the pipeline that it is about to be a stage of."""
    ended: str | None = None
    """Why that is over already."""


RoleState = Alone | InGroup | Broken | Changing


def group_of(state: RoleState) -> InGroup | None:
    """Return the worker's part in the group that it is in, or has not left yet; None: it is alone."""
    while isinstance(state, Broken | Changing):
        state = state.was
    return state if isinstance(state, InGroup) else None


def reported(state: RoleState) -> Role:
    """Return what others are told."""
    while isinstance(state, Broken | Changing):
        state = state.was
    if isinstance(state, Alone):
        return Role(state.layers, plan_id=state.plan_id)
    stages, index = state.place.stages, state.place.index
    return Role(state.place.own.layers, stages[0].worker_id, index, len(stages), state.plan_id)


def why_not_named(
    role: Role, workers: Sequence[PlannedWorker], worker_id: WorkerId, incarnation: Incarnation
) -> str | None:
    """Return why a step does not mean a worker of this role as it is now; None: it does.

    Args:
        role: what it is.
        workers: that the step names.
        worker_id: its name.
        incarnation: of its process.
    """
    named = [worker for worker in workers if worker.worker_id == worker_id]
    if len(named) != 1:
        return f"the step names this worker {len(named)} times"
    if named[0].incarnation != incarnation:
        return "the plan was made for another process of this worker"
    held = LayerRange(*named[0].held)
    if held != role.layers:
        return f"the plan was made for layers {held}, held are {role.layers}{in_group(role)}"
    return None


def in_group(role: Role) -> str:
    """Return where a worker is in a group, to go on with a sentence; nothing if it is alone."""
    return f", as stage {role.stage + 1} of {role.num_stages} in the group of {role.group}" if role.group else ""
