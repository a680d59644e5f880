"""Requests that no client library sends, over bare sockets, and what every error must look like."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

import aiohttp

from services.dispatcher.http.connection import LINGER_S
from tests.support.bad_inputs import BadInput
from tests.support.dispatchers import CHAT, HELLO

PIECE_PAUSE_S = 0.1
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def check_error(status: int, body: Any) -> tuple[int, str, str | None]:
    """Return status, code and parameter of an answer in OpenAI's error format.

    Raises:
        AssertionError: it is another one.
    """
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code", "help"}, error
    assert error["help"] == f"/errors/{error['code']}"
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert error["type"] == TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, error["code"], error["param"]


async def send(
    http: aiohttp.ClientSession, url: str, row: BadInput, headers: dict[str, str] | None = None
) -> tuple[int, str, str | None]:
    """Send the row, and return status, code and parameter of the error that it must get."""
    data = io.BytesIO(row.data) if row.data else None  # aiohttp warns of large bytes
    async with http.request(
        row.method, url + row.path, data=data, headers={**row.headers, **(headers or {})}
    ) as response:
        assert response.content_type == "application/json"
        assert response.headers["x-request-id"]
        return check_error(response.status, json.loads(await response.read()))


async def exchange(url: str, *pieces: bytes, limit_s: float = 10.0) -> tuple[bytes, Any]:
    """Send pieces of bytes, and return the head and the JSON of the answer once the server has closed the connection.

    Args:
        url: of the server.
        pieces: sent one after the other with pauses.
        limit_s: for all of it.

    Raises:
        ConnectionError: it was reset. One that sends for longer than the server lingers may be, and sends anew here.
    """
    while True:
        began_s = time.monotonic()
        try:
            return await _exchange(url, pieces, limit_s)
        except ConnectionError:
            if time.monotonic() - began_s < LINGER_S:
                raise


async def _exchange(url: str, pieces: Iterable[bytes], limit_s: float) -> tuple[bytes, Any]:
    reader, writer = await connect(url)
    sender = asyncio.create_task(_send_pieces(writer, pieces))
    try:
        async with asyncio.timeout(limit_s):
            answer = await reader.read()
    finally:
        sender.cancel()
        await asyncio.wait([sender])
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, json.loads(body) if body else None


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the server."""
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def connect_narrow(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection that takes next to nothing of what is not read from it, and send something."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**10)
    writer.write(data)
    return reader, writer


def chat_bytes(version: str = "1.1", **body: Any) -> bytes:
    """Return the request for a chat as it goes over a connection."""
    data = json.dumps({"model": "tiny", "messages": HELLO, **body}).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _send_pieces(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    try:
        for index, piece in enumerate(pieces):
            if index:
                await asyncio.sleep(PIECE_PAUSE_S)
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        return  # the server has refused the rest; its answer says why


def status_of(head: bytes) -> int:
    """Return the status in the head of an answer."""
    return int(head.split()[1])
