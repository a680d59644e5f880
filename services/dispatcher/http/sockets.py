"""The open WebSockets of this process: who is cut because it does not read, and who is sent away at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import WSCloseCode

from services.dispatcher.http.sse import SWEEP_PERIOD_S
from shared.process.log import get_logger

_log = get_logger()

MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""Unsent bytes beyond which a connection is closed at once."""
CLOSE_LIMIT_S: Final = 4.0
"""Seconds that a client gets to take what is left and to end the connection, before it is broken."""
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class CloseReason:
    """Why the server closes a connection."""

    code: WSCloseCode
    reason: str


UNREAD: Final = CloseReason(WSCloseCode.POLICY_VIOLATION, "too much was left unread for too long")
DRAINING: Final = CloseReason(WSCloseCode.TRY_AGAIN_LATER, "the server is shutting down")


class Socket(Protocol):
    """What the registry knows of a connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""

    @property
    def is_closing(self) -> bool:
        """Whether it has been closed; the client may still have to take what it was sent."""

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet."""

    def is_stalled(self, now_s: float, stall_s: float) -> bool:
        """Return whether the client has taken nothing for so long, although something waits for it."""

    def close(self, verdict: CloseReason) -> None:
        """End the connection."""


class Sockets:
    """Looks after the connections.

    Args:
        write_limit_s: time for which a client may take nothing of what waits for it.
        is_draining: whether the server is shutting down.
        now: the event loop's clock.
    """

    def __init__(self, write_limit_s: float, is_draining: Callable[[], bool], now: Callable[[], float]) -> None:
        self._write_limit_s = write_limit_s
        self._is_draining = is_draining
        self._now = now
        self._open: dict[Socket, None] = {}
        self.num_cut = 0
        """Connections that were closed because their client did not read."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, socket: Socket) -> None:
        """Look after a connection."""
        self._open[socket] = None

    def remove(self, socket: Socket) -> None:
        """Forget a connection."""
        self._open.pop(socket, None)

    async def sweep_forever(self) -> None:
        """Look after the connections until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def sweep(self) -> None:
        """Cut clients that do not read; send idle ones away while the server drains."""
        now_s, is_draining = self._now(), self._is_draining()
        for socket in list(self._open):
            if socket.is_stalled(now_s, self._write_limit_s) and not socket.is_closing:
                self.num_cut += 1
                _log.warning("slow_socket_cut", unsent_bytes=socket.num_unsent_bytes)
                socket.close(UNREAD)
            if is_draining and socket.is_idle:
                socket.close(DRAINING)

    async def close(self) -> None:
        """End every connection; return when all have ended, or their time is over."""
        for socket in list(self._open):
            socket.close(DRAINING)
        deadline_s = self._now() + CLOSE_LIMIT_S
        while self._open and self._now() < deadline_s:
            await asyncio.sleep(_POLL_S)
