"""How messages of a pipeline's stages travel: one way, in order, whole or not at all.

    StageSender            who sends: a stage, or the leader
    MemoryChannel          on the event loop's clock, with a modelled link (simulation)
    SocketChannel          over a blocking socket, for threads (live)

Nothing here knows classes, credit or other streams: a channel can be one stream of a link that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

from services.worker.pipeline.link_turns import URGENT_PRIORITY, LinkTurns, set_priority
from services.worker.pipeline.stage_messages import FRAME, Activation, StageMessage, pack, read_frame, unpack
from shared.errors import WireError


class ChannelLostError(Exception):
    """The other end is gone, or the way to it; nothing more can be sent or received."""


class StageSender(Protocol):
    """The end of a channel that sends."""

    def send(self, message: StageMessage) -> None:
        """Send a message behind those sent before.

        Raises:
            ChannelLostError: the other end is known to be gone. Without it the message may still be lost.
        """
        ...

    def close(self) -> None:
        """Let the other end know that nothing more comes. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ModelledLink:
    """The wire between two stages, as far as it costs time. Only activations have a size worth counting."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    token_bytes: int = 0
    """Bytes of one token's hidden state; hidden_size times 2 in 16 bits."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0 or self.token_bytes < 0:
            raise ValueError(f"{self} is no link")

    def transfer_s(self, message: StageMessage) -> float:
        """Return how long the message keeps the wire busy."""
        return self.token_bytes * message.num_tokens / self.bytes_per_s if isinstance(message, Activation) else 0.0


class MemoryChannel:
    """A modelled wire on the running loop's clock: one message after the other, each after the latency.

    Args:
        link: of the wire.
        on_message: called with each message when it arrives.
        on_lost: called once, with the reason, if the channel is cut; never after `close`.
        context: of whoever is called; None: that of whoever sends or cuts.
    """

    def __init__(
        self,
        link: ModelledLink,
        on_message: Callable[[StageMessage], None],
        on_lost: Callable[[str], None],
        context: Context | None = None,
    ) -> None:
        self._context = context
        self._link = link
        self._on_message = on_message
        self._on_lost = on_lost
        self._free_s = 0.0
        self._is_open = True

    def send(self, message: StageMessage) -> None:
        """Send a message; what is on the wire when the channel is cut never arrives."""
        if not self._is_open:
            raise ChannelLostError("the channel is cut")
        loop = asyncio.get_running_loop()
        self._free_s = max(loop.time(), self._free_s) + self._link.transfer_s(message)
        loop.call_at(self._free_s + self._link.latency_s, self._arrive, message, context=self._context)

    def cut(self, reason: str) -> None:
        """Lose all that is under way; the receiving end notices after the latency. Idempotent."""
        if self._is_open:
            self._is_open = False
            loop = asyncio.get_running_loop()
            loop.call_later(self._link.latency_s, self._on_lost, reason, context=self._context)

    def close(self) -> None:
        """Carry nothing more, and tell nobody. Idempotent."""
        self._is_open = False

    def _arrive(self, message: StageMessage) -> None:
        if self._is_open:
            self._on_message(message)


def receive_all(
    channel: SocketChannel, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]
) -> None:
    """Body of a thread: pass on every message, then once why there are no more."""
    try:
        while True:
            on_message(channel.receive())
    except (ChannelLostError, WireError) as error:
        on_lost(str(error))


class SocketChannel:
    """A blocking stream socket, both ways. Any thread may send, one at a time; one thread receives.

    Args:
        sock: connected; owned from now on.
        turns: of this worker's connections: what is sent here goes first; None: it has no others.
    """

    def __init__(self, sock: socket.socket, turns: LinkTurns | None = None) -> None:
        sock.setblocking(True)  # noqa: FBT003  the library's own signature
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_priority(sock, URGENT_PRIORITY)
        self._socket = sock
        self._turns = turns or LinkTurns()
        self._sending = threading.Lock()

    def send(self, message: StageMessage) -> None:
        """Send a message; blocks while the other end's buffers are full."""
        parts = [memoryview(part).cast("B") for part in pack(message)]
        try:
            with self._turns.urgent(), self._sending:
                self._send(parts)
        except OSError as error:
            raise ChannelLostError(f"cannot send: {error}") from error

    def receive(self) -> StageMessage:
        """Return the next message; blocks until there is one.

        Raises:
            ChannelLostError: the other end is gone.
            WireError: it says something else than messages of stages.
        """
        kind, size = read_frame(self._read(FRAME.size))
        return unpack(kind, self._read(size))

    def close(self) -> None:
        """Break the connection; whoever sends or receives at either end gets `ChannelLostError`. Idempotent."""
        with contextlib.suppress(OSError):  # it may be broken already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise ChannelLostError(f"cannot receive: {error}") from error
            if not count:
                raise ChannelLostError("the other end has closed the connection")
            view = view[count:]
        return data
