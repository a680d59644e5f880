"""How messages of a pipeline's stages travel: one way, in order, whole or not at all.

    StageSender            who sends: a stage, or the leader
    SocketChannel          over a blocking socket, for threads

In simulation a channel is a modelled link on the event loop's clock (`sim/devices/channel.py`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from services.worker.pipeline.link_turns import URGENT_PRIORITY, LinkTurns, set_priority
from services.worker.pipeline.stage_messages import FRAME, StageMessage, pack, read_frame, unpack
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
