"""Whose requests wait at which worker: they were sent there, and have not begun. One writer: `Placing`."""

from __future__ import annotations

from collections import Counter

from services.dispatcher.limits.waiting_room import Claimant
from services.dispatcher.policy.placement import PlacementLoad
from services.dispatcher.policy.shares import may_wait
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import StreamId, WorkerId

_Group = tuple[Tier, str]
"""Tier and tenant, which share a worker's places with others."""


class WorkerLines:
    """This dispatcher's part of what waits at workers.

    Args:
        cluster: where it is counted, too.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._places: dict[StreamId, tuple[WorkerId, _Group]] = {}
        self._num_of: Counter[tuple[WorkerId, _Group]] = Counter()

    def crowded(self, claimant: Claimant) -> set[WorkerId]:
        """Return the workers where this one may not wait, so that others may."""
        if claimant.has_output and not claimant.tier.is_best_effort:
            return set()
        loads = self._cluster.loads(claimant.tier)
        return {load.worker_id for load in loads if not self._may_wait(claimant, load)}

    def _may_wait(self, claimant: Claimant, load: PlacementLoad) -> bool:
        if load.is_crowded:
            return False
        num_own = self._num_of[load.worker_id, (claimant.tier, claimant.tenant)]
        return not load.num_waiting or may_wait(num_own, load.num_waiting, load.max_waiting)

    def join(self, stream: StreamId, worker_id: WorkerId, claimant: Claimant) -> None:
        """A request waits there from now on, and nowhere else."""
        place = worker_id, (claimant.tier, claimant.tenant)
        self._places[stream] = place
        self._num_of[place] += 1

    def leave(self, stream: StreamId, now_s: float) -> bool:
        """It has begun, or is gone; return whether it waited."""
        place = self._places.pop(stream, None)
        if place is None:
            return False
        self._num_of[place] -= 1
        if not self._num_of[place]:
            del self._num_of[place]
        self._cluster.began(place[0], now_s, place[1][0])
        return True
