"""A client of the WebSocket endpoint, message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.dispatchers import HELLO, Running, texts_of
from tests.support.waiting import until


class Talk:
    """A client's end."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def ask(self, name: str, endpoint: str = "chat", **fields: Any) -> None:
        what = {"messages": HELLO} if endpoint == "chat" else {"prompt": "once", "max_tokens": 100}
        body = {"model": "tiny", **what, **fields.pop("body", {})}
        await self.say(type="request", id=name, endpoint=endpoint, body=body, **fields)

    async def say(self, **message: Any) -> None:
        await self.socket.send_str(json.dumps(message))

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            message = await self.socket.receive()
        assert message.type is aiohttp.WSMsgType.TEXT, message
        found: dict[str, Any] = json.loads(message.data)
        return found

    async def all_of(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Return the messages about some answers, each up to its `done`."""
        heard: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        while any(not messages or messages[-1]["type"] != "done" for messages in heard.values()):
            message = await self.hear()
            heard[message["id"]].append(message)
        return heard

    async def answer(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask, and return the messages of the answer."""
        await self.ask(name, **fields)
        return (await self.all_of(name))[name]

    async def closed(self) -> tuple[int, str]:
        """Return code and reason of the server's close."""
        async with asyncio.timeout(10):
            while True:
                message = await self.socket.receive()
                if message.type is aiohttp.WSMsgType.CLOSE:
                    await self.socket.close()
                    return message.data, str(message.extra)
                assert message.type is aiohttp.WSMsgType.TEXT, message


@asynccontextmanager
async def talk(running: Running, key: str = "", **options: Any) -> AsyncIterator[Talk]:
    """Hold a WebSocket open, under a key if one is given."""
    options = {"autoclose": False, "headers": {"Authorization": f"Bearer {key}"} if key else {}, **options}
    async with running.http.ws_connect(running.url + "/v1/ws", **options) as socket:
        yield Talk(socket)
    await until(lambda: not len(running.front.sockets))


def text_of(messages: list[dict[str, Any]]) -> str:
    """Return the text of an answer's first choice."""
    return texts_of(message["data"] for message in messages if message["type"] == "event")[0]
