"""Sockets between workers, before links and stages talk on them: nothing here blocks.

message   length u32 · body            of either side, until both know each other
Door      accepts, and greets a few at a time:   caller ──► greet ──► whoever the connection is for
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

GREETING_S: Final = 3.0
"""Longest time that whoever calls has for what is said first."""
MAX_GREETINGS: Final = 64
"""Most callers that are greeted, or kept waiting, at a time; more are closed at once."""
DEAD_AFTER_S: Final = 10
"""A watched connection breaks when the other machine has been silent for so long, or takes nothing."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_ACCEPT_RETRY_S: Final = 0.1
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


class MessageTooLongError(Exception):
    """The other side announces more than it may say."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a greeting of {size} bytes")
        self.size = size


async def send_message(sock: socket.socket, body: bytes) -> None:
    """Send a message.

    Raises:
        OSError: the other side has gone.
    """
    await asyncio.get_running_loop().sock_sendall(sock, len(body).to_bytes(4, "little") + body)


async def receive_message(sock: socket.socket, max_bytes: int) -> bytes:
    """Return the next message.

    Raises:
        MessageTooLongError: it is longer than that; the rest of it was not read.
        OSError: the other side has gone.
    """
    size = int.from_bytes(await _read(sock, 4), "little")
    if size > max_bytes:
        raise MessageTooLongError(size)
    return await _read(sock, size)


async def _read(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionResetError("it hung up")
        data += part
    return data


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


def what_failed(error: Exception) -> str:
    """Return what the system says of an error; the event loop puts the address there instead."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


def watch(sock: socket.socket) -> None:
    """Let the connection break by itself when the other machine is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


def check_user(sock: socket.socket) -> None:
    """Return if the process at the other end of a Unix socket is of this process's user.

    Raises:
        PermissionError: it is not.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise PermissionError(f"its process is of user {user}, this one of {os.geteuid()}")


class Door:
    """Listens at an address. `open` makes one.

    Args:
        sock: listening; owned.
        name: of what is let in, for log and tasks.
        path: of the socket, if it has one; owned.
    """

    def __init__(self, sock: socket.socket, name: str, path: Path | None = None) -> None:
        self._sock = sock
        self._name = name
        self._path = path
        self._tasks = TaskOwner(max_tasks=2 * MAX_GREETINGS)
        self._greeted: set[socket.socket] = set()
        """From when they were accepted until they are somebody's, or refused."""
        self._retry: asyncio.TimerHandle | None = None
        self.num_refused = 0
        """Connections that came to nothing."""

    @classmethod
    async def open(cls, host: str, port: int, name: str) -> Door:
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
        return cls(sock, name)

    @classmethod
    def open_path(cls, path: Path, name: str) -> Door:
        """Listen at a path of the file system, which only this process's user may call at; it ends with the door.

        Raises:
            OSError: something is there already, or the path is none for a socket.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(str(path))
            try:
                path.chmod(0o600)  # nobody is let in before this: a socket that does not listen refuses
                sock.listen(MAX_GREETINGS)
                sock.settimeout(0)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        except BaseException:
            sock.close()
            raise
        return cls(sock, name, path)

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

    @property
    def num_greeted(self) -> int:
        """Callers that are greeted, or kept waiting, now."""
        return len(self._greeted)

    def refuse(self, address: str, reason: str) -> None:
        """Count a caller that is not let in, and log why."""
        self.num_refused += 1
        get_logger().warning(f"a {self._name} was refused", address=address, reason=reason)

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
            if self._path is not None and self._sock.fileno() >= 0:  # else the path may be another's by now
                self._path.unlink(missing_ok=True)
            self._sock.close()

    def _accept(self, greet: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        """Let in one caller. No task does this: one that is cancelled at the wrong time would lose the connection."""
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:  # the caller went away at once
            return
        except OSError as error:  # as there; or there are too many open files
            get_logger().warning(f"a {self._name} was not let in", error=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            self._retry = loop.call_later(_ACCEPT_RETRY_S, self.start, greet)
            return
        if len(self._greeted) >= MAX_GREETINGS:
            sock.close()
            self.num_refused += 1
            return
        self._greeted.add(sock)
        caller = str(address[0] if isinstance(address, tuple) else self._path)
        self._tasks.start(self._greet(greet, sock, caller), name=f"{self._name}-greeting")

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
