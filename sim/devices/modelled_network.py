"""Where modelled devices meet: the connections of their groups, and the KV that goes over them, on one loop.

device A ── lead ──► ModelledNetwork ◄── join ── device B        a pipeline begins once all of its stages are there
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.kv_moves.exchange_modes import ExchangeCosts, form_table, usable
from services.worker.kv_moves.kv_table import KvTable, move_limit_s, table_to_copy
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, NextShares
from shared.ids import WorkerId
from shared.systems import KvExchange
from sim.devices.channel import ModelledLink
from sim.devices.modelled_exchange import NO_LIMIT, Estate, Exchange, Share, Traffic, carry, hand_out, traffic_of
from sim.devices.modelled_migration import MigrationPaths
from sim.devices.modelled_pipeline import ModelledStages, StageOwner
from sim.devices.modelled_stage import REMOTE_STATES, ModelledStage

_Key = tuple[int, WorkerId]
"""Of a group: its plan and its leader."""
PART_LIMIT_S = 1.0
"""How long a worker waits for the others when their group dissolves in order."""


@dataclass(slots=True)
class _Arrival:
    worker_id: WorkerId
    stage: ModelledStage
    before: Estate
    on_end: Callable[[str | None], None]
    context: Context


@dataclass(frozen=True, slots=True)
class Begun:
    """A group that has come about."""

    stages: ModelledStages
    arrivals: Arrivals | None
    """For its leader; None: no KV comes."""


@dataclass(slots=True)
class _Meeting:
    """The stages of one group, as far as they have come."""

    arrived: dict[int, _Arrival] = field(default_factory=dict)
    begun: Future[Begun] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when all are there."""


