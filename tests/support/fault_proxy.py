"""A TCP proxy that misbehaves on order: it delays, throttles, withholds one direction or both, or cuts.

It runs on an event loop in a thread of its own, so that a test may block, and serves several tests with loops of their
own. What is withheld is kept and delivered when the proxy heals, as a network that comes back delivers what the kernel
sends again; an end of a connection is withheld like its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 16 * 1024
MAX_CHUNKS = 4096
"""Chunks of one direction that wait; then the sender meets a full window, as behind a slow link."""


@dataclass
class Direction:
    """How one direction behaves now."""

    open: asyncio.Event
    """Bytes pass while it is set."""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0 = as fast as it goes."""


class FaultProxy:
    """Stands between clients and one port of 127.0.0.1. A context manager.

    Args:
        target_port: where the real server listens; it may be down.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._up = Direction(asyncio.Event())
        self._down = Direction(asyncio.Event())
        self._refusing = False
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        self.heal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    def withhold(self, *, up: bool = True, down: bool = True) -> None:
        """Let no byte pass towards the server (`up`) or from it (`down`); connections stay open, new ones too."""

        def apply() -> None:
            for direction, is_held in ((self._up, up), (self._down, down)):
                if is_held:
                    direction.open.clear()

        self._do(apply)

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Delay every byte in both directions, and limit what comes from the server."""

        def apply() -> None:
            self._up.delay_s = self._down.delay_s = delay_s
            self._down.bytes_per_s = bytes_per_s

        self._do(apply)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with `refuse` new ones are closed at once until the proxy heals."""

        def apply() -> None:
            self._refusing = refuse
            for writers in self._connections.values():
                for writer in writers:
                    _reset(writer)

        self._do(apply)

    def heal(self) -> None:
        """Behave from now on; what was withheld is delivered."""

        def apply() -> None:
            self._refusing = False
            for direction in (self._up, self._down):
                direction.delay_s = direction.bytes_per_s = 0.0
                direction.open.set()

        self._do(apply)

    def _do(self, action: Callable[[], None]) -> None:
        async def run() -> None:
            action()

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = [writer]
        try:
            await self._join(reader, writer, self._connections[task])
        except asyncio.CancelledError:
            return  # the proxy closes; asyncio would log the cancellation of a task that it started
        finally:
            for end in self._connections.pop(task):
                end.close()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        try:
            to_reader, to_writer = await _connect(self._target_port)
        except OSError:
            _reset(writer)
            return
        writers.append(to_writer)
        # either end that is gone ends both: neither the broker nor HTTP leaves a connection half closed for long
        pumps = {
            asyncio.ensure_future(_pump(reader, to_writer, self._up)),
            asyncio.ensure_future(_pump(to_reader, writer, self._down)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with a small receive window, so that a server notices soon that nobody reads."""
    raw = socket.socket()
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    except BaseException:
        raw.close()
        raise
    return await asyncio.open_connection(sock=raw, limit=CHUNK_BYTES)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
    """Pass bytes on in order, each at its time, until an end is gone."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)

    async def read() -> None:
        data = b"-"
        while data:
            try:
                if direction.bytes_per_s:
                    await queue.join()  # a slow link takes nothing on store: the sender meets a full window
                data = await reader.read(CHUNK_BYTES)
            except ConnectionError:
                data = b""
            await queue.put((loop.time() + direction.delay_s, data))

    reading = asyncio.ensure_future(read())
    try:
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            await direction.open.wait()
            if not data:
                return
            if direction.bytes_per_s:
                await asyncio.sleep(len(data) / direction.bytes_per_s)
            writer.write(data)
            await writer.drain()
            queue.task_done()
    except ConnectionError:
        return
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
