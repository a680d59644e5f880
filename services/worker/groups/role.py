"""What a worker is in the cluster: a whole instance, the leader of a group, or another stage of one."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.groups.device import GroupPlace
from shared.layers import LayerRange


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
