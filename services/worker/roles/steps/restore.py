"""`RestoreInstance`: a stage of a group is a whole instance again; all of its members do it at the same time.

    prepare ──copy──► rounds beside the group's steps (`kv_shares.py`, `copy_ahead.py`) ──► commit ──► sequences and KV
       └─────────────── anything else: forgotten                                                       are shared out

The leader shares out, everybody copies ahead what it can: without memory for it, or if it breaks off, all moves when
the group dissolves.

Source: KunServe v1, section 4.2 (live KV restore). Deviation: the way back, in detail.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.worker.kv_moves.kv_shares import KvShares
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.kv_moves.places import GroupPlace
from services.worker.kv_moves.transfers import TransferFacts, TransferMeter, Transfers
from services.worker.roles.device import GroupDevice, Parting
from services.worker.roles.role import Broken, InGroup, group_of
from services.worker.roles.role_keeper import CLOSED, RoleKeeper
from services.worker.roles.steps.change import Change
from services.worker.sequences.sequence import SequenceKey
from shared.layers import LayerRange
from shared.messages.plan import PreparePlan, RestoreInstance
from shared.messages.report import TransferKind
from shared.process.log import get_logger
from shared.sizes import describe_bytes

COPY_LIMIT_S = 3.0
"""After which no further round of KV is copied ahead; sooner where a plan has less time."""
LAST_ROUND, END_COPYING = 0.6, 0.8
"""Shares of a plan's time: after the first no further round begins, after the second what is under way ends."""
_log = get_logger()


class Restore(Change):
    """See the module."""

    readying = "KV was being copied ahead"

    def __init__(self, step: RestoreInstance, keeper: RoleKeeper) -> None:
        self._step = step
        self._keeper = keeper
        self._shares: KvShares | None = None
        """Of a leader: what was copied, and whose it will be."""

    def refusal(self) -> str | None:
        """See `Change`."""
        keeper = self._keeper
        reason = keeper.why_not(self._step)
        if reason is None and group_of(keeper.state) is None:
            reason = "it is a whole instance already"
        return reason or keeper.device.refusal(LayerRange(0, keeper.num_layers))

    def refusal_at_gate(self) -> str | None:
        """Its group may have ended meanwhile, but then it is whole already."""
        return None

    async def make_ready(self, limit_s: float, given_up: Future[bool]) -> bool:
        """Let most of the group's KV be where it will go, as far as there is memory for it there."""
        group, device = self._keeper.state, self._keeper.device
        if not isinstance(group, InGroup) or not device.most_copied:
            return False

        def stop(_: Future[bool]) -> None:
            """Copy no further: the plan is decided."""
            device.end_copying()

        given_up.add_done_callback(stop)
        over = asyncio.get_running_loop().call_later(END_COPYING * limit_s, device.end_copying)
        try:
            if group.place.index:
                await device.copy_ahead()
            else:
                await self._copy_as_leader(group, min(COPY_LIMIT_S, LAST_ROUND * limit_s))
        finally:
            over.cancel()
            given_up.remove_done_callback(stop)
        return True

    async def carry_out(self, asked: PreparePlan) -> int:
        """See `Change`; without the others, KV is lost."""
        keeper, state = self._keeper, self._keeper.state
        group = group_of(state)
        if group is None or (isinstance(state, Broken) and state.reason != CLOSED):
            return await keeper.stand_alone(asked.plan_id)
        leads = keeper.role.is_leader
        await keeper.leave()
        engine = keeper.machine.engine
        shares: list[list[SequenceKey]] = []
        row_of, parting = engine.registry.row_of, Parting()
        if leads:
            known = self._shares or self.new_shares(group.place, 0, 0.0)
            shares = known.final()
            kept = tuple(engine.kept([row_of[key] for key in keys]) for keys in shares)
            parting = Parting(kept, known.there)
        began_s = keeper.now()
        alone = await keeper.go_on_alone(asked.plan_id, parting)
        if shares:
            num_sequences = sum(map(len, shares))
            keeper.announce(
                "kv_parted",
                f"{describe_bytes(alone.num_moved_bytes)} of KV went between {len(shares)} workers, "
                f"where {num_sequences} requests go on after {keeper.now() - began_s:.3f} s",
            )
        for stage, keys in list(zip(group.place.stages, shares, strict=False))[1:]:
            # now, when that worker is about to serve again; some have ended meanwhile
            engine.registry.release([row_of[key] for key in keys if key in row_of], stage.worker_id)
        return alone.executor.capacity.num_blocks

    def go_back(self) -> None:
        """Forget what was copied, and end what is being copied."""
        self._keeper.device.end_copying()
        self._shares = None

    def new_shares(self, place: GroupPlace, num_blocks: int, limit_s: float) -> KvShares:
        """Return what a leader shares out, with nothing copied yet.

        Args:
            place: of this worker in its group.
            num_blocks: of KV that its stages have; 0: nothing is copied ahead.
            limit_s: after so many seconds no further round begins.
        """
        keeper, device = self._keeper, self._keeper.device
        return KvShares(
            keeper.machine.engine,
            capacity=device.whole_blocks,
            ahead_blocks=[device.blocks_ahead(stage.layers, num_blocks) for stage in place.stages],
            most_copied=device.most_copied,
            limit_s=limit_s,
            now=keeper.now,
        )

    async def _copy_as_leader(self, group: InGroup, limit_s: float) -> None:
        keeper = self._keeper
        shares = self._shares = self.new_shares(group.place, group.num_blocks, limit_s)
        telling = _Telling(group.place, keeper.device, shares, keeper.moves, keeper.now)
        began_s, is_whole = keeper.now(), False
        try:
            is_whole = await keeper.device.copy_ahead(telling.next_shares)
        finally:
            shares.let_go()
            keeper.machine.loop.wake()
            telling.end(is_whole=is_whole)
        num_copied, took_s = sum(shares.num_copied), round(keeper.now() - began_s, 4)
        if num_copied:
            _log.info("kv_copied", num_blocks=num_copied, is_whole=is_whole, took_s=took_s)


class _Telling:
    """Shares of one copy, and how many bytes of them are there; nothing is told of a copy that has no round."""

    def __init__(
        self, place: GroupPlace, device: GroupDevice, shares: KvShares, moves: Transfers, now: Callable[[], float]
    ) -> None:
        facts = device.facts
        self._block_bytes = [
            (len(facts.layer_bytes) - len(stage.layers)) * 2 * facts.block_bytes for stage in place.stages
        ]
        """By stage: of a block in the layers of the others."""
        self._facts = TransferFacts(TransferKind.KV_COPY, 0, tuple(stage.worker_id for stage in place.stages))
        self._shares = shares
        self._moves = moves
        self._now = now
        self._meter: TransferMeter | None = None

    def next_shares(self) -> Sequence[PlacedKv]:
        """See `NextShares`."""
        found, num_moved = self._shares.next_shares(), self._size(self._shares.num_copied)
        num_bytes = num_moved + self._size(self._shares.num_left)
        if found and self._meter is None:
            self._meter = self._moves.begin(replace(self._facts, num_bytes=num_bytes))
        if self._meter is not None:
            self._meter.reach(num_moved, self._now(), num_bytes)
        return found

    def end(self, *, is_whole: bool) -> None:
        """No further round comes."""
        if self._meter is not None:
            rest = "what is left moves when the group dissolves"
            self._moves.end(self._meter, rest if is_whole else f"broken off; {rest}")

    def _size(self, counts: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(counts, self._block_bytes, strict=True))
