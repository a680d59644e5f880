"""Many tokens with log-probabilities at once, as after a stall of the broker: several short events, nothing changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS
from services.dispatcher.build import ModelText
from shared.types import MAX_TOP_LOGPROBS, FinishReason
from tests.support.dispatchers import Running, running_dispatcher

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_EVENT_BYTES = 512 * 1024
"""What a reader takes for one line."""
NUM_TOKENS = 200
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": NUM_TOKENS,
        "logprobs": True,
        "top_logprobs": MAX_TOP_LOGPROBS,
    },
    "completions": {"prompt": "once", "max_tokens": NUM_TOKENS, "logprobs": 5},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    async with running_dispatcher(text, folder) as running:
        yield running


async def say(running: Running, sizes: list[int]) -> None:
    """Answer the next request with tokens in messages of these sizes, the last one with the finish."""
    async with asyncio.timeout(10):
        while not running.worker.running:
            await asyncio.sleep(0.001)
    (item,) = running.worker.running.values()
    tokens = (running.encode("Hello 🦊 world, 你好! ") * NUM_TOKENS)[:NUM_TOKENS]
    assert sum(sizes) == NUM_TOKENS
    for size in sizes:
        first, tokens = tokens[:size], tokens[size:]
        await running.worker.emit(item, first, FinishReason.NONE if tokens else FinishReason.LENGTH)
    running.worker.running.clear()


async def over_http(running: Running, endpoint: str) -> list[bytes]:
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    body = {"model": "tiny", "stream": True, **BODIES[endpoint]}
    async with running.http.post(running.url + path, json=body) as response:
        blocks = (await response.read()).split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    return [block.removeprefix(b"data: ") for block in blocks[:-2]]


async def over_websocket(running: Running, endpoint: str) -> list[bytes]:
    messages: list[bytes] = []
    async with running.http.ws_connect(running.url + "/v1/ws", max_msg_size=0) as socket:
        body = {"model": "tiny", **BODIES[endpoint]}
        await socket.send_json({"type": "request", "id": "a", "endpoint": endpoint, "body": body})
        while (message := json.loads(said := await socket.receive_str(timeout=10)))["type"] != "done":
            if message["type"] != "start":
                messages.append(said.encode())
    return messages


def joined(events: list[bytes]) -> tuple[str, list[Any], list[str]]:
    """Return the text, the log-probabilities token by token, and the finish reasons of an answer."""
    found = [json.loads(event) for event in events]
    choices = [event.get("data", event)["choices"][0] for event in found]
    text = "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
    rows = [row for choice in choices if choice["logprobs"] for row in rows_of(choice["logprobs"])]
    return text, rows, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def rows_of(logprobs: dict[str, Any]) -> list[Any]:
    return list(logprobs["content"] if "content" in logprobs else zip(*logprobs.values(), strict=True))


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("read", [over_http, over_websocket])
async def test_many_tokens_at_once_come_as_several_events_and_say_what_single_ones_say(
    served: Running, endpoint: str, read: Any
) -> None:
    answers: list[list[bytes]] = []
    for sizes in ([1] * NUM_TOKENS, [NUM_TOKENS], [3, NUM_TOKENS - 3]):
        events, _ = await asyncio.gather(read(served, endpoint), say(served, sizes))
        answers.append(events)
    expected = joined(answers[0])
    assert len(expected[1]) == NUM_TOKENS
    assert expected[2] == ["length"]
    for events in answers[1:]:
        assert joined(events) == expected
        assert max(map(len, events)) <= MAX_EVENT_BYTES
        sizes = [len(joined([event])[1]) for event in events]
        assert max(sizes) <= MAX_LOGPROB_TOKENS
        assert sum(size > 0 for size in sizes) < NUM_TOKENS / 10, "they do come together"
