"""Which worker is asked next to take a session, and who waits until one would."""

from __future__ import annotations

from dataclasses import replace

from services.dispatcher.limits.lines import WorkerLines
from services.dispatcher.limits.waiting_room import Claimant, RoomLimits, WaitingRooms
from services.dispatcher.policy.placement import NOTHING_CACHED, CachedTokens, Placed, Placement
from services.dispatcher.session.calls import WorkerCalls
from services.dispatcher.session.leases import WorkerPresence
from services.dispatcher.session.request import FailureCode
from services.dispatcher.session.session import Session
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.request import PrefixSource


class WorkerChoice:
    """Owns the waiting room."""

    def __init__(
        self,
        calls: WorkerCalls,
        cluster: ClusterState,
        leases: WorkerPresence,
        placement: Placement,
        queues: RoomLimits,
    ) -> None:
        self.waiting, self.lines = WaitingRooms(self._has_place, queues), WorkerLines(cluster)
        self._calls = calls
        self._cluster = cluster
        self._leases = leases
        self._choose = placement

    def find(self, session: Session, refused: set[WorkerId]) -> Placed | None:
        """Return the worker to ask next, by what is known here; None: there is none, or it would be others' first."""
        request, prefixes = session.request, self._cluster.prefixes
        names = prefixes.names_of(request.prompt, request.cache_salt)
        cached = prefixes.cached(names)
        placed = self._find(claimant_of(session), refused, cached)
        return placed and replace(placed, prefix=self._source_for(placed, cached), names=names)

    def _source_for(self, placed: Placed, cached: CachedTokens) -> PrefixSource | None:
        """Return who has most of a prompt, if that is more than where it is placed."""
        there = [(number, worker_id) for worker_id, number in cached.items() if number > placed.num_cached]
        lost = self._leases.lost_workers if there else set[WorkerId]()
        most, source = max((each for each in there if each[1] not in lost), default=(0, None))
        if source is None:
            return None
        address = self._cluster.address_for(placed.worker_id, source)
        return None if address is None else PrefixSource(worker_id=source, address=address, num_tokens=most)

    def crowded(self, tier: Tier) -> FailureCode:
        """Return why one more cannot wait: the clients' crowd, or, while the broker is away, our own failure."""
        full = FailureCode.RESOURCE_UNAVAILABLE if tier.is_best_effort else FailureCode.QUEUE_FULL
        return full if self._calls.connected else FailureCode.NO_CAPACITY

    def _has_place(self, claimant: Claimant) -> bool:
        """Return whether a worker would take this one at once, as far as is known here."""
        return self._calls.connected and self._find(claimant, set(), NOTHING_CACHED) is not None

    def _find(self, claimant: Claimant, refused: set[WorkerId], cached: CachedTokens) -> Placed | None:
        if claimant.tier.is_best_effort and len(self.waiting.real_time):
            return None
        closed = refused | self._leases.lost_workers | self.lines.crowded(claimant)
        loads = self._cluster.loads(claimant.tier)
        return self._choose(loads, claimant.num_tokens, closed, claimant.num_known, cached)


def claimant_of(session: Session, *, has_begun: bool = False) -> Claimant:
    """Return the session as the waiting room knows it."""
    request = session.request
    return Claimant(
        request.tier,
        request.tenant,
        request.num_tokens,
        num_known=request.num_prompt_tokens + len(session.tokens),
        has_begun=has_begun,
        has_output=bool(session.tokens),
    )
