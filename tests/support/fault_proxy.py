"""A TCP proxy that misbehaves on order: it delays, throttles, withholds one direction or both, or cuts.

It runs on an event loop in a thread of its own, so that a test may block, and serves several tests with loops of their
own. What is withheld is kept and delivered when the proxy heals, as a network that comes back delivers what the kernel
sends again; an end of a connection is withheld like its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from tests.support.loop_proxy import Ends, LoopProxy, pump_all, reset

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


class FaultProxy(LoopProxy):
    """Stands between clients and one port of 127.0.0.1. A context manager.

    Args:
        target_port: where the real server listens; it may be down.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self._target_port = target_port
        self._up = Direction(asyncio.Event())
        self._down = Direction(asyncio.Event())
        self._refusing = False
        self.port = 0

    def withhold(self, *, up: bool = True, down: bool = True) -> None:
        """Let no byte pass towards the server (`up`) or from it (`down`); connections stay open, new ones too."""

        def apply() -> None:
            for direction, is_held in ((self._up, up), (self._down, down)):
                if is_held:
                    direction.open.clear()

        self.do(apply)

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Delay every byte in both directions, and limit what comes from the server."""

        def apply() -> None:
            self._up.delay_s = self._down.delay_s = delay_s
            self._down.bytes_per_s = bytes_per_s

        self.do(apply)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with `refuse` new ones are closed at once until the proxy heals."""

        def apply() -> None:
            self._refusing = refuse
            for ends in self.connections.values():
                for end in ends:
                    reset(end)

        self.do(apply)

    def heal(self) -> None:
        """Behave from now on; what was withheld is delivered."""
        self.do(self._behave)

    async def listen(self) -> None:
        """See `LoopProxy`."""
        self.port = await self.open_port("127.0.0.1", 0, self._target_port)
        self._behave()

    async def pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends) -> None:
        """See `LoopProxy`."""
        if self._refusing:
            reset(writer)
            return
        try:
            to_reader, to_writer = await _connect(port)
        except OSError:
            reset(writer)
            return
        ends.append(to_writer)
        # either end that is gone ends both: neither the broker nor HTTP leaves a connection half closed for long
        pumps = _pump(reader, to_writer, self._up), _pump(to_reader, writer, self._down)
        await pump_all(*pumps, until=asyncio.FIRST_COMPLETED)

    def _behave(self) -> None:
        self._refusing = False
        for direction in (self._up, self._down):
            direction.delay_s = direction.bytes_per_s = 0.0
            direction.open.set()


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
