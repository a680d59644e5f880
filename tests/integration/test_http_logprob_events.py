"""Many tokens with log-probabilities at once, as after a stall of the broker: several short events, nothing changed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS
from shared.types import MAX_TOP_LOGPROBS, FinishReason
from tests.support.dispatchers import CHAT, COMPLETIONS, Running, texts_of
from tests.support.socket_talks import talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_EVENT_BYTES = 512 * 1024
"""What a reader takes for one line."""
NUM_TOKENS = 200
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS},
    "completions": {"max_tokens": NUM_TOKENS, "logprobs": 5},
}


async def say(running: Running, sizes: list[int]) -> None:
    """Answer the next request with tokens in messages of these sizes, the last one with the finish."""
    (item,) = await running.begun()
    tokens = (running.encode("Hello 🦊 world, 你好! ") * NUM_TOKENS)[:NUM_TOKENS]
    assert sum(sizes) == NUM_TOKENS
    for size in sizes:
        first, tokens = tokens[:size], tokens[size:]
        await running.worker.emit(item, first, FinishReason.NONE if tokens else FinishReason.LENGTH)
    running.worker.running.clear()


async def over_http(running: Running, endpoint: str) -> list[Any]:
    return await running.stream(CHAT if endpoint == "chat" else COMPLETIONS, **BODIES[endpoint])


async def over_websocket(running: Running, endpoint: str) -> list[Any]:
    async with talk(running, max_msg_size=0) as client:
        messages = await client.answer("a", endpoint=endpoint, body=BODIES[endpoint])
    return [message["data"] for message in messages if message["type"] == "event"]


def joined(events: list[Any]) -> tuple[list[str], list[Any], list[str]]:
    """Return the text, the log-probabilities token by token, and the finish reasons of an answer."""
    choices = [event["choices"][0] for event in events]
    rows = [row for choice in choices if choice["logprobs"] for row in rows_of(choice["logprobs"])]
    return texts_of(events), rows, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def rows_of(logprobs: dict[str, Any]) -> list[Any]:
    return list(logprobs["content"] if "content" in logprobs else zip(*logprobs.values(), strict=True))


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("read", [over_http, over_websocket])
async def test_many_tokens_at_once_come_as_several_events_and_say_what_single_ones_say(
    running: Running, endpoint: str, read: Any
) -> None:
    answers: list[list[Any]] = []
    for sizes in ([1] * NUM_TOKENS, [NUM_TOKENS], [3, NUM_TOKENS - 3]):
        events, _ = await asyncio.gather(read(running, endpoint), say(running, sizes))
        answers.append(events)
    expected = joined(answers[0])
    assert len(expected[1]) == NUM_TOKENS
    assert expected[2] == ["length"]
    for events in answers[1:]:
        assert joined(events) == expected
        assert max(len(json.dumps(event)) for event in events) <= MAX_EVENT_BYTES
        sizes = [len(joined([event])[1]) for event in events]
        assert max(sizes) <= MAX_LOGPROB_TOKENS
        assert sum(size > 0 for size in sizes) < NUM_TOKENS / 10, "they do come together"
