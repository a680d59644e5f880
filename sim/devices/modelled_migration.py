"""How the KV of a request comes from one modelled worker to another: over the links of the modelled network.

Each worker sends one thing at a time, and receives one, at its link's rate. What is said runs in the process of who
hears it, so that one that stands still does not answer. A worker that dies, and a cut, end connections at both ends.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.migration.departures import Departure, Departures
from services.worker.migration.kv_link import SILENCE_S
from services.worker.migration.kv_messages import FindKv, GetKv, HasLeft, KvListed, LetGo, ListKv, NotHere, pack_names
from services.worker.modelled.shadow_kv import ShadowKv
from services.worker.peers.frames import PeerLostError
from services.worker.peers.greeting import PeerRefusedError
from shared.ids import WorkerId
from sim.devices.channel import ModelledLink

T = TypeVar("T")


class MigrationPaths:
    """Which workers there are, and which cannot reach each other. `ModelledNetwork` has one.

    Args:
        link: of each worker.
        near_link: of each worker, to others on its host.
    """

    def __init__(self, link: ModelledLink, near_link: ModelledLink) -> None:
        self.link = link
        self.near_link = near_link
        self._ports: dict[WorkerId, ModelledKvNetwork] = {}
        self._cut: set[frozenset[WorkerId]] = set()

    def enter(self, port: ModelledKvNetwork) -> None:
        """Let a worker be found."""
        self._ports[port.worker_id] = port

    def find(self, own: WorkerId, other: WorkerId) -> ModelledKvNetwork | None:
        """Return the other worker's end; None: there is no way to it."""
        return None if frozenset((own, other)) in self._cut else self._ports.get(other)

    def lose(self, worker_id: WorkerId) -> None:
        """A worker's process is gone."""
        port = self._ports.pop(worker_id, None)
        if port is not None:
            port.is_gone = True
            port.drop(f"{worker_id} is gone")

    def cut(self, one: WorkerId, other: WorkerId) -> None:
        """Cut two workers off from each other until `heal`."""
        self._cut.add(frozenset((one, other)))
        for own, peer in ((one, other), (other, one)):
            if own in self._ports:
                self._ports[own].drop("the connection is cut", peer)

    def heal(self, one: WorkerId, other: WorkerId) -> None:
        """Let them connect again."""
        self._cut.discard(frozenset((one, other)))


class ModelledKvNetwork:
    """One worker's end; see `KvNetwork`.

    Args:
        worker_id: of this worker.
        paths: to the others.
        kv: returns the memory of the whole model, as it is now.
        block_kv_bytes: of a block.
        host: that it is on; None: there is nobody else.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        paths: MigrationPaths,
        kv: Callable[[], ShadowKv],
        block_kv_bytes: int,
        host: str | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.host = host
        self.kv = kv
        self.departures: Departures | None = None
        self.is_gone = False
        """Its process is."""
        self.sends_at_s = self.takes_at_s = 0.0
        """When its link is free, each way."""
        self._paths = paths
        self._block_kv_bytes = block_kv_bytes
        self._context = copy_context()
        self._links: set[ModelledKvLink] = set()
        """That begin or end here."""

    @property
    def address(self) -> str:
        """All are in one process, and are found by name."""
        return self.worker_id

    def serve(self, departures: Departures) -> None:
        """See `KvNetwork`."""
        self.departures = departures
        self._context = copy_context()
        self._paths.enter(self)

    async def connect(self, worker_id: WorkerId, address: str, silence_s: float = SILENCE_S) -> ModelledKvLink:
        """See `KvNetwork`."""
        del address
        await asyncio.sleep(self._paths.link.latency_s)
        other = self._paths.find(self.worker_id, worker_id)
        if other is None or other.departures is None:
            raise PeerLostError(f"{worker_id} cannot be reached")
        link = ModelledKvLink(self, other, self._paths, self._block_kv_bytes, silence_s)
        await link.open()
        return link

    async def disconnect(self) -> None:
        """See `KvNetwork`."""
        self.drop("it takes part in no migration any more")

    async def close(self) -> None:
        """See `KvNetwork`."""
        await self.disconnect()

    def drop(self, reason: str, peer: WorkerId | None = None) -> None:
        """End the connections with a worker; None: with all."""
        for link in list(self._links):
            if peer in (None, link.peer_of(self)):
                link.lose(reason)

    def hold(self, link: ModelledKvLink) -> None:
        """A connection begins or ends here."""
        self._links.add(link)

    def let_go(self, link: ModelledKvLink) -> None:
        """It is over."""
        self._links.discard(link)

    def run(self, work: Callable[[], Awaitable[T]], into: Future[T]) -> None:
        """Do something in this worker's process, and settle a future with what comes of it."""

        async def do() -> None:
            try:
                result = await work()
            except Exception as error:  # handed to who waits, whatever it is
                if not into.done():
                    into.set_exception(error)
                return
            if not into.done():
                into.set_result(result)

        asyncio.get_running_loop().create_task(do(), name="kv of another", context=self._context.copy())