@dataclass(slots=True)
class _Departure:
    shares: dict[int, Share] = field(default_factory=dict)
    told: Future[tuple[list[KeptKv], Traffic]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What each has, and what goes between them; done when all are there."""


@dataclass(slots=True)
class _Copying:
    """The members of a group whose KV is copied ahead."""

    members: dict[int, Share] = field(default_factory=dict)
    are_there: Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_whole: Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, *, is_whole: bool) -> None:
        """It is over; later words change nothing."""
        if not self.is_whole.done():
            self.is_whole.set_result(is_whole)


class ModelledNetwork:
    """Where modelled workers find each other; one per cluster.

    Args:
        link: between any two workers.
        meet_limit_s: how long stages wait for each other.
        exchange_limit_s: how long KV may be on its way at most, see `move_limit_s`; the rest is computed again. 0: none
            comes.
        kv_exchange: how KV comes to a group that forms.
        near_link: between two of one host, for requests that go from one to the other.
    """

    def __init__(
        self,
        link: ModelledLink | None = None,
        meet_limit_s: float = 5.0,
        exchange_limit_s: float = 5.0,
        kv_exchange: KvExchange = KvExchange.COORDINATED,
        near_link: ModelledLink | None = None,
    ) -> None:
        self._kv_exchange = kv_exchange
        self.num_remote_steps = 0
        """Steps in which keys that lay elsewhere were attended, of groups that are over."""
        self._link = link or ModelledLink()
        self._meet_limit_s = meet_limit_s
        self._exchange_limit_s = exchange_limit_s
        self._meetings: dict[_Key, _Meeting] = {}
        self._pipelines: dict[_Key, tuple[tuple[WorkerId, ...], ModelledStages]] = {}
        self._partings: dict[_Key, _Departure] = {}
        self._copyings: dict[_Key, _Copying] = {}
        self._cut: set[frozenset[WorkerId]] = set()
        self.migration = MigrationPaths(self._link, near_link or self._link)
        """Of requests that go from one worker to another."""

    async def meet(
        self, place: GroupPlace, stage: ModelledStage, before: Estate, on_end: Callable[[str | None], None]
    ) -> Begun:
        """Wait for the other stages of a group; return them, and the KV that is on its way.

        Raises:
            GroupFailedError: they did not come in time.
        """
        meeting = self._meetings.setdefault(place.key, _Meeting())
        meeting.arrived[place.index] = _Arrival(place.own.worker_id, stage, before, on_end, copy_context())
        await asyncio.sleep(self._link.latency_s)
        if len(meeting.arrived) == len(place.stages) and not meeting.begun.done() and not self._is_cut(place):
            self._begin(place, meeting)
        try:
            async with asyncio.timeout(self._meet_limit_s):
                return await asyncio.shield(meeting.begun)
        except TimeoutError:
            missing = [s.worker_id for i, s in enumerate(place.stages) if i not in meeting.arrived]
            self._meetings.pop(place.key, None)
            said = ", ".join(missing) if missing else "a connection"
            raise GroupFailedError(f"{said} did not come within {self._meet_limit_s:g} s") from None

    def _is_cut(self, place: GroupPlace) -> bool:
        named = {stage.worker_id for stage in place.stages}
        return any(pair <= named for pair in self._cut)

    def _begin(self, place: GroupPlace, meeting: _Meeting) -> None:
        arrivals = [meeting.arrived[i] for i in range(len(place.stages))]
        owners = [StageOwner(arrival.on_end, arrival.context) for arrival in arrivals]
        owners[0] = StageOwner(context=arrivals[0].context)  # the leader hears of it by its executor
        stages = ModelledStages([a.stage for a in arrivals], self._link, owners)
        befores, link = [arrival.before for arrival in arrivals], self._link
        table = self._table(place, befores, arrivals[0].stage.capacity.block_size)
        exchange = Exchange(table, befores, [a.stage for a in arrivals], link.bytes_per_s)
        if exchange.is_live:
            for arrival in arrivals:
                arrival.stage.attend_over(link)
        began_s = asyncio.get_running_loop().time()
        leader = stages.servers[0]
        limit_s = move_limit_s(exchange.num_bytes, link.bytes_per_s, self._exchange_limit_s)
        news = exchange.news(began_s, limit_s, lambda: self._is_cut(place), leader.die)
        del self._meetings[place.key]
        self._pipelines[place.key] = (tuple(arrival.worker_id for arrival in arrivals), stages)
        meeting.begun.set_result(Begun(stages, exchange.arrivals(news, stages.capacity.num_blocks)))

    def _table(self, place: GroupPlace, befores: Sequence[Estate], block_size: int) -> KvTable:
        """Return what moves to a group that forms, as the leader of a live one decides it."""
        link, first = self._link, befores[0]
        costs = ExchangeCosts(
            block_size=block_size,
            pair_bytes=first.pair_bytes,
            token_bytes=round(link.token_bytes * (1 + REMOTE_STATES)),
            latency_s=link.latency_s,
            limit_s=self._exchange_limit_s,
            cost=first.cost,
        )
        wanted = [stage.layers for stage in place.stages]
        return form_table(usable(self._kv_exchange, block_size), [each.offer for each in befores], wanted, costs)

    @property
    def link_bytes_per_s(self) -> float:
        """Of each worker's link, each way."""
        return self._link.bytes_per_s

    @property
    def kept_aside(self) -> int:
        """Blocks that a worker keeps for others: all; none where KV does not change hands but is computed again."""
        return NO_LIMIT if self._exchange_limit_s > 0 else 0

    async def copy_ahead(self, place: GroupPlace, member: Share, next_shares: NextShares | None) -> bool:
        """Copy KV of a group to where it will be, round by round; see `GroupDevice`."""
        copying = self._copyings.setdefault(place.key, _Copying())
        copying.members[place.index] = member
        if len(copying.members) == len(place.stages):
            copying.are_there.set_result(None)
        try:
            async with asyncio.timeout(PART_LIMIT_S):
                either: list[Future[Any]] = [copying.are_there, copying.is_whole]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if next_shares is not None:
                await self._copy_rounds(place, copying, next_shares)
            return await asyncio.shield(copying.is_whole)
        except TimeoutError:
            copying.end(is_whole=False)
            return False
        finally:
            if next_shares is not None:
                copying.end(is_whole=False)
            if self._copyings.get(place.key) is copying:
                del self._copyings[place.key]

    async def _copy_rounds(self, place: GroupPlace, copying: _Copying, next_shares: NextShares) -> None:
        members = [copying.members[i] for i in sorted(copying.members)]
        while not copying.is_whole.done():
            shares = next_shares() or (PlacedKv(),) * len(members)
            table = table_to_copy([member.offer for member in members], shares)
            if not table.lots:
                copying.end(is_whole=True)
                return
            took_s = traffic_of(table, members).most_bytes / self._link.bytes_per_s
            await asyncio.wait([copying.is_whole], timeout=took_s)
            if self._is_cut(place):
                copying.end(is_whole=False)
            if not copying.is_whole.done():
                carry(table, members)

    def end_copying(self, key: _Key) -> None:
        """Break off what is copied ahead in a group. Idempotent."""
        copying = self._copyings.get(key)
        if copying is not None:
            copying.end(is_whole=False)

    async def part(self, place: GroupPlace, share: Share) -> tuple[KeptKv, int]:
        """Wait for the other members of a group that dissolves, and for the KV.

        Returns:
            What this worker's blocks hold, and the bytes that went between all of them; nothing if somebody did not
            come in time.
        """
        parting = self._partings.setdefault(place.key, _Departure())
        parting.shares[place.index] = share
        await asyncio.sleep(self._link.latency_s)
        if len(parting.shares) == len(place.stages) and not parting.told.done() and not self._is_cut(place):
            del self._partings[place.key]
            parting.told.set_result(hand_out([parting.shares[i] for i in range(len(place.stages))]))
        try:
            async with asyncio.timeout(PART_LIMIT_S):
                kept, traffic = await asyncio.shield(parting.told)
        except TimeoutError:
            self._partings.pop(place.key, None)
            return NOTHING_KEPT, 0
        exchange_s = traffic.most_bytes / self._link.bytes_per_s
        limit_s = move_limit_s(traffic.num_bytes, self._link.bytes_per_s, self._exchange_limit_s)
        await asyncio.sleep(min(exchange_s, limit_s))
        if exchange_s > limit_s:
            return NOTHING_KEPT, 0
        return kept[place.index], traffic.num_bytes

    def leave(self, key: _Key, index: int) -> None:
        """A stage leaves a pipeline: the others hear that it is gone. Idempotent."""
        found = self._pipelines.get(key)
        if found is not None:
            found[1].servers[index].leave("a stage has left the group")

    def close(self, key: _Key) -> None:
        """Forget a pipeline whose leader has closed it."""
        found = self._pipelines.pop(key, None)
        if found is not None:
            self.num_remote_steps += sum(device.num_remote_steps for device in found[1].devices)

    def lose(self, worker_id: WorkerId) -> None:
        """A worker's process is gone, and its ends of all connections with it."""
        self.migration.lose(worker_id)
        for key, (workers, stages) in list(self._pipelines.items()):
            if worker_id in workers:
                self.end_copying(key)
                index = workers.index(worker_id)
                stages.servers[index].leave(f"{worker_id} is gone")
                if index == 0:
                    for channel in stages.from_leader:
                        channel.cut(f"{worker_id}, the leader, is gone")
                    self.close(key)
        for meeting in self._meetings.values():
            for index in [i for i, arrival in meeting.arrived.items() if arrival.worker_id == worker_id]:
                del meeting.arrived[index]

    def cut(self, one: WorkerId, other: WorkerId) -> None:
        """Cut the connection between two workers until `heal`: what runs over it is lost, and none is made."""
        pair = frozenset((one, other))
        self._cut.add(pair)
        self.migration.cut(one, other)
        for workers, stages in list(self._pipelines.values()):
            if pair <= set(workers):
                first, second = sorted((workers.index(one), workers.index(other)))
                if first == 0:
                    stages.from_leader[second].cut(f"the connection of {one} and {other} is cut")
                elif second == first + 1:
                    stages.activations[first].cut(f"the connection of {one} and {other} is cut")

    def heal(self, one: WorkerId, other: WorkerId) -> None:
        """Let them connect again."""
        self._cut.discard(frozenset((one, other)))
        self.migration.heal(one, other)
