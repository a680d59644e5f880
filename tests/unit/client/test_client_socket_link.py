"""The SDK's WebSockets when whoever asks, or closes, is cancelled at an inconvenient moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import aiohttp
import pytest

from sluice_client import AsyncSluiceClient, ConnectionLostError
from sluice_client.socket_transport import SocketTransport, _Link
from sluice_client.transport import Transport


class Socket:
    """From which nothing comes, and which a large request fills."""

    closed = False
    close_code = None

    def __init__(self, most_bytes: int = 10**9) -> None:
        self.sent: list[dict[str, Any]] = []
        self._most_bytes = most_bytes
        self._num_bytes = 0

    async def send_str(self, text: str) -> None:
        self.sent.append(json.loads(text))
        self._num_bytes += len(text)
        if self._num_bytes > self._most_bytes:
            await asyncio.Event().wait()

    def __aiter__(self) -> Socket:
        return self

    async def __anext__(self) -> aiohttp.WSMessage:
        await asyncio.Event().wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        self.closed = True


def link_over(socket: Socket) -> _Link:
    return _Link("http://there", cast("aiohttp.ClientWebSocketResponse", socket))


async def test_a_request_is_cancelled_at_the_server_though_it_has_only_just_left() -> None:
    socket = Socket(most_bytes=100)
    link = link_over(socket)
    asking = asyncio.create_task(link.ask({"type": "chat", "prompt": "x" * 100}))
    await asyncio.sleep(0)
    assert link.num_answers == 1
    asking.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert link.num_answers == 0
    assert [(each["type"], each["id"]) for each in socket.sent] == [("chat", "1"), ("cancel", "1")]
    await link.close()


async def test_a_link_that_is_closed_at_once_tells_whoever_has_asked() -> None:
    link = link_over(Socket())
    answer = await link.ask({"type": "chat"})
    asking = asyncio.create_task(answer.next())
    await link.close()
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionLostError):
            await asking
    assert link.is_closed


async def test_a_client_is_closed_though_closing_its_sockets_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def wait(_: SocketTransport) -> None:
        await asyncio.Event().wait()

    async def close(_: Transport) -> None:
        closed.append(1)

    monkeypatch.setattr(SocketTransport, "close", wait)
    monkeypatch.setattr(Transport, "close", close)
    closing = asyncio.create_task(AsyncSluiceClient("http://there", transport="websocket").aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed
