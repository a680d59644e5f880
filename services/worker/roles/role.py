"""What a worker is in the cluster: a whole instance, the leader of a group, or another stage of one.

And what it cannot become: why it does not take the part that a plan has for it, in words. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.roles.device import GroupPlace
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange, check_tiling
from shared.messages.plan import PlannedGroup


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

    @property
    def is_member(self) -> bool:
        """It computes what another worker says."""
        return self.stage > 0


def role_in(place: GroupPlace) -> Role:
    """Return the role of a worker at its place in a group."""
    return Role(place.own.layers, place.stages[0].worker_id, place.index, len(place.stages), place.plan_id)


def why_not_taken(
    role: Role, group: PlannedGroup, worker_id: WorkerId, incarnation: Incarnation, num_layers: int
) -> str | None:
    """Return why a worker of this role cannot take the part that it has in a planned group; None: it can.

    Args:
        role: what it is now.
        group: what it shall be a stage of; of one stage: it shall be a whole instance.
        worker_id: its name.
        incarnation: of its process.
        num_layers: of the whole model.
    """
    parts = [stage for stage in group.stages if stage.worker_id == worker_id]
    if len(parts) != 1:
        return f"the group names this worker {len(parts)} times"
    (part,) = parts
    if part.incarnation != incarnation:
        return "the plan was made for another process of this worker"
    held, layers = LayerRange(*part.held), LayerRange(*part.layers)
    if held != role.layers:
        return f"the plan was made for layers {held}, held are {role.layers}{_in_group(role)}"
    try:
        check_tiling([LayerRange(*stage.layers) for stage in group.stages], num_layers)
    except ValueError as error:
        return str(error)
    if len(group.stages) == 1:
        return None if role.is_leader or role.is_member else "it is a whole instance already"
    if not held.covers(layers):
        return f"layers {layers} are not all among those held, {held}{_in_group(role)}"
    return None


def _in_group(role: Role) -> str:
    return f", as stage {role.stage + 1} of {role.num_stages} in the group of {role.group}" if role.group else ""
