"""The two ends of a link in one process, and what they hear."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.worker.transfer.hello import Expected
from services.worker.transfer.link import Arrival, LinkError, LinkParams
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation
from tests.support.link_child import CHILD, PARENT, identity
from tests.support.link_roads import Road

LIMIT_S = 20.0


class End:
    """What one end of a started link has heard."""

    def __init__(self, link: SocketLink) -> None:
        self.link = link
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.ended: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        link.start(self._take, self.ended.set_result)

    def _take(self, arrival: Arrival) -> None:
        assert threading.current_thread() is threading.main_thread(), "arrivals are handed over on the event loop"
        self.arrivals.put_nowait(arrival)
        self.link.release(arrival)

    async def next(self) -> Arrival:
        async with asyncio.timeout(LIMIT_S):
            return await self.arrivals.get()

    async def end(self) -> LinkError:
        async with asyncio.timeout(LIMIT_S):
            return await self.ended


@asynccontextmanager
async def two_links(road: Road, params: LinkParams | None = None) -> AsyncIterator[tuple[SocketLink, SocketLink]]:
    """The two ends of a link, not started; (dialler's, listener's)."""
    made: asyncio.Queue[SocketLink] = asyncio.Queue()
    listener, address = await road.listen(identity(PARENT, params), made.put_nowait)
    one = await road.dial(address, identity(CHILD, params), Expected(PARENT, Incarnation(7)))
    other = await made.get()
    try:
        yield one, other
    finally:
        await one.close()
        await other.close()
        await listener.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("link-")], "a thread is left"
