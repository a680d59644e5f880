"""A TCP proxy on this machine that breaks each connection after so many bytes of what the server says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress

from tests.support.loop_proxy import Ends, LoopProxy, pump_all

PART_BYTES = 64 * 1024


class CuttingProxy(LoopProxy):
    """Passes connections on to a port of this machine. A context manager.

    Args:
        port: of the server.
        cuts: bytes after which the next connection is broken; None: never. When they are used up, none is broken.
        orderly: connections end as if the server had ended them (FIN), not by a reset.
    """

    def __init__(self, port: int, cuts: Iterable[int | None], *, orderly: bool) -> None:
        super().__init__()
        self.url = ""
        self.num_connections = 0
        self.num_cut = 0
        self.num_bytes = 0
        """Of what the server said on connections with a limit."""
        self._port = port
        self._cuts: Iterator[int | None] = iter(cuts)
        self._orderly = orderly

    async def listen(self) -> None:
        """See `LoopProxy`."""
        self.url = f"http://127.0.0.1:{await self.open_port('127.0.0.1', 0, self._port)}"

    async def pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends) -> None:
        """See `LoopProxy`."""
        self.num_connections += 1
        limit = next(self._cuts, None)
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        ends.append(to_writer)
        pumps = self._pump(reader, to_writer, None), self._pump(to_reader, writer, limit)
        await pump_all(*pumps, until=asyncio.FIRST_COMPLETED)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
        """Pass bytes on until an end is gone, or as many have passed as may."""
        with suppress(OSError):
            while left is None or left > 0:
                data = await reader.read(PART_BYTES if left is None else left)
                if not data:
                    return
                if left is not None:
                    left -= len(data)
                    self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
            self.num_cut += 1
            if not self._orderly:
                writer.transport.abort()


@asynccontextmanager
async def cutting(url: str, cuts: Iterable[int | None], *, orderly: bool = False) -> AsyncIterator[CuttingProxy]:
    """A proxy in front of the server at this URL."""
    with CuttingProxy(int(url.rpartition(":")[2]), cuts, orderly=orderly) as proxy:
        yield proxy
