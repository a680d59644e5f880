"""A TCP proxy on this machine that breaks each connection after so many bytes of what the server says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager


class CuttingProxy:
    """Passes connections on to a port of this machine.

    Args:
        port: of the server.
        cuts: bytes after which the next connection is broken; None: never. When they are used up, none is broken.
        orderly: connections end as if the server had ended them (FIN), not by a reset.
    """

    def __init__(self, port: int, cuts: Iterable[int | None] = (), *, orderly: bool = False) -> None:
        self.url = ""
        self.num_connections = 0
        self.num_cut = 0
        self.num_bytes = 0
        """Of what the server said on connections with a limit."""
        self._port = port
        self._cuts: Iterator[int | None] = iter(cuts)
        self._orderly = orderly
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Refuse connections from now on."""
        assert self._server is not None
        self._server.close()

    async def close(self) -> None:
        """Break every connection."""
        await self.stop()
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving[task] = None
        task.add_done_callback(lambda done: self._serving.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        limit = next(self._cuts, None)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        up = asyncio.create_task(self._pass_on(reader, far_writer, None))
        try:
            if await self._pass_on(far_reader, writer, limit):
                self.num_cut += 1
                if not self._orderly:
                    writer.transport.abort()
        finally:
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)
            for each in (writer, far_writer):
                each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> bool:
        """Return whether the limit was reached; else at the end, or when the other side is gone."""
        left = limit
        try:
            while left is None or left > 0:
                data = await reader.read(65536 if left is None else left)
                if not data:
                    return False
                if left is not None:
                    left -= len(data)
                    self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            return False
        return True


@asynccontextmanager
async def cutting(url: str, cuts: Iterable[int | None] = (), *, orderly: bool = False) -> AsyncIterator[CuttingProxy]:
    """A proxy in front of the server at this URL."""
    proxy = CuttingProxy(int(url.rpartition(":")[2]), cuts, orderly=orderly)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
