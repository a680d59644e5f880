"""Small OpenAI-like servers for tests of the client and of loads, which misbehave on purpose."""

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


Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def say(body: Any, status: int = 200) -> Reply:
    """A reply of bytes or text, or of JSON."""

    async def reply(_request: web.Request) -> web.StreamResponse:
        if isinstance(body, bytes | str):
            return web.Response(status=status, body=body)
        return web.json_response(body, status=status)

    return reply


class Server:
    """Answers each request with the next reply of its script (the last one again when it is used up).

    Args:
        replies: the script.
        pages: replies of their own by the last part of a path; there is a list of models unless one is given.
    """

    def __init__(self, *replies: Reply, **pages: Reply) -> None:
        self.replies = list(replies)
        self.pages = {"models": say({"object": "list", "data": [{"id": "demo"}, {"id": "other/model"}]}), **pages}
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.ended = asyncio.Event()  # a streaming handler came to its end, cancelled or not

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, dict(request.headers), body))
        page = self.pages.get(request.path.rpartition("/")[2])
        if page is not None:
            return await page(request)
        reply = self.replies[min(len(self.posts), len(self.replies)) - 1]
        try:
            return await reply(request)
        finally:
            self.ended.set()

    @property
    def posts(self) -> list[Any]:
        return [body for _, _, body in self.requests if body is not None]

    @property
    def streams(self) -> list[Any]:
        return [body for body in self.posts if body.get("stream")]


class Engine(Server):
    """Completes what it is asked, and counts tokens: one for each id, or two for each word and `overhead`.

    Args:
        overhead: tokens of its template.
        num_output: tokens of each answer; None: as many as asked for.
        counts: whether it says how many tokens there were.
        takes_ids: whether a prompt may be of ids.
        has_completions: whether it has more than chats.
        refuses: every third stream.
        pages: as of any server.
    """

    def __init__(
        self,
        *,
        overhead: int = 0,
        num_output: int | None = None,
        counts: bool = True,
        takes_ids: bool = True,
        has_completions: bool = True,
        refuses: bool = False,
        **pages: Reply,
    ) -> None:
        super().__init__(self.complete, **pages)
        self.overhead, self.num_output, self.counts = overhead, num_output, counts
        self.takes_ids, self.has_completions, self.refuses = takes_ids, has_completions, refuses

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.method == "GET" or (not self.has_completions and request.path == "/v1/completions"):
            return await say({"error": "no such path"}, 404)(request)
        return await self._reply(await request.json())(request)

    def _reply(self, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        if isinstance(prompt, list) and not self.takes_ids:
            return refuse(400, "prompt must be a text")
        num_prompt = len(prompt) if isinstance(prompt, list) else self.overhead + 2 * len(prompt.split())
        num_output = (self.num_output or body["max_tokens"]) if body.get("stream") else 1
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output} if self.counts else None
        if not body.get("stream"):
            return say({"choices": [], "usage": usage})
        if self.refuses and len(self.streams) % 3 == 0:
            return refuse(429, "full")
        texts = [chunk(choices=[{"index": 0, "text": "x ", "finish_reason": None}])] * num_output
        return stream(events(*texts, FINISH, chunk(choices=[], usage=usage), "[DONE]"))


def stream(*parts: bytes, lose: bool = False, hang: bool = False, request_id: str = "") -> Reply:
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


def refuse(status: int, message: str = "no", **headers: str) -> Reply:
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
