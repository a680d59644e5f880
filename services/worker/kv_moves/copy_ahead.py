"""KV that moves while its group still serves, round by round, so that little is left to move when the group dissolves.

    leader    which blocks go where ── KvTable ──►  every stage    its layers of them ──► the stage where they will go
              and so on, until few are left: a table of nothing                          (to places of its own)
    all       the same connections carry the rest when the group dissolves

Blocks that are copied are full, so nothing changes them; the leader keeps them from being reused until every stage has
its part of the round. Every stage has memory for all layers of its share by then (`KvOffer.ahead_blocks`).

Source: KunServe v1, section 4.2 (live KV restore: requests leave the pipeline once their KV is at one instance); in
rounds as virtual machines and Llumnix (section 4.2 there) do, where the paper says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.worker.kv_moves.kv_table import KvOffer, table_to_copy
from services.worker.kv_moves.kv_wire import KvSocket
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.kv_moves.places import NextShares
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.memory.kv_cache import KVCache
from services.worker.peers.threads import in_thread


class CopyAhead:
    """One stage's part.

    Args:
        socks: connections by stage, to all others; owned until `hand_on`.
        make_round: makes a lasting exchange over them.
    """

    def __init__(self, socks: Mapping[int, KvSocket], make_round: Callable[[], TorchExchange]) -> None:
        self._socks = dict(socks)
        self._make_round = make_round
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_complete = False
        """It has come to its end in order, so the connections can carry the rest."""

    async def run(self, offer: KvOffer, source: KVCache, target: KVCache, next_shares: NextShares | None) -> bool:
        """Move KV, until the leader says that it is enough or `stop`; return whether it came to that end.

        Args:
            offer: of this stage.
            source: the blocks with which it computes.
            target: the same and those of other layers.
            next_shares: of the leader; None: this stage is told.
        """
        self._idle.clear()
        try:
            while num_moved := await self._round(offer, source, target, () if next_shares is None else next_shares()):
                pass
            self.is_complete = num_moved is not None
            return self.is_complete
        finally:
            self._idle.set()

    async def _round(self, offer: KvOffer, source: KVCache, target: KVCache, shares: Sequence[PlacedKv]) -> int | None:
        """Return how many blocks have moved; None: it broke off."""
        named = shares or (PlacedKv(),) * (len(self._socks) + 1)
        exchange = self._make_round()
        await exchange.agree(offer, source.num_blocks, partial(table_to_copy, shares=named))
        num_blocks = exchange.num_blocks
        if num_blocks:
            await in_thread(partial(exchange.read, source), "KV copy")
            await exchange.move(target)
        return num_blocks if exchange.failure is None else None

    def hand_on(self) -> dict[int, KvSocket]:
        """Return the connections of what came to its end in order; the caller owns them."""
        assert self.is_complete, "what broke off has no connections to hand on"
        socks, self._socks = self._socks, {}
        return socks

    async def stop(self) -> None:
        """End what is under way and give back the connections. Idempotent."""
        self.shut()
        await self._idle.wait()
        for sock in self._socks.values():
            sock.close()
        self._socks = {}

    def shut(self) -> None:
        """Let what is under way end soon, here and at the other stages. Idempotent."""
        self.is_complete = False
        for sock in self._socks.values():
            sock.shut()
            if self._idle.is_set():
                sock.close()