class ModelledKvLink:
    """A connection; see `KvLink`. Made by the target."""

    def __init__(
        self,
        target: ModelledKvNetwork,
        source: ModelledKvNetwork,
        paths: MigrationPaths,
        block_kv_bytes: int,
        silence_s: float,
    ) -> None:
        self._target = target
        self._source = source
        self._paths = paths
        self._block_kv_bytes = block_kv_bytes
        self._silence_s = silence_s
        self._departure: Departure | None = None
        self._lost: Future[str] = asyncio.get_running_loop().create_future()
        """Why the connection is over, once it is."""

    def peer_of(self, end: ModelledKvNetwork) -> WorkerId:
        """Return who is at the other end."""
        return self._source.worker_id if end is self._target else self._target.worker_id

    async def open(self) -> None:
        """Greet; raises `PeerRefusedError`, `PeerLostError`."""
        for end in (self._target, self._source):
            end.hold(self)
        try:
            self._departure = await self._at_source(self._welcome)
        except PeerLostError:
            await self.close()
            raise
        if self._departure is None:
            await self.close()
            raise PeerRefusedError("too many are fetched there")

    async def _welcome(self) -> Departure | None:
        assert self._source.departures is not None, "it serves"
        return self._source.departures.open(self._target.worker_id, lambda: self.lose("the lease is over"))

    async def ask(self, message: ListKv | FindKv | LetGo) -> KvListed | HasLeft | NotHere:
        """See `KvLink`."""
        departure = self._departure
        assert departure is not None, "it is open"
        return await self._at_source(lambda: departure.answer(message))

    async def get(self, coming: KeptKv) -> int:
        """See `KvLink`."""

        async def ids() -> I32:
            assert self._departure is not None, "it is open"
            return self._departure.ids_of(GetKv(names=pack_names(coming.names)))

        found, num_bytes = await self._at_source(ids), len(coming) * self._block_kv_bytes
        loop, source, target = asyncio.get_running_loop(), self._source, self._target
        is_near = source.host is not None and source.host == target.host
        wire = self._paths.near_link if is_near else self._paths.link
        ends_s = max(loop.time(), source.sends_at_s, target.takes_at_s) + num_bytes / wire.bytes_per_s
        source.sends_at_s = target.takes_at_s = ends_s
        while (wait_s := ends_s - loop.time()) > 0:
            await self._unless_lost(asyncio.sleep(wait_s))
        if self._lost.done():
            raise PeerLostError(self._lost.result())
        target.kv().take_from(source.kv(), found, coming.ids)
        return num_bytes

    async def close(self) -> None:
        """See `KvLink`."""
        self.lose("closed")

    def lose(self, reason: str) -> None:
        """End the connection at both ends. Idempotent."""
        if self._lost.done():
            return
        self._lost.set_result(reason)
        for end in (self._target, self._source):
            end.let_go(self)
        if self._departure is not None and not self._source.is_gone:
            self._source.run(partial(_close, self._departure), asyncio.get_running_loop().create_future())

    async def _at_source(self, work: Callable[[], Awaitable[T]]) -> T:
        """Have something done at the source; raises `PeerLostError` if the connection ends first."""
        await asyncio.sleep(self._paths.link.latency_s)
        if self._lost.done():
            raise PeerLostError(self._lost.result())
        result: Future[T] = asyncio.get_running_loop().create_future()
        self._source.run(work, result)
        try:
            async with asyncio.timeout(self._silence_s):
                answer = await self._unless_lost(result)
        except TimeoutError as error:
            raise PeerLostError(f"{self._source.worker_id} does not answer within {self._silence_s:g} s") from error
        await asyncio.sleep(self._paths.link.latency_s)
        return answer

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        working = asyncio.ensure_future(work)
        both: list[Future[T] | Future[str]] = [working, self._lost]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise PeerLostError(self._lost.result())
            return working.result()
        finally:
            working.cancel()


async def _close(departure: Departure) -> None:
    departure.close()
