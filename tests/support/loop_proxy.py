"""A TCP proxy on an event loop in a thread of its own, so that a test may block, and loops may come and go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
Ends = list[asyncio.StreamWriter]
"""Of one connection: to the client, and to the server once there is one."""


class LoopProxy(ABC):
    """Stands between clients and servers of this machine. A context manager; what it does is said by those below it."""

    def __init__(self) -> None:
        self.connections: dict[asyncio.Task[None], Ends] = {}
        """That are open now. Of the loop."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self.listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @abstractmethod
    async def listen(self) -> None:
        """Open all ports by `open_port`."""

    @abstractmethod
    async def pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends) -> None:
        """Pass a connection on until it ends.

        Args:
            port: of the server.
            reader: from the client.
            writer: to the client.
            ends: where the way to the server is added; closed afterwards.
        """

    async def open_port(self, host: str, port: int, server_port: int) -> int:
        """Listen at an address, for who wants to reach a server; return the port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            ends = self.connections[task] = [writer]
            try:
                await self.pass_on(server_port, reader, writer, ends)
            except asyncio.CancelledError:
                return  # the proxy closes; asyncio would log the cancellation of a task that it started
            finally:
                del self.connections[task]
                for end in ends:
                    end.close()

        self._servers.append(await asyncio.start_server(serve, host, port))
        found: int = self._servers[-1].sockets[0].getsockname()[1]
        return found

    def do(self, action: Callable[[], None]) -> None:
        """Do something on the loop; return when it is done."""

        async def run() -> None:
            action()

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def refuse(self) -> None:
        """Take no new connections from now on."""
        self.do(self._stop_listening)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()

    async def _close(self) -> None:
        self._stop_listening()
        tasks = list(self.connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pump_all(*pumps: Coroutine[Any, Any, None], until: str) -> None:
    """Run the pumps of a connection.

    Args:
        *pumps: one for each direction.
        until: `asyncio.FIRST_COMPLETED` or `ALL_COMPLETED` of them; others are ended.
    """
    tasks = {asyncio.ensure_future(pump) for pump in pumps}
    try:
        await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
