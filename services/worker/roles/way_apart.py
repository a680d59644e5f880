"""One worker's part in letting KV go before its group dissolves: the leader shares it out, everybody copies it ahead.

    prepare ──copy──► rounds beside the group's steps (`kv_shares.py`, `copy_ahead.py`) ──► commit ──► `take_shares`
       └─────────────── anything else ──► `forget`

Source: KunServe v1, section 4.2 (live KV restore).
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.worker.engine.engine import Engine
from services.worker.kv_moves.kv_shares import KvShares
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.roles.device import GroupDevice, GroupPlace
from services.worker.roles.moves import MoveFacts, MoveMeter, Moves
from shared.messages.report import MoveKind
from shared.process.log import get_logger

COPY_LIMIT_S = 3.0
"""After which no further round of KV is copied ahead; sooner where a plan has less time."""
LAST_ROUND, END_COPYING = 0.6, 0.8
"""Shares of a plan's time: after the first no further round begins, after the second what is under way ends."""
_log = get_logger()


class WayApart:
    """See the module.

    Args:
        engine: of this worker; of a leader, of its group.
        device: that copies.
        moves: tells of it.
        wake: looks at the engine again.
        now: the worker's clock, seconds.
    """

    def __init__(
        self, engine: Engine, device: GroupDevice, moves: Moves, wake: Callable[[], None], now: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._device = device
        self._moves = moves
        self._wake = wake
        self._now = now
        self._shares: KvShares | None = None
        """Of a leader whose group is about to dissolve: what was copied, and whose it will be."""

    async def copy(self, place: GroupPlace, num_blocks: int, limit_s: float, given_up: Future[bool]) -> None:
        """Let most of the group's KV be where it will go, as far as there is memory for it there.

        Args:
            place: of this worker in it.
            num_blocks: of KV that its stages have.
            limit_s: that the plan has.
            given_up: done when the plan is over.
        """
        device = self._device

        def stop(_: Future[bool]) -> None:
            device.end_copying()

        given_up.add_done_callback(stop)
        over = asyncio.get_running_loop().call_later(END_COPYING * limit_s, device.end_copying)
        try:
            if place.index:
                await device.copy_ahead()
            else:
                await self._copy_as_leader(place, num_blocks, min(COPY_LIMIT_S, LAST_ROUND * limit_s))
        finally:
            over.cancel()
            given_up.remove_done_callback(stop)

    def take_shares(self, place: GroupPlace) -> KvShares:
        """Return what was copied, and whose it will be; of a leader, once."""
        shares, self._shares = self._shares, None
        return shares or self._new_shares(place, 0, 0.0)

    def forget(self) -> None:
        """Forget what was copied, and end what is being copied. Idempotent."""
        self._device.end_copying()
        self._shares = None

    async def _copy_as_leader(self, place: GroupPlace, num_blocks: int, limit_s: float) -> None:
        shares = self._shares = self._new_shares(place, num_blocks, limit_s)
        telling = _Telling(place, self._device, shares, self._moves, self._now)
        began_s, is_whole = self._now(), False
        try:
            is_whole = await self._device.copy_ahead(telling.next_shares)
        finally:
            shares.let_go()
            self._wake()
            telling.end(is_whole=is_whole)
        num_copied, took_s = sum(shares.num_copied), round(self._now() - began_s, 4)
        if num_copied:
            _log.info("kv_copied", num_blocks=num_copied, is_whole=is_whole, took_s=took_s)

    def _new_shares(self, place: GroupPlace, num_blocks: int, limit_s: float) -> KvShares:
        return KvShares(
            self._engine,
            capacity=self._device.whole_blocks,
            ahead_blocks=[self._device.blocks_ahead(stage.layers, num_blocks) for stage in place.stages],
            most_copied=self._device.most_copied,
            limit_s=limit_s,
            now=self._now,
        )


class _Telling:
    """Shares of one copy, and how many bytes of them are there; nothing is told of a copy that has no round."""

    def __init__(
        self, place: GroupPlace, device: GroupDevice, shares: KvShares, moves: Moves, now: Callable[[], float]
    ) -> None:
        facts = device.facts
        self._block_bytes = [
            (len(facts.layer_bytes) - len(stage.layers)) * 2 * facts.block_bytes for stage in place.stages
        ]
        """By stage: of a block in the layers of the others."""
        self._facts = MoveFacts(MoveKind.KV_COPY, 0, tuple(stage.worker_id for stage in place.stages))
        self._shares = shares
        self._moves = moves
        self._now = now
        self._meter: MoveMeter | None = None

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
