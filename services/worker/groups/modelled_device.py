"""A `GroupDevice` without hardware: its pages are arithmetic, its stages meet in a modelled network, all on one loop.

    device A ── lead ──► ModelledNetwork ◄── join ── device B        a pipeline begins once all of its stages are there

Used on the virtual clock. What takes time there: mapping pages anew, loading parameters from the host, the network's
latency.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.worker.engine.types import NOTHING_KEPT, SPLIT_KEYS, KeptKv
from services.worker.executor.channel import ModelledLink
from services.worker.executor.modelled import FailureInjector, ModelledExecutor
from services.worker.executor.modelled_pipeline import ModelledStages, StageOwner
from services.worker.executor.modelled_stage import REMOTE_STATES, ModelledStage, RemoteLink
from services.worker.executor.parameter_load import ParameterLoad
from services.worker.executor.pipeline import PipelineExecutor
from services.worker.executor.shadow_kv import ShadowKv, TokenDraw, layer_weight
from services.worker.groups.arrivals import Arrivals
from services.worker.groups.device import GroupFailedError, GroupPlace, Led, NextShares, Parting
from services.worker.groups.exchange_modes import ExchangeFacts, modes_of
from services.worker.groups.kv_table import AreLive
from services.worker.groups.modelled_exchange import (
    Estate,
    Exchange,
    Share,
    copy_shares,
    hand_out,
    traffic_of,
)
from services.worker.memory import holdings
from services.worker.memory.layout import MemoryFacts, MemoryLayout
from services.worker.policy.exchange_mode import Pace
from shared.cost import CostModel, StageCost
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts
from shared.systems import KvExchange

_Key = tuple[int, WorkerId]
"""Of a group: its plan and its leader."""
HOST = "the host"
"""Where parameters come from."""
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
class _Begun:
    """A group that has come about."""

    stages: ModelledStages
    arrivals: Arrivals
    """For its leader."""


@dataclass(slots=True)
class _Meeting:
    """The stages of one group, as far as they have come."""

    arrived: dict[int, _Arrival] = field(default_factory=dict)
    begun: Future[_Begun] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when all are there."""


@dataclass(slots=True)
class _Departure:
    shares: dict[int, Share] = field(default_factory=dict)
    kept: Future[list[KeptKv]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exchange_s: float = 0.0
    num_bytes: int = 0


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
        exchange_limit_s: how long KV may be on its way; the rest is computed again. 0: none comes.
        kv_exchange: how KV comes to a group that forms.
    """

    def __init__(
        self,
        link: ModelledLink | None = None,
        meet_limit_s: float = 5.0,
        exchange_limit_s: float = 5.0,
        kv_exchange: KvExchange = KvExchange.COORDINATED,
    ) -> None:
        self._kv_exchange = kv_exchange if exchange_limit_s > 0 else KvExchange.COORDINATED
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

    async def meet(
        self, place: GroupPlace, stage: ModelledStage, before: Estate, on_end: Callable[[str | None], None]
    ) -> _Begun:
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
        stages = ModelledStages([a.stage for a in arrivals], [self._link] * (len(arrivals) - 1), owners)
        befores, link = [arrival.before for arrival in arrivals], self._link
        are_live = self._modes(place, befores, arrivals[0].stage.capacity.block_size)
        exchange = Exchange(befores, [a.stage for a in arrivals], link.bytes_per_s, are_live=are_live)
        if exchange.is_live:
            for arrival in arrivals:
                arrival.stage.attend_over(RemoteLink(link.latency_s, link.bytes_per_s, link.token_bytes))
        began_s = asyncio.get_running_loop().time()
        leader = stages.servers[0]
        news = exchange.news(began_s, self._exchange_limit_s, lambda: self._is_cut(place), leader.die)
        del self._meetings[place.key]
        self._pipelines[place.key] = (tuple(arrival.worker_id for arrival in arrivals), stages)
        coming = Arrivals(
            exchange.coming,
            exchange.num_blocks,
            news,
            stages.capacity.num_blocks,
            exchange.spans,
            num_bytes=exchange.num_bytes,
            sources=exchange.sources,
            mode=exchange.mode,
        )
        meeting.begun.set_result(_Begun(stages, coming))

    def _modes(self, place: GroupPlace, befores: Sequence[Estate], block_size: int) -> AreLive:
        """Return what chooses whose KV is attended where it lies."""
        link = self._link
        facts = ExchangeFacts(
            held=tuple(before.layers for before in befores),
            wanted=tuple(stage.layers for stage in place.stages),
            link_bytes_per_s=(link.bytes_per_s,) * len(befores),
            latency_s=link.latency_s,
            pace=Pace(
                max(before.step_s for before in befores),
                self._exchange_limit_s,
                befores[0].token_s * block_size / len(befores),
            ),
            block_bytes=befores[0].block_bytes,
            token_bytes=round(link.token_bytes * (1 + REMOTE_STATES)),
        )
        return modes_of(self._kv_exchange, facts, can_attend=SPLIT_KEYS % block_size == 0)

    @property
    def moves_kv(self) -> bool:
        """KV changes hands; else all of it is computed again."""
        return self._exchange_limit_s > 0

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
            shares = next_shares() if all(member.ahead_blocks for member in members) else ()
            if not shares:
                copying.end(is_whole=True)
                return
            took_s = traffic_of(members, list(map(len, shares))).most_bytes / self._link.bytes_per_s
            await asyncio.wait([copying.is_whole], timeout=took_s)
            if self._is_cut(place):
                copying.end(is_whole=False)
            if not copying.is_whole.done():
                copy_shares(members, shares)

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
        if len(parting.shares) == len(place.stages) and not parting.kept.done() and not self._is_cut(place):
            del self._partings[place.key]
            kept, traffic = hand_out([parting.shares[i] for i in range(len(place.stages))])
            parting.exchange_s = traffic.most_bytes / self._link.bytes_per_s
            parting.num_bytes = traffic.num_bytes
            parting.kept.set_result(kept)
        try:
            async with asyncio.timeout(PART_LIMIT_S):
                kept = await asyncio.shield(parting.kept)
        except TimeoutError:
            self._partings.pop(place.key, None)
            return NOTHING_KEPT, 0
        await asyncio.sleep(min(parting.exchange_s, self._exchange_limit_s))
        if parting.exchange_s > self._exchange_limit_s:
            return NOTHING_KEPT, 0
        return kept[place.index], parting.num_bytes

    def leave(self, key: _Key, index: int) -> None:
        """A stage leaves a pipeline: the others hear that it is gone. Idempotent."""
        found = self._pipelines.get(key)
        if found is not None:
            found[1].servers[index].leave("a stage has left the group")

    def close(self, key: _Key) -> None:
        """Forget a pipeline whose leader has closed it."""
        self._forget(key)

    def _forget(self, key: _Key) -> None:
        found = self._pipelines.pop(key, None)
        if found is not None:
            self.num_remote_steps += sum(device.num_remote_steps for device in found[1].devices)

    def lose(self, worker_id: WorkerId) -> None:
        """A worker's process is gone, and its ends of all connections with it."""
        for key, (workers, stages) in list(self._pipelines.items()):
            if worker_id in workers:
                self.end_copying(key)
                index = workers.index(worker_id)
                stages.servers[index].leave(f"{worker_id} is gone")
                if index == 0:
                    for channel in stages.from_leader:
                        channel.cut(f"{worker_id}, the leader, is gone")
                    self._forget(key)
        for meeting in self._meetings.values():
            for index in [i for i, arrival in meeting.arrived.items() if arrival.worker_id == worker_id]:
                del meeting.arrived[index]

    def cut(self, one: WorkerId, other: WorkerId) -> None:
        """Cut the connection between two workers until `heal`: what runs over it is lost, and none is made."""
        pair = frozenset((one, other))
        self._cut.add(pair)
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


@dataclass(frozen=True, slots=True)
class ModelledDeviceParams:
    """What a modelled device is like."""

    facts: ElasticFacts
    cost: CostModel
    """Of the whole model."""
    block_size: int
    draw: TokenDraw
    failure: FailureInjector | None = None
    """Makes steps fail."""
    remap_s: float = 0.005
    """Time of a change of page tables (5 ms: KunServe v2, section 4.1)."""
    load_bytes_per_s: float = 25e9
    """At which parameters come from the host: PCIe 4.0 x16 unless told otherwise."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """Parameters that come while the group serves."""

    began_s: float
    num_bytes: int
    bytes_per_s: float

    def left_bytes(self, now_s: float) -> float:
        """Return what has not come yet."""
        return max(self.num_bytes - (now_s - self.began_s) * self.bytes_per_s, 0.0)


class ModelledGroupDevice:
    """See `GroupDevice`.

    Args:
        params: what it is like.
        network: where its groups meet.
        make_executor: makes the executor of the whole model over its memory.
    """

    def __init__(
        self,
        params: ModelledDeviceParams,
        network: ModelledNetwork,
        make_executor: Callable[[ShadowKv], ModelledExecutor],
    ) -> None:
        facts = params.facts
        self.layers = self.resident = LayerRange(0, len(facts.layer_bytes))
        self._all_layers = self.layers
        self._loading: _Loading | None = None
        self._params = params
        self._network = network
        self._make_executor = make_executor
        self._layout = MemoryLayout(
            MemoryFacts(
                layer_bytes=facts.layer_bytes,
                outer_bytes=facts.outer_bytes,
                first_stage_end=facts.first_stage_end,
                last_stage_begin=facts.last_stage_begin,
                block_bytes=facts.block_bytes,
                page_bytes=facts.page_bytes,
                num_pages=facts.num_pages,
                max_blocks=facts.max_blocks,
            )
        )
        self._kv = self._shadow_kv(self.num_blocks(self._all_layers), 1)
        self._ahead: ShadowKv | None = None
        """Beside a stage: memory for KV of all layers of its share."""
        self._num_ahead = 0
        """Blocks of that which there is memory for."""
        self._group = WorkerId("")
        self._place: GroupPlace | None = None
        """In the pipeline that it is a stage of."""
        self.executor = make_executor(self._kv)
        """Of the whole model; of no use while the device is a stage."""
        self.pipelines: list[PipelineExecutor] = []
        """Those that it has led, for their stats."""

    @property
    def facts(self) -> ElasticFacts:
        """Sizes of its memory."""
        return self._params.facts

    @property
    def address(self) -> str:
        """Nowhere: all are in one process."""
        return ""

    def num_blocks(self, layers: LayerRange) -> int:
        """Return the KV blocks of some layers that there is memory for beside the parameters of just these."""
        return holdings.room(self._layout, layers)

    def refusal(self, layers: LayerRange) -> str | None:
        """Return why this device cannot come to hold these layers."""
        if not self._all_layers.covers(layers):
            return f"the model has layers {self._all_layers}, not {layers}"
        return None if self.num_blocks(layers) else f"layers {layers} leave no memory for KV"

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters that is loaded; see `GroupDevice`."""
        loading = self._loading
        if loading is None:
            return 1.0
        return 1 - loading.left_bytes(_now_s()) / sum(self.facts.layer_bytes[layer] for layer in self.resident)

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far parameters are that `reside` loads; see `GroupDevice`."""
        loading = self._loading
        if loading is None:
            return None
        num_loaded = loading.num_bytes - int(loading.left_bytes(_now_s()))
        return ParameterLoad(loading.num_bytes, num_loaded, ((HOST, num_loaded),), num_loaded == loading.num_bytes)

    def blocks_beside(self, layers: LayerRange) -> int:
        """Return the KV blocks of the own layers beside the parameters of some more; see `GroupDevice`."""
        return holdings.room(self._layout, self.layers, layers)

    async def reside(self, layers: LayerRange, num_blocks: int, *, is_ahead: bool = False) -> int:
        """Have other parameters beside those of the own layers; see `GroupDevice`."""
        found = self.blocks_beside(layers)
        if not layers.covers(self.layers) or found < num_blocks:
            raise GroupFailedError(f"layers {layers} leave memory for {found} KV blocks of {num_blocks}")
        self.end_copying()
        await asyncio.sleep(self._params.remap_s)
        self._ahead = self._shadow_kv(self.whole_blocks, 1) if is_ahead else None
        self._num_ahead = self.blocks_ahead(self.layers, num_blocks) if is_ahead else 0
        found = num_blocks if is_ahead else found
        if layers == self.resident:
            if self.load_now is not None and self.load_now.is_over:
                self._loading = None
            return found
        self._kv.poison(np.arange(min(found, self._kv.num_blocks), self._kv.num_blocks, dtype=np.int32))
        more = sum(self.facts.layer_bytes[layer] for layer in layers if layer not in self.layers)
        self._loading = _Loading(_now_s(), more, self._params.load_bytes_per_s) if more else None
        self.resident = layers
        return found

    async def lead(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> Led:
        """Be the first stage; see `GroupDevice`."""
        begun = await self._meet(place, on_end, kept)
        executor = PipelineExecutor(begun.stages, asyncio.get_running_loop().time, on_end)
        self.pipelines.append(executor)
        return Led(executor, arrivals=begun.arrivals)

    async def join(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> int:
        """Be another stage; see `GroupDevice`."""
        await self._meet(place, on_end, kept)
        return self.num_blocks(self.layers)

    async def _meet(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv) -> _Begun:
        step_s = self._recent_step_s
        self._leave()
        self._ahead = None
        own_id, block_bytes = place.own.worker_id, 2 * self._params.facts.block_bytes
        before = Estate(self.layers, self._kv, self._group or own_id, kept, block_bytes, step_s, self._params.cost.b1_s)
        await asyncio.sleep(self._params.remap_s)
        layers, num_layers = place.own.layers, len(self._all_layers)
        num_blocks = self.num_blocks(layers)
        if not num_blocks:
            raise GroupFailedError(f"layers {layers} leave no memory for KV")
        self.layers, self._group = layers, place.stages[0].worker_id
        self.resident, self._loading = layers, None
        self._kv = self._shadow_kv(num_blocks, layer_weight(layers, num_layers))
        stage = ModelledStage(
            StageCost(self._params.cost, layers, num_layers),
            self._kv,
            failure=self._params.failure if place.index == 0 else None,
        )
        met = await self._network.meet(place, stage, before, on_end)
        self._place = place
        return met

    @property
    def most_copied(self) -> int:
        """Blocks of one round of `copy_ahead`; see `GroupDevice`."""
        return self._kv.num_blocks if self._network.moves_kv else 0

    async def copy_ahead(self, next_shares: NextShares | None = None) -> bool:
        """Copy KV to where it will be, while the group serves; see `GroupDevice`."""
        if self._place is None or self._ahead is None:
            return False
        return await self._network.copy_ahead(self._place, self._share(self._ahead, Parting()), next_shares)

    def end_copying(self) -> None:
        """Let copies end soon; see `GroupDevice`."""
        if self._place is not None:
            self._network.end_copying(self._place.key)

    def _share(self, ahead: ShadowKv | None, parting: Parting) -> Share:
        return Share(
            self.layers,
            self._kv,
            self._shadow_kv(self.whole_blocks, 1) if ahead is None else ahead,
            parting.shares,
            2 * self._params.facts.block_bytes,
            parting.there,
            ahead_blocks=0 if ahead is None else self._num_ahead,
        )

    def blocks_ahead(self, layers: LayerRange, num_blocks: int) -> int:
        """Return of how many blocks a stage can have all layers; see `GroupDevice`."""
        return holdings.room_ahead(self._layout, layers, num_blocks)

    @property
    def whole_blocks(self) -> int:
        """KV blocks beside the whole model."""
        return self.num_blocks(self._all_layers)

    async def alone(self, parting: Parting | None = None) -> Led:
        """Hold the whole model; see `GroupDevice`."""
        place, kept, num_bytes = self._place, NOTHING_KEPT, 0
        self.end_copying()
        ahead, self._ahead = self._ahead, None
        share = self._share(ahead, parting or Parting())
        if parting is not None and place is not None:
            kept, num_bytes = await self._network.part(place, share)
        self._leave()
        if self.layers != self._all_layers:
            await asyncio.sleep(self._params.remap_s + self._missing_bytes / self._params.load_bytes_per_s)
        self.layers, self._group = self._all_layers, WorkerId("")
        self.resident, self._loading = self.layers, None
        self._kv = share.whole
        self.executor = self._make_executor(self._kv)
        return Led(self.executor, kept, num_moved_bytes=num_bytes)

    async def close(self) -> None:
        """Leave any group. Idempotent."""
        self._leave()

    @property
    def _recent_step_s(self) -> float:
        leads = self._place is not None and not self._place.index
        return self.pipelines[-1].recent_step_s if leads else self.executor.recent_step_s

    @property
    def _missing_bytes(self) -> float:
        """Parameters of the whole model that are not loaded."""
        if self._loading is not None:
            return self._loading.left_bytes(_now_s())
        layer_bytes = self.facts.layer_bytes
        return sum(layer_bytes[layer] for layer in self._all_layers if layer not in self.resident)

    def _leave(self) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            self._network.leave(place.key, place.index)
            if place.index == 0:
                self._network.close(place.key)

    def _shadow_kv(self, num_blocks: int, weight: int) -> ShadowKv:
        return ShadowKv(num_blocks, self._params.block_size, self._params.draw, weight=weight)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
