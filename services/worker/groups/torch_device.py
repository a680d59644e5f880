"""The device of a live worker whose layers can be dropped: a model in pages, and sockets to the other stages.

            lead: drop, dial all members              executor: PipelineExecutor over threads and sockets
    alone ─────────────────────────────────► leader
      │ ▲   join: drop, dial the next stage,          stage server: threads compute what comes over sockets
      │ └──────── be dialled by leader and ► member
      │           by the stage before                 in all states one model in one memory (`elastic_model.py`);
      └─ alone: leave, load, open ◄─────── anything   what runs on it is closed before the next change

Source: KunServe v2, sections 3 and 4.1 (instances drop layers and form a group); how stages find each other is left
open there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from services.worker.engine.types import NOTHING_KEPT, KeptKv, KvCapacity
from services.worker.executor.channel import SocketChannel
from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.pipeline import PipelineExecutor
from services.worker.executor.runner_stage import RunnerStage
from services.worker.executor.thread import ThreadExecutor
from services.worker.executor.thread_stage import ThreadStages
from services.worker.groups.connect import Seats, StageListener, dial, together
from services.worker.groups.device import GroupFailedError, GroupPlace, Led, Parting
from services.worker.groups.greeting import StageRole, StageWelcome
from services.worker.groups.membership import Membership
from services.worker.groups.sockets import say
from services.worker.groups.threads import in_thread
from shared.layers import LayerRange, check_tiling
from shared.messages.report import ElasticFacts

GROUP_LIMIT_S = 5.0
"""Longest time in which the stages of a group have to find each other."""


class TorchGroupDevice:
    """A `GroupDevice` over a loaded model. Lives on the running event loop; `alone` gives the first executor.

    Args:
        model: owned; no runner of it is open.
        listener: where other stages connect; owned.
        limit_s: in which the stages of a group have to find each other.
        token_s: seconds that computing the KV of one token again takes, as reported.
    """

    def __init__(
        self, model: ElasticModel, listener: StageListener, *, limit_s: float = GROUP_LIMIT_S, token_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._listener = listener
        self._limit_s = limit_s
        self._changing = asyncio.Lock()
        self._executor: ThreadExecutor | PipelineExecutor | None = None
        self._membership: Membership | None = None
        self._layers = model.layers
        self._closed = False
        facts = model.facts
        self._facts = ElasticFacts(
            layer_bytes=facts.layer_bytes,
            outer_bytes=facts.outer_bytes,
            first_stage_end=facts.first_stage_end,
            last_stage_begin=facts.last_stage_begin,
            block_bytes=facts.block_bytes,
            page_bytes=facts.page_bytes,
            num_pages=facts.num_pages,
            max_blocks=facts.max_blocks,
            token_s=token_s,
            has_host_copy=True,
        )

    @property
    def layers(self) -> LayerRange:
        """Held now; while they change, those of before."""
        return self._layers

    @property
    def facts(self) -> ElasticFacts:
        """Sizes of its memory."""
        return self._facts

    @property
    def address(self) -> str:
        """Where other stages connect."""
        return self._listener.address

    def refusal(self, layers: LayerRange) -> str | None:
        """Return why this device cannot come to hold exactly these layers; see `GroupDevice`."""
        if self._closed:
            return "the device is closed"
        try:
            num_blocks = self._model.blocks_with(layers)
        except ValueError as error:
            return str(error)
        info = self._model.info
        if num_blocks * info.capacity.block_size < info.max_model_len:
            return f"with layers {layers} the memory holds {num_blocks} KV blocks, too few for the longest request"
        return None

    async def lead(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv = NOTHING_KEPT) -> Led:
        """Become the first stage of a group; see `GroupDevice`. KV does not go along: it is computed again."""
        del kept
        async with self._changing:
            if place.index:
                raise GroupFailedError(f"stage {place.index} cannot lead")
            stage = await self._become(place)
            try:
                self._executor = await self._lead(place, stage, on_end)
            except BaseException:
                stage.close()
                raise
            return Led(self._executor)

    async def join(self, place: GroupPlace, on_end: Callable[[str | None], None], kept: KeptKv = NOTHING_KEPT) -> int:
        """Become another stage of a group; see `GroupDevice`. KV does not go along, as for `lead`.

        It returns when this stage has its own connections. If another one lacks some, the leader gives up, and `on_end`
        is called.
        """
        del kept
        async with self._changing:
            if not place.index:
                raise GroupFailedError("the first stage leads, it does not join")
            stage = await self._become(place)
            seats = self._listener.expect(place)
            try:
                self._membership = await self._join(place, stage, seats, on_end)
            except BaseException:
                seats.close()
                stage.close()
                raise
            finally:
                self._listener.forget(seats)
            return stage.capacity.num_blocks

    @property
    def whole_blocks(self) -> int:
        """KV blocks beside the whole model."""
        return self._model.info.capacity.num_blocks

    async def alone(self, parting: Parting | None = None) -> Led:
        """Be a whole instance; see `GroupDevice`. KV does not go along, as for `lead`."""
        del parting
        async with self._changing:
            if isinstance(self._executor, ThreadExecutor) and not self._executor.is_closed:
                return Led(self._executor)
            await self._leave()
            try:
                await in_thread(self._model.restore, "layer loading")
            finally:
                self._layers = self._model.layers
            self._executor = ThreadExecutor(await in_thread(self._model.open, "model opening"), self._loop)
            return Led(self._executor)

    async def close(self) -> None:
        """Leave any group and give back memory; see `GroupDevice`."""
        async with self._changing:
            self._closed = True
            await self._leave()
            await self._listener.close()
            await in_thread(self._model.close, "model closing")

    async def _leave(self) -> None:
        """End what runs on the model. Cancelled, it can be called again."""
        if self._executor is not None:
            await self._executor.close()
            self._executor = None
        if self._membership is not None:
            await self._membership.leave()
            self._membership = None

    async def _become(self, place: GroupPlace) -> RunnerStage:
        """Drop all but the own layers, and return them as a stage."""
        self._check(place)
        await self._leave()

        def change() -> RunnerStage:
            self._model.keep(place.own.layers)
            return RunnerStage(self._model.open())

        try:
            return await in_thread(change, "layer dropping")
        except Exception as error:  # whatever the memory or torch raises: `alone` says whether it can be mended
            raise GroupFailedError(f"layers {place.own.layers}: {type(error).__name__}: {error}") from error
        finally:
            self._layers = self._model.layers

    def _check(self, place: GroupPlace) -> None:
        try:
            check_tiling([stage.layers for stage in place.stages], self._model.info.num_layers)
        except ValueError as error:
            raise GroupFailedError(str(error)) from None
        if len(place.stages) < 2:
            raise GroupFailedError("a group of one stage is no group")
        reason = self.refusal(place.own.layers)
        if reason is not None:
            raise GroupFailedError(reason)

    async def _lead(
        self, place: GroupPlace, stage: RunnerStage, on_end: Callable[[str | None], None]
    ) -> PipelineExecutor:
        with contextlib.ExitStack() as sockets:
            calls = {
                str(place.stages[i].worker_id): dial(place, i, StageRole.LEADER, sockets)
                for i in range(1, len(place.stages))
            }
            to_next = f"{place.stages[1].worker_id} as the next stage"
            calls[to_next] = dial(place, 1, StageRole.PREVIOUS, sockets)
            *members, behind = await together(calls, self._limit_s)
            capacity = _least(stage.capacity, [welcome for _, welcome in members])
            channels = [SocketChannel(sock) for sock, _ in members]
            stages = ThreadStages(stage, SocketChannel(behind[0]), channels, capacity, self._loop)
            sockets.pop_all()
        return PipelineExecutor(stages, self._loop.time, on_end)

    async def _join(
        self, place: GroupPlace, stage: RunnerStage, seats: Seats, on_end: Callable[[str | None], None]
    ) -> Membership:
        capacity = stage.capacity
        welcome = StageWelcome(num_blocks=capacity.num_blocks, block_size=capacity.block_size)
        with contextlib.ExitStack() as sockets:

            async def be_dialled_by_previous() -> None:
                await say(await seats.previous, welcome)

            async def be_dialled_by_leader() -> None:
                await seats.leader

            async def dial_next() -> None:
                sock, _ = await dial(place, place.index + 1, StageRole.PREVIOUS, sockets)
                behind.append(sock)

            behind: list[socket.socket] = []
            parts = {
                f"the leader, {place.stages[0].worker_id}": be_dialled_by_leader(),
                f"{place.stages[place.index - 1].worker_id} as the stage before": be_dialled_by_previous(),
            }
            if place.index + 1 < len(place.stages):
                parts[f"{place.stages[place.index + 1].worker_id} as the next stage"] = dial_next()
            await together(parts, self._limit_s)
            leader, previous = seats.leader.result(), seats.previous.result()
            try:
                await say(leader, welcome)
            except OSError as error:
                raise GroupFailedError(f"the leader, {place.stages[0].worker_id}, is gone: {error}") from None
            membership = Membership(stage, leader, previous, behind[0] if behind else None, on_end)
            sockets.pop_all()
        return membership


def _least(own: KvCapacity, members: list[StageWelcome]) -> KvCapacity:
    """Return what every stage has."""
    sizes = {own.block_size, *(welcome.block_size for welcome in members)}
    if len(sizes) > 1:
        raise GroupFailedError(f"the stages have KV blocks of different sizes: {sorted(sizes)} tokens")
    return KvCapacity(min(own.num_blocks, *(welcome.num_blocks for welcome in members)), own.block_size)
