"""What lies between the stages of live workers: it counts the KV that passes, and holds, cuts or spoils it on order.

    worker-0 ── dials 127.0.0.2:port of worker-1 ──► tap ──► 127.0.0.1:port of worker-1

Workers advertise another address of this machine than the one on which they listen; there a tap stands. It reads who
dials and what for, as the member does, and leaves all connections alone but those for KV. It lives on an event loop in
a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from services.worker.peers.frames import HEADER_BYTES, FrameKind, read_head
from services.worker.peers.greeting import MAX_GREETING_BYTES, PeerHello, Purpose, read_greeting
from tests.support.fault_cluster import Shape
from tests.support.ports import free_port

T = TypeVar("T")

LISTENS: Final = "127.0.0.1"
ADVERTISED: Final = "127.0.0.2"
PART_BYTES: Final = 16 * 1024
KV_PURPOSES: Final = (Purpose.KV, Purpose.PARTING)


def tapped(shape: Shape) -> tuple[Shape, list[int]]:
    """Return a shape whose workers are reached by way of a tap, and the port of each worker."""
    ports = [free_port() for _ in range(shape.num_workers)]
    flags = dict(shape.flags)
    for index, port in enumerate(ports):
        flags[f"worker-{index}"] = ("--stage-port", str(port), "--stage-advertise", ADVERTISED)
    return replace(shape, flags=flags), ports


@dataclass
class _Order:
    """What is to happen to KV, once, after so many bytes of it in one direction."""

    after_bytes: int
    act: str
    """`hold`, `cut` or `flip`."""
    is_met: threading.Event = field(default_factory=threading.Event)


class StageTap:
    """Stands before the workers' ports. A context manager.

    Attributes:
        num_bytes: of KV that have passed, greetings not counted.
    """

    def __init__(self, ports: list[int]) -> None:
        self.num_bytes = 0
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage-tap", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._order: _Order | None = None
        self._go_on = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self, after_bytes: int) -> threading.Event:
        """Let no KV pass once so many bytes have in one direction, until `go_on`; set when that is so."""
        return self._give("hold", after_bytes)

    def cut(self, after_bytes: int) -> threading.Event:
        """Reset the connection after so many bytes; set when that is done."""
        return self._give("cut", after_bytes)

    def flip(self, after_bytes: int) -> threading.Event:
        """Turn a bit of the byte behind so many; set when that is done."""
        return self._give("flip", after_bytes)

    def go_on(self) -> None:
        """Let everything pass from now on; what was held comes first."""

        def apply() -> None:
            self._order = None
            self._go_on.set()

        self._do(apply)

    def _give(self, act: str, after_bytes: int) -> threading.Event:
        order = _Order(after_bytes, act)

        def apply() -> None:
            self._order = order
            self._go_on.clear()

        self._do(apply)
        return order.is_met

    def _do(self, action: Callable[[], None]) -> None:
        async def run() -> None:
            action()

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        for port in self._ports:
            self._servers.append(await asyncio.start_server(partial(self._serve, port), ADVERTISED, port))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        ends = [writer]
        try:
            head = await reader.readexactly(HEADER_BYTES)
            num_bytes = read_head(head, (FrameKind.GREETING,), MAX_GREETING_BYTES).num_bytes
            said = await reader.readexactly(num_bytes)
            to_reader, to_writer = await asyncio.open_connection(LISTENS, port)
            ends.append(to_writer)
            to_writer.write(head + said)
            is_kv = read_greeting(said, PeerHello).purpose in KV_PURPOSES
            await self._join(((reader, to_writer), (to_reader, writer)), ends, is_kv=is_kv)
        except (OSError, asyncio.IncompleteReadError):
            return
        except asyncio.CancelledError:
            return  # the tap closes; asyncio would log the cancellation of a task that it started
        finally:
            del self._tasks[task]
            for end in ends:
                end.close()

    async def _join(
        self,
        ways: tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], ...],
        ends: list[asyncio.StreamWriter],
        *,
        is_kv: bool,
    ) -> None:
        """Pass bytes on in both directions, until an end is gone; one that only says no more may still hear."""
        pumps = {asyncio.ensure_future(self._pump(reader, writer, ends, is_kv=is_kv)) for reader, writer in ways}
        try:
            await asyncio.wait(pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
        *,
        is_kv: bool,
    ) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(PART_BYTES):
                num_bytes += len(data)
                if is_kv:
                    self.num_bytes += len(data)
                    data = await self._obey(data, num_bytes, ends)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
            return
        for end in ends:
            end.transport.abort()

    async def _obey(self, data: bytes, num_bytes: int, ends: list[asyncio.StreamWriter]) -> bytes:
        """Return what is to pass instead of these bytes, perhaps later."""
        order = self._order
        if order is None or num_bytes <= order.after_bytes:
            return data
        if order.act == "hold":
            order.is_met.set()
            await self._go_on.wait()
            return data
        self._order = None
        if order.act == "cut":
            for end in ends:
                _reset(end)
            order.is_met.set()
            return b""
        spoiled = bytearray(data)
        spoiled[-1] ^= 0x10
        order.is_met.set()
        return bytes(spoiled)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


@contextmanager
def tapping(ports: list[int]) -> Iterator[StageTap]:
    """Give a tap before these ports."""
    with StageTap(ports) as tap:
        yield tap
