"""Log-probabilities over HTTP: both shapes, whole and streamed, and together with the text that they belong to.

Many of them at once, as after a stall of the broker, come in several short events, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS
from shared.types import MAX_TOP_LOGPROBS, FinishReason
from tests.support.dispatchers import CHAT, COMPLETIONS, Running, Serve, texts_of
from tests.support.fake_worker import played_logprob
from tests.support.socket_talks import talk

MAX_EVENT_BYTES = 512 * 1024
"""What a reader takes for one line."""
NUM_TOKENS = 200
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS},
    "completions": {"max_tokens": NUM_TOKENS, "logprobs": 5},
}
TEXT = "Hello 🦊 world, 你好!\u2028End."

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(TEXT) as running:
        yield running


async def chunks_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream's events, in which no client sees the end of a line."""
    async with running.ask(stream=True, **body) as response:
        assert "\u2028" not in await response.text()
    return [event["choices"][0] for event in await running.stream(**body)]


async def test_a_chats_tokens_have_their_bytes_numbers_and_alternatives(served: Running) -> None:
    _, body = await served.post(logprobs=True, top_logprobs=2)
    entries = body["choices"][0]["logprobs"]["content"]
    ids = served.encode(TEXT)
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == TEXT.encode()
    assert [entry["logprob"] for entry in entries] == [played_logprob(i, 0, 0).logprob for i in range(len(ids))]
    names = served.front.codec.names
    for index, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
        assert entry["token"] == names.name_of(token_id)
        expected = played_logprob(index, token_id, 2).top
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
            (names.name_of(other), value) for other, value in expected
        ]
    assert body["choices"][0]["logprobs"]["refusal"] is None
    assert any(entry["token"].startswith("bytes:\\xf0") for entry in entries)  # a piece of the fox


async def test_without_alternatives_a_chats_tokens_have_none(served: Running) -> None:
    _, body = await served.post(logprobs=True)
    assert {len(entry["top_logprobs"]) for entry in body["choices"][0]["logprobs"]["content"]} == {0}
    assert served.worker.submits[-1].sampling.logprobs == 0
    _, body = await served.post(logprobs=False)
    assert body["choices"][0]["logprobs"] is None
    assert served.worker.submits[-1].sampling.logprobs is None


async def test_completions_have_the_old_shape_with_offsets_into_the_text(served: Running) -> None:
    _, body = await served.post(COMPLETIONS, max_tokens=99, logprobs=2)
    choice = body["choices"][0]
    logprobs, ids = choice["logprobs"], served.encode(TEXT)
    assert set(logprobs) == {"text_offset", "tokens", "token_logprobs", "top_logprobs"}
    assert {len(column) for column in logprobs.values()} == {len(ids)}
    for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert name.startswith("bytes:") or choice["text"][offset:].startswith(name)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    name_of = served.front.codec.names.name_of
    for index, (token_id, top) in enumerate(zip(ids, logprobs["top_logprobs"], strict=True)):
        assert top[name_of(token_id)] == played_logprob(index, token_id, 2).logprob
        assert top[name_of(token_id + 1)] == played_logprob(index, token_id, 2).top[1][1]


async def test_a_completion_that_wants_the_chosen_tokens_only_gets_no_alternatives(served: Running) -> None:
    _, body = await served.post(COMPLETIONS, max_tokens=99, logprobs=0)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == len(served.encode(TEXT))


async def test_streamed_log_probabilities_come_with_their_text_and_are_the_whole_answers(served: Running) -> None:
    _, body = await served.post(logprobs=True, top_logprobs=1)
    chunks = await chunks_of(served, logprobs=True, top_logprobs=1)
    entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert entries == body["choices"][0]["logprobs"]["content"]
    for chunk in chunks:
        written = chunk["logprobs"]["content"] if chunk["logprobs"] else []
        assert b"".join(bytes(entry["bytes"]) for entry in written).decode() == chunk["delta"].get("content", "")


async def test_streamed_completions_are_the_whole_answers_in_pieces(served: Running) -> None:
    _, body = await served.post(COMPLETIONS, max_tokens=99, logprobs=1)
    chunks = await chunks_of(served, path=COMPLETIONS, max_tokens=99, logprobs=1)
    for column, values in body["choices"][0]["logprobs"].items():
        assert [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][column]] == values


async def test_text_held_back_for_a_stop_string_holds_its_log_probabilities_back(served: Running) -> None:
    """`Hello 🦊 wor` is shown; the tokens after it have begun the stop string, and neither text nor number is sent."""
    chunks = await chunks_of(served, logprobs=True, stop=["ld, 你", "zzz"])
    shown = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert shown == TEXT.partition("ld")[0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert spelled.startswith(shown)
    assert len(shown) <= len(spelled) < len(shown) + len(entries[-1]["token"])  # cut within the last token at most


async def test_numbers_that_were_lost_are_said_to_be_lost(served: Running) -> None:
    served.worker.has_logprobs = False
    _, body = await served.post(logprobs=True)
    assert {entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]} == {-9999.0}
    _, body = await served.post(COMPLETIONS, max_tokens=99, logprobs=1)
    assert set(body["choices"][0]["logprobs"]["token_logprobs"]) == {None}
    assert body["choices"][0]["text"] == TEXT


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
