"""A small OpenAI-like server for tests of the client, which misbehaves on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

WORDS = ["Grüße, ", "中文 ", "👩\u200d👩 ", "and ", "the ", "end."]


def chunk(**fields: Any) -> dict[str, Any]:
    return {"id": "chat-1", "object": "chat.completion.chunk", "model": "demo", **fields}


def delta(content: str, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}
    return chunk(choices=[choice], **fields)


def events(*data: dict[str, Any] | str) -> bytes:
    texts = [item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in data]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


ROLE = chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
FINISH = chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = chunk(
    choices=[],
    usage={"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9},
    sluice={"qoe": 0.97, "ttft_s": 0.2, "tokens": 6},
)
WHOLE = events(ROLE, *(delta(word) for word in WORDS), FINISH, USAGE, "[DONE]")


class Server:
    """Answers each request with the next reply of its script (the last one again when it is used up)."""

    def __init__(self, *replies: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.ended = asyncio.Event()  # a streaming handler came to its end, cancelled or not

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, dict(request.headers), body))
        if request.path.endswith("/models"):
            return web.json_response({"object": "list", "data": [{"id": "demo"}, {"id": "other/model"}]})
        reply = self.replies[min(len(self.posts), len(self.replies)) - 1]
        try:
            return await reply(request)
        finally:
            self.ended.set()

    @property
    def posts(self) -> list[Any]:
        return [body for _, _, body in self.requests if body is not None]


def stream(*parts: bytes, lose: bool = False, hang: bool = False, request_id: str = "") -> Any:
    """A reply of event-stream bytes, one chunk each; then the end, a lost connection, or silence."""

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if request_id:
            response.headers["x-request-id"] = request_id
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        if lose:
            assert request.transport is not None
            request.transport.abort()
        if hang:
            await asyncio.Event().wait()
        return response

    return reply


def refuse(status: int, message: str = "no", **headers: str) -> Any:
    async def reply(request: web.Request) -> web.StreamResponse:
        error = {"message": message, "type": "overloaded", "param": None, "code": "too_many"}
        return web.json_response({"error": error}, status=status, headers=headers)

    return reply


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    """The server's URL; handlers are cancelled when their client's connection closes."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
