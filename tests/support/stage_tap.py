"""What lies between the stages of live workers: it counts the KV that passes, and holds, cuts or spoils it on order.

    worker-0 ── dials 127.0.0.2:port of worker-1 ──► tap ──► 127.0.0.1:port of worker-1

Workers advertise another address of this machine than the one on which they listen; there a tap stands. It reads who
dials and what for, as the member does, and leaves all connections alone but those for KV. It lives on an event loop in
a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import Final

from services.worker.peers.frames import HEADER_BYTES, FrameKind, read_head
from services.worker.peers.greeting import MAX_GREETING_BYTES, PeerHello, Purpose, read_greeting
from tests.support.fault_cluster import Shape
from tests.support.loop_proxy import Ends, LoopProxy, pump_all, reset
from tests.support.ports import free_port

LISTENS: Final = "127.0.0.1"
ADVERTISED: Final = "127.0.0.2"
PART_BYTES: Final = 16 * 1024
KV_PURPOSES: Final = (Purpose.KV, Purpose.PARTING, Purpose.FETCH)


@dataclass
class _Order:
    """What is to happen to KV, once, after so many bytes of it in one direction."""

    after_bytes: int
    act: str
    """`hold`, `cut` or `flip`."""
    is_met: threading.Event = field(default_factory=threading.Event)


class StageTap(LoopProxy):
    """Stands before the workers' ports. A context manager.

    Attributes:
        num_bytes: of KV that have passed, greetings not counted.

    Args:
        num_workers: of the cluster.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_bytes = 0
        self._ports = [free_port() for _ in range(num_workers)]
        self._order: _Order | None = None
        self._go_on = asyncio.Event()

    def before(self, shape: Shape) -> Shape:
        """Return a shape whose workers are reached by way of this tap."""
        flags = dict(shape.flags)
        for index, port in enumerate(self._ports):
            flags[f"worker-{index}"] = ("--stage-port", str(port), "--stage-advertise", ADVERTISED)
        return replace(shape, flags=flags)

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

        self.do(apply)

    def _give(self, act: str, after_bytes: int) -> threading.Event:
        order = _Order(after_bytes, act)

        def apply() -> None:
            self._order = order
            self._go_on.clear()

        self.do(apply)
        return order.is_met

    async def listen(self) -> None:
        """See `LoopProxy`."""
        for port in self._ports:
            await self.open_port(ADVERTISED, port, port)

    async def pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends) -> None:
        """See `LoopProxy`. An end that only says no more may still hear."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readexactly(HEADER_BYTES)
            num_bytes = read_head(head, (FrameKind.GREETING,), MAX_GREETING_BYTES).num_bytes
            said = await reader.readexactly(num_bytes)
            to_reader, to_writer = await asyncio.open_connection(LISTENS, port)
            ends.append(to_writer)
            to_writer.write(head + said)
            is_kv = read_greeting(said, PeerHello).purpose in KV_PURPOSES
            ways = ((reader, to_writer), (to_reader, writer))
            await pump_all(*(self._pump(*way, ends, is_kv=is_kv) for way in ways), until=asyncio.ALL_COMPLETED)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: Ends,
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

    async def _obey(self, data: bytes, num_bytes: int, ends: Ends) -> bytes:
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
                reset(end)
            order.is_met.set()
            return b""
        spoiled = bytearray(data)
        spoiled[-1] ^= 0x10
        order.is_met.set()
        return bytes(spoiled)
