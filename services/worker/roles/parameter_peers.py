"""The stages of a group as each other's sources of parameters: who is let in, and whom to ask; on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.gather import Gathering
from services.worker.kv_moves.places import GroupFailedError, GroupPlace
from services.worker.kv_moves.seats import check_place
from services.worker.peers.connect import Peers
from services.worker.peers.greeting import PeerHello, PeerWelcome, Purpose
from services.worker.peers.link_priority import LinkPriority
from services.worker.peers.threads import in_thread
from services.worker.roles.parameter_lending import ParameterLender, PeerSource
from shared.process.log import get_logger

_log = get_logger()


class ParameterPeers:
    """Of one worker.

    Args:
        model: whose parameters are lent and loaded.
        peers: this worker among the others.
        priority: of this worker's connections.
        limit_s: in which another stage has to answer.
    """

    def __init__(self, model: ElasticModel, peers: Peers, priority: LinkPriority, limit_s: float) -> None:
        self._model = model
        self._peers = peers
        self._priority = priority
        self._limit_s = limit_s
        self._place: GroupPlace | None = None
        self._lender: ParameterLender | None = None
        """Of the group that stands."""

    def stand(self, place: GroupPlace) -> None:
        """Lend the parameters of the layers that are held to the other stages of a group, until `leave`."""
        self._place = place
        self._lender = ParameterLender(self._model.lendable, self._priority)
        self._peers.expect((Purpose.PARAMETERS,), place.plan_id, self._lend)

    async def leave(self) -> None:
        """Lend nothing any more, and wait until nobody reads the parameters. Idempotent; can be called again."""
        self._peers.forget(self._lend)
        self._place = None
        if self._lender is not None:
            await in_thread(self._lender.close, "parameter lending")
            self._lender = None

    async def sources(self) -> tuple[PeerSource, ...]:
        """Return the other stages of the group that answer now, in their order."""
        place = self._place
        if place is None:
            return ()
        others = [index for index in range(len(place.stages)) if index != place.index]
        found = await asyncio.gather(*(self._source(place, index) for index in others))
        return tuple(source for source in found if source is not None)

    async def _source(self, place: GroupPlace, index: int) -> PeerSource | None:
        stage = place.stages[index]
        with contextlib.ExitStack() as sockets:
            try:
                async with asyncio.timeout(self._limit_s):
                    at = Gathering(self._peers, place, sockets, self._limit_s)
                    sock, _ = await at.dial(index, Purpose.PARAMETERS)
            except (GroupFailedError, TimeoutError) as error:
                _log.warning("parameter_source_lost", source=str(stage.worker_id), reason=str(error) or "silent")
                return None
            sockets.pop_all()
        return PeerSource(str(stage.worker_id), sock, stage.layers, self._model.outer_names(stage.layers))

    def _lend(self, said: PeerHello, sock: socket.socket) -> None:
        """Welcome another stage of the group that stands."""
        assert self._place is not None, "nobody is expected"
        assert self._lender is not None, "nobody is expected"
        check_place(said, self._place)
        num_blocks, block_size = self._model.cache.num_blocks, self._model.info.capacity.block_size
        self._lender.welcome(sock, PeerWelcome(num_blocks=num_blocks, block_size=block_size))
