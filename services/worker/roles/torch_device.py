"""The device of a live worker whose layers can be dropped: a model in pages, and sockets to the other stages.

            lead: dial all members                    executor: PipelineExecutor over threads and sockets
    alone ─────────────────────────────────► leader
      │ ▲   join: be dialled by the stages            stage server: threads compute what comes over sockets
      │ └───────── before, dial those behind ► member
      │                                               in all states one model in one memory (`elastic_model.py`);
      └─ alone: leave, load, open ◄─────── anything   what runs on it is closed before another change than `reside`

A stage may have parameters of other layers beside its own (`reside`): they are loaded while it computes, from the
host's checkpoint or from the stages that compute with them (`parameter_lending.py`).

Stages connect first (`gather.py`) and say what KV they have; so nothing is dropped for a group to which somebody does
not come, and KV is kept aside only if it goes along. Then each drops its layers, the pipeline opens, and KV moves
beside its steps (`torch_exchange.py`), or, on one device, before them in its pages (`hand_over.py`). When a group
dissolves, its stages connect once more, for KV alone (`standing_kv.py`).

Source: KunServe v2, sections 3, 4.1 and 4.2 (instances drop layers, form a group, and exchange KV); how stages find
each other is left open there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from services.worker.contract.executor import KvCapacity
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.cost.estimate import CostEstimate
from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.thread import ThreadExecutor
from services.worker.kv_moves.gather import (
    Gathering,
    LeaderLinks,
    MemberLinks,
    all_ready,
    gather_as_leader,
    gather_as_member,
)
from services.worker.kv_moves.kv_exchanges import ExchangeParams, KvExchanges
from services.worker.kv_moves.kv_table import KvOffer
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, NextShares
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.pages.hand_over import HandOver
from services.worker.peers.connect import Peers, say_greeting
from services.worker.peers.frames import PeerLostError
from services.worker.peers.greeting import PeerReady, PeerWelcome
from services.worker.peers.link_priority import LinkPriority
from services.worker.peers.threads import in_thread
from services.worker.pipeline.channel import SocketChannel
from services.worker.pipeline.membership import Membership
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.pipeline.thread_stage import ThreadStages
from services.worker.roles.device import Led, Parting
from services.worker.roles.held_layers import HeldLayers
from services.worker.roles.parameter_peers import ParameterPeers
from services.worker.roles.standing_kv import StandingKv
from shared.layers import LayerRange

GROUP_LIMIT_S = 5.0
"""Longest time in which the stages of a group have to find each other."""
PART_LIMIT_S = 1.0
"""Longest time in which those of a group that dissolves have to find each other: meanwhile they serve nobody."""


class TorchGroupDevice(HeldLayers):
    """A `GroupDevice` over a loaded model. Lives on the running event loop; `alone` gives the first executor.

    Args:
        model: owned; no runner of it is open.
        peers: this worker among the others; owned.
        exchange: how KV changes hands; None: as `ExchangeParams` has it.
        limit_s: in which the stages of a group have to find each other.
        part_limit_s: in which the stages of a group that dissolves have to find each other.
        peers_first: parameters come back beside a group from its other stages, and from the checkpoint what those do
            not give; else the other way round.
        cost: of a step; None: unknown, KV that does not come in time costs nothing then.
    """

    def __init__(  # noqa: PLR0913  limits by name
        self,
        model: ElasticModel,
        peers: Peers,
        exchange: ExchangeParams | None = None,
        *,
        limit_s: float = GROUP_LIMIT_S,
        part_limit_s: float = PART_LIMIT_S,
        peers_first: bool = False,
        cost: CostEstimate | None = None,
    ) -> None:
        params = exchange or ExchangeParams()
        super().__init__(model, params.link_bytes_per_s)
        self._loop = asyncio.get_running_loop()
        self._peers = peers
        self._limit_s = limit_s
        self._peers_first = peers_first
        self._hands_over = params.hands_over
        """Where that can be: while this device's memory has not refused."""
        self._priority = LinkPriority()
        self._kv = KvExchanges(model, self._priority, params, cost or CostEstimate())
        self._standing = StandingKv(model, peers, self._kv, part_limit_s)
        self._sources = ParameterPeers(model, peers, self._priority, part_limit_s)
        self._changing = asyncio.Lock()
        self._executor: ThreadExecutor | PipelineExecutor | None = None
        self._membership: Membership | None = None
        self._exchange_now: TorchExchange | None = None
        """Of the group that stands, until it is over or for longer."""

    @property
    def address(self) -> str:
        """Where other stages connect."""
        return self._peers.address

    async def lead(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv = NOTHING_KEPT) -> Led:
        """Become the first stage of a group; see `GroupDevice`."""
        async with self._changing:
            if place.index:
                raise GroupFailedError(f"stage {place.index} cannot lead")
            self._check(place)
            with contextlib.ExitStack() as sockets:
                offer = await self._leave_with(kept, place.own.layers)
                at = Gathering(self._peers, place, sockets, self._limit_s)
                links = await gather_as_leader(at, attending=self._kv.may_attend)
                own = replace(self._model.info.capacity, num_blocks=offer.num_blocks)
                capacity = _least(own, links.welcomes, place)
                exchange, stage = await self._become(at, links, offer)
                await all_ready(place, links, self._kv.limit_s + self._limit_s)
                channels = [SocketChannel(sock, self._priority) for sock in links.members]
                stages = ThreadStages(
                    stage, SocketChannel(links.behind, self._priority), channels, capacity, self._loop
                )
                sockets.pop_all()
            self._executor = executor = PipelineExecutor(stages, self._loop.time, on_end)
            self._stand(place)
            if exchange.by_pages:
                return Led(executor, exchange.kept, num_moved_bytes=exchange.num_moved_bytes)

            def over() -> None:
                """Give blocks without KV to others; where sequences go on without it, the group has ended."""
                if exchange.failure is not None and exchange.lacks_live:
                    stages.lose(f"KV is not exchanged: {exchange.failure}")
                else:
                    executor.end_writes()

            exchange.when_over(over)
            return Led(executor, arrivals=exchange.arrivals(capacity.num_blocks))

    async def join(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv = NOTHING_KEPT) -> int:
        """Become another stage of a group; see `GroupDevice`.

        It returns when this stage can compute. If another one cannot, the leader gives up, and `on_end` is called.
        """
        async with self._changing:
            if not place.index:
                raise GroupFailedError("the first stage leads, it does not join")
            self._check(place)
            with contextlib.ExitStack() as sockets:
                offer = await self._leave_with(kept, place.own.layers)
                welcome = PeerWelcome(
                    num_blocks=offer.num_blocks,
                    num_host_blocks=offer.num_host_blocks,
                    block_size=self._model.info.capacity.block_size,
                )
                at = Gathering(self._peers, place, sockets, self._limit_s)
                links = await gather_as_member(at, welcome, attending=self._kv.may_attend)
                _, stage = await self._become(at, links, offer)
                try:
                    await say_greeting(links.leader, PeerReady())
                except PeerLostError as error:
                    raise GroupFailedError(f"the leader is gone: {error}") from error
                self._membership = Membership(stage, links.leader, links.previous, links.behind, on_end, self._priority)
                self._stand(place)
                sockets.pop_all()
            return offer.num_blocks

    async def reside(self, layers: LayerRange, num_blocks: int, *, is_ahead: bool = False) -> int:
        """Have parameters beside the own ones, or have them no more; see `GroupDevice`."""
        async with self._changing:
            if self._standing.place is None:
                raise GroupFailedError("it is a stage of no group")
            await self._standing.stop_copying()
            if self._exchange_now is not None:
                await self._exchange_now.stop()  # its part is over, or too late: it writes to blocks that may go
            peers = await self._sources.sources() if layers != self.layers else ()
            before, after = (peers, ()) if self._peers_first else ((), peers)
            try:
                return await in_thread(
                    lambda: self._model.reside(layers, num_blocks, before, after, is_ahead=is_ahead),
                    "parameter mapping",
                )
            except Exception as error:  # whatever the memory raises: `alone` says whether it can be mended
                raise GroupFailedError(f"parameters of {layers}: {type(error).__name__}: {error}") from error
            finally:
                self._note_layers()

    @property
    def most_copied(self) -> int:
        """Blocks of one round of `copy_ahead`; see `GroupDevice`."""
        return self._kv.most_copied(self._standing.place)

    async def copy_ahead(self, next_shares: NextShares | None = None) -> bool:
        """Copy KV to where it will be, while the group serves; see `GroupDevice`."""
        return await self._standing.copy_ahead(next_shares)

    def end_copying(self) -> None:
        """Let copies end soon, and forget what was for the rest; see `GroupDevice`."""
        self._standing.end_copying()

    async def alone(self, parting: Parting | None = None) -> Led:
        """Be a whole instance; see `GroupDevice`.

        A member that parts stays in its pipeline until the others have come, so that the leader can close it in order.
        """
        async with self._changing:
            if isinstance(self._executor, ThreadExecutor) and not self._executor.is_closed:
                return Led(self._executor)
            with contextlib.ExitStack() as sockets:
                exchange = await self._standing.part(parting, sockets)
                await self._leave()
                try:
                    await in_thread(self._model.restore, "layer loading")
                finally:
                    self._note_layers()
                if exchange is not None:
                    await exchange.move(self._model.cache)
            self._executor = ThreadExecutor(await in_thread(self._model.open, "model opening"), self._loop)
            if exchange is None:
                return Led(self._executor)
            return Led(self._executor, exchange.kept, num_moved_bytes=exchange.num_moved_bytes)

    async def close(self) -> None:
        """Leave any group and give back memory; see `GroupDevice`."""
        async with self._changing:
            self._closed = True
            await self._leave()
            await self._peers.close()
            await in_thread(self._model.close, "model closing")

    async def _leave(self) -> None:
        """End what runs on the model. Cancelled, it can be called again."""
        await self._standing.leave()
        await self._sources.leave()
        if self._exchange_now is not None:
            await self._exchange_now.stop()
            self._exchange_now = None
        if self._executor is not None:
            await self._executor.close()
            self._executor = None
        if self._membership is not None:
            await self._membership.leave()
            self._membership = None

    def _stand(self, place: GroupPlace) -> None:
        self._standing.place = place
        self._sources.stand(place)

    async def _leave_with(self, kept: KeptKv, layers: LayerRange) -> KvOffer:
        """End what runs on the model, and return what goes along to a group in which it will have these layers."""
        group = "" if self._standing.place is None else self._standing.place.name
        step_s = 0.0 if self._executor is None else self._executor.recent_step_s
        await self._leave()
        return self._kv.offer_to_form(layers, group, kept, step_s)

    async def _become(
        self, at: Gathering, links: LeaderLinks | MemberLinks, offer: KvOffer
    ) -> tuple[TorchExchange, RunnerStage]:
        """Drop all but the own layers, begin to exchange KV, and return the exchange, and the layers as a stage.

        Both end with the connections, unless somebody takes these out.
        """
        place = at.place
        exchange = self._kv.to_form(place, links.kv, links.attention)
        at.sockets.callback(exchange.shut)  # before they are closed: a close wakes nobody who reads
        pages = HandOver(place, self._model, self._kv.limit_s, is_on=self._hands_over)

        def change() -> None:
            if exchange.by_pages:
                exchange.carry_out(pages.carry_out)
                return
            exchange.read(self._model.cache, self._model.host)
            self._model.keep(place.own.layers)

        def open_stage() -> RunnerStage:
            stage = RunnerStage(self._model.open(), exchange.end_writes)
            if stage.capacity.num_blocks < offer.num_blocks:
                stage.close()
                raise MemoryError(f"{stage.capacity.num_blocks} blocks fit, {offer.num_blocks} were promised")
            return stage

        try:
            said = replace(offer, card=pages.card, door=pages.door)
            decide = partial(pages.decide, by_copies=partial(self._kv.decide, place))
            await exchange.agree(said, self._model.cache.num_blocks, decide)
            await in_thread(change, "layer dropping")
            stage = await in_thread(open_stage, "model opening")
            at.sockets.callback(stage.close)
        except BaseException as error:
            exchange.close()
            if not isinstance(error, Exception):
                raise
            # whatever the memory or torch raises: `alone` says whether it can be mended
            raise GroupFailedError(f"layers {place.own.layers}: {type(error).__name__}: {error}") from error
        finally:
            pages.close()
            self._hands_over = self._hands_over and pages.is_possible
            self._note_layers()
        if not exchange.by_pages:
            self._exchange_now = exchange
            exchange.begin(self._model.cache)
            if exchange.remote is not None:
                stage.attend_elsewhere(exchange.remote)
        return exchange, stage


def _least(own: KvCapacity, members: tuple[PeerWelcome, ...], place: GroupPlace) -> KvCapacity:
    """Return what every stage has: on their hosts a block is as late as the stage with most layers."""
    sizes = {own.block_size, *(welcome.block_size for welcome in members)}
    if len(sizes) > 1:
        raise GroupFailedError(f"the stages have KV blocks of different sizes: {sorted(sizes)} tokens")
    num_blocks = min(own.num_blocks, *(welcome.num_blocks for welcome in members))
    host, num_host_blocks = own.host, min(welcome.num_host_blocks for welcome in members)
    if host is None or not num_host_blocks:
        return KvCapacity(num_blocks, own.block_size)
    layers = [len(stage.layers) for stage in place.stages]
    host = replace(host.share(max(layers), sum(layers)), num_blocks=min(host.num_blocks, num_host_blocks))
    return KvCapacity(num_blocks, own.block_size, host)
