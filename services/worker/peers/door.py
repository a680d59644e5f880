"""Where other workers call: it accepts, and has a few greeted at a time. Nothing here blocks.

caller ──► greet ──► whoever the connection is for
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

GREETING_S: Final = 3.0
"""Longest time that whoever calls has for what is said first."""
MAX_GREETINGS: Final = 64
"""Most callers that are greeted, or kept waiting, at a time; more are closed at once."""
DEAD_AFTER_S: Final = 10
"""A watched connection breaks when the other machine has been silent for so long, or takes nothing."""
_ACCEPT_RETRY_S: Final = 0.1
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


async def resolve(host: str, port: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """Return family, kind, protocol and address of a socket for a host.

    Raises:
        OSError: nobody knows the host.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    return family, kind, protocol, where


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, where an IPv6 address stands in brackets.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError("that is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def watch(sock: socket.socket) -> None:
    """Let the connection break by itself when the other machine is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


class Door:
    """Listens at an address. `open` makes one.

    Args:
        sock: listening; owned.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tasks = TaskOwner(max_tasks=2 * MAX_GREETINGS)
        self._greeted: set[socket.socket] = set()
        """From when they were accepted until they are somebody's, or refused."""
        self._retry: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Door:
        """Listen at an address of this machine; port 0 is any that is free. Nobody is let in before `start`.

        Raises:
            OSError: the address is not this machine's, or taken.
        """
        family, kind, protocol, where = await resolve(host, port)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(MAX_GREETINGS)
            sock.settimeout(0)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def start(self, greet: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        """Let callers in from now on.

        Args:
            greet: called with each connection, which it owns, and its address; runs until the connection is somebody's,
                or refused.
        """
        self._retry = None
        asyncio.get_running_loop().add_reader(self._sock, self._accept, greet)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._sock.getsockname()[1]
        return port

    async def close(self) -> None:
        """Listen no more; connections that are somebody's stay. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
        try:
            await self._tasks.close()
        finally:
            for sock in self._greeted:  # a task that is cancelled before its first step has closed nothing
                sock.close()
            self._greeted.clear()
            self._sock.close()

    def _accept(self, greet: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        """Let in one caller. No task does this: one that is cancelled at the wrong time would lose the connection."""
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:  # the caller went away at once
            return
        except OSError as error:  # as there; or there are too many open files
            get_logger().warning("peer_not_let_in", error=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            self._retry = loop.call_later(_ACCEPT_RETRY_S, self.start, greet)
            return
        if len(self._greeted) >= MAX_GREETINGS:
            sock.close()
            return
        self._greeted.add(sock)
        self._tasks.start(self._greet(greet, sock, str(address[0])), name="peer-greeting")

    async def _greet(
        self, greet: Callable[[socket.socket, str], Awaitable[None]], sock: socket.socket, address: str
    ) -> None:
        try:
            sock.settimeout(0)
            await greet(sock, address)
        except BaseException:
            sock.close()
            raise
        finally:
            self._greeted.discard(sock)
