"""Parts of a greeting over sockets that do not block, and what such sockets need."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Final

from services.worker.groups.greeting import MAX_GREETING_BYTES, StageRefusedError
from shared.messages.base import ControlMessage
from shared.wire import encode

DEAD_AFTER_S: Final = 10
"""A connection breaks when the other machine has been silent for so long, or takes nothing."""
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


async def say(sock: socket.socket, message: ControlMessage) -> None:
    """Send a part of a greeting over a socket that does not block."""
    data = encode(message)
    await asyncio.get_running_loop().sock_sendall(sock, len(data).to_bytes(4, "little") + data)


async def hear(sock: socket.socket) -> bytes:
    """Return the next part of a greeting from a socket that does not block.

    Raises:
        StageRefusedError: it is longer than any greeting.
        OSError: the other side has gone.
    """
    size = int.from_bytes(await _read(sock, 4), "little")
    if size > MAX_GREETING_BYTES:
        raise StageRefusedError(f"a greeting of {size} bytes")
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
