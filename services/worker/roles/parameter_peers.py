"""The stages of a group as each other's sources of parameters: who is let in, and whom to ask; on the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from services.worker.executor.elastic_model import ElasticModel
from services.worker.peers.connect import StageListener, dial
from services.worker.peers.greeting import StageRole, StageWelcome
from services.worker.peers.threads import in_thread
from services.worker.pipeline.link_turns import LinkTurns
from services.worker.roles.device import GroupFailedError, GroupPlace
from services.worker.roles.parameter_lending import ParameterLender, PeerSource
from shared.process.log import get_logger

_log = get_logger()


class ParameterPeers:
    """Of one worker.

    Args:
        model: whose parameters are lent and loaded.
        listener: where the others connect.
        turns: of this worker's connections.
        limit_s: in which another stage has to answer.
    """

    def __init__(self, model: ElasticModel, listener: StageListener, turns: LinkTurns, limit_s: float) -> None:
        self._model = model
        self._listener = listener
        self._turns = turns
        self._limit_s = limit_s
        self._place: GroupPlace | None = None
        self._lender: ParameterLender | None = None
        """Of the group that stands."""

    def stand(self, place: GroupPlace) -> None:
        """Lend the parameters of the layers that are held to the other stages of a group, until `leave`."""
        self._place = place
        lender = self._lender = ParameterLender(self._model.lendable, self._turns)
        welcome = StageWelcome(num_blocks=self._model.cache.num_blocks, block_size=self._model.info.capacity.block_size)
        self._listener.lend(place, lambda sock: lender.welcome(sock, welcome))

    async def leave(self) -> None:
        """Lend nothing any more, and wait until nobody reads the parameters. Idempotent; can be called again."""
        if self._place is not None:
            self._listener.lend_no_more(self._place)
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
                    sock, _ = await dial(place, index, StageRole.PARAMETERS, sockets)
            except (GroupFailedError, TimeoutError) as error:
                _log.warning("parameter_source_lost", source=str(stage.worker_id), reason=str(error) or "silent")
                return None
            sockets.pop_all()
        return PeerSource(str(stage.worker_id), sock, stage.layers, self._model.outer_names(stage.layers))
