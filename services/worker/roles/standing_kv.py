"""KV that goes between the stages of a group that stands: ahead while it serves, and the rest when it dissolves."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.copy_ahead import CopyAhead
from services.worker.kv_moves.gather import Gathering, gather_for_kv
from services.worker.kv_moves.kv_exchanges import KvExchanges
from services.worker.kv_moves.kv_table import table_to_part
from services.worker.kv_moves.kv_wire import KvSocket
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, NextShares
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.peers.connect import Peers
from services.worker.peers.greeting import PeerWelcome, Purpose
from services.worker.peers.threads import in_thread
from services.worker.roles.device import Parting
from shared.process.log import get_logger

_log = get_logger()


class StandingKv:
    """Of one worker.

    Args:
        model: whose KV moves; not owned.
        peers: this worker among the others.
        kv: how it changes hands.
        limit_s: in which the other stages have to be found.
    """

    def __init__(self, model: ElasticModel, peers: Peers, kv: KvExchanges, limit_s: float) -> None:
        self._model = model
        self._peers = peers
        self._kv = kv
        self._limit_s = limit_s
        self.place: GroupPlace | None = None
        """Of this worker in the group that stands; None: in none."""
        self._copying: CopyAhead | None = None
        """KV that moves before the group dissolves, and the connections for the rest."""

    async def leave(self) -> None:
        """Be in no group any more. Idempotent; can be called again."""
        self.place = None
        await self.stop_copying()

    async def copy_ahead(self, next_shares: NextShares | None = None) -> bool:
        """Copy KV to where it will be, while the group serves; see `GroupDevice`."""
        await self.stop_copying()
        place, ahead = self.place, self._model.ahead()
        if place is None or ahead is None:
            return False
        with contextlib.ExitStack() as sockets:
            lasting = await self._meet(place, Purpose.AHEAD, sockets)
            if lasting is None or self.place is not place or self._copying is not None:
                return False
            sockets.pop_all()
        copying = CopyAhead(lasting, lambda: self._kv.to_part(place, lasting, is_lasting=True))
        self._copying = copying
        return await copying.run(self._kv.offer_to_part(place), self._model.cache, ahead, next_shares)

    def end_copying(self) -> None:
        """Let copies end soon, and forget what was for the rest; see `GroupDevice`."""
        if self._copying is not None:
            self._copying.shut()

    async def stop_copying(self) -> None:
        """End copies, and give back the connections. Idempotent."""
        copying, self._copying = self._copying, None
        if copying is not None:
            await copying.stop()

    async def part(self, parting: Parting | None, sockets: contextlib.ExitStack) -> TorchExchange | None:
        """Meet the other stages of the group that stands, and keep aside what goes to them; None: no KV moves."""
        place = self.place
        if parting is None or place is None:
            return None
        shares = parting.shares
        if shares and len(shares) != len(place.stages):
            raise ValueError(f"{len(shares)} shares for {len(place.stages)} stages")
        socks: dict[int, KvSocket] | None = None
        if self._copying is not None and self._copying.is_complete:
            socks, self._copying = self._copying.hand_on(), None
        await self.stop_copying()
        if socks is None and (socks := await self._meet(place, Purpose.PARTING, sockets)) is None:
            return None
        exchange = self._kv.to_part(place, socks)
        sockets.callback(exchange.close)
        decide = partial(table_to_part, shares=shares, there=parting.there)
        await exchange.agree(self._kv.offer_to_part(place), self._model.cache.num_blocks, decide)
        await in_thread(lambda: exchange.read(self._model.cache, self._model.host), "KV exchange")
        return exchange

    async def _meet(
        self, place: GroupPlace, purpose: Purpose, sockets: contextlib.ExitStack
    ) -> dict[int, KvSocket] | None:
        """Return connections to the other stages of a group that stands, by stage; None: not all have come."""
        capacity = self._model.info.capacity
        welcome = PeerWelcome(num_blocks=capacity.num_blocks, block_size=capacity.block_size)
        at = Gathering(self._peers, place, sockets, self._limit_s)
        try:
            socks: dict[int, socket.socket] = await gather_for_kv(at, purpose, welcome)
        except GroupFailedError as error:
            _log.warning("kv_not_exchanged", stage=place.index, reason=str(error))
            return None
        return {peer: KvSocket(sock) for peer, sock in socks.items()}
