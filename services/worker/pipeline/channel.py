"""How messages of a pipeline's stages travel: one way, in order, whole or not at all.

    StageSender            who sends: a stage, or the leader
    SocketChannel          over a blocking socket, for threads

In simulation a channel is a modelled link on the event loop's clock (`sim/devices/channel.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from services.worker.peers.frames import FrameSocket, PeerLostError
from services.worker.peers.link_priority import LinkPriority
from services.worker.pipeline.stage_messages import STAGE_KINDS, StageMessage, pack, unpack
from shared.errors import WireError


class StageSender(Protocol):
    """The end of a channel that sends."""

    def send(self, message: StageMessage) -> None:
        """Send a message behind those sent before.

        Raises:
            PeerLostError: the other end is known to be gone. Without it the message may still be lost.
        """

    def close(self) -> None:
        """Let the other end know that nothing more comes. Idempotent."""


def receive_all(
    channel: SocketChannel, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]
) -> None:
    """Body of a thread: pass on every message, then once why there are no more."""
    try:
        while True:
            on_message(channel.receive())
    except (PeerLostError, WireError) as error:
        on_lost(str(error))


class SocketChannel:
    """A blocking stream socket, both ways. Any thread may send, one at a time; one thread receives.

    Args:
        sock: connected; owned from now on.
        priority: of this worker's connections: what is sent here goes first; None: it has no others.
        silence_s: see `FrameSocket`.
    """

    def __init__(
        self, sock: socket.socket, priority: LinkPriority | None = None, *, silence_s: float | None = None
    ) -> None:
        self._frames = FrameSocket(sock, urgent=priority or LinkPriority(), silence_s=silence_s)

    def send(self, message: StageMessage) -> None:
        """Send a message; blocks while the other end's buffers are full."""
        kind, parts = pack(message)
        self._frames.send(kind, *parts)

    def receive(self) -> StageMessage:
        """Return the next message; blocks until there is one.

        Raises:
            PeerLostError: the other end is gone.
            WireError: it says something else than messages of stages.
        """
        frame = self._frames.receive(*STAGE_KINDS)
        return unpack(frame.kind, frame.payload)

    def close(self) -> None:
        """Break the connection; whoever sends or receives at either end gets `PeerLostError`. Idempotent.

        The descriptor stays: a thread that is about to use it would use what is opened next under its number.
        """
        self._frames.shut()

    def free(self) -> None:
        """Give the descriptor back, after `close`, once no thread uses it. Idempotent."""
        self._frames.close()
