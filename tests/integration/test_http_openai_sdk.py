"""The `openai` package against the dispatcher: chat and completions, streamed and not, errors, early close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.dispatcher.http.sse import EventStream
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.dispatchers import HELLO, Running, Serve

TEXT = "Hello 🦊 world"
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 50}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(TEXT, queue_limit_s=0.1) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("count", [1, 3])
async def test_chat_whole_and_streamed_say_the_same(client: openai.AsyncOpenAI, served: Running, count: int) -> None:
    served.worker.cached_tokens = 8
    whole = await client.chat.completions.create(**CHAT, n=count)
    assert [(each.index, each.message.content) for each in whole.choices] == [(i, TEXT) for i in range(count)]
    assert {each.finish_reason for each in whole.choices} == {"stop"}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == count * (len(served.encode(TEXT)) + 1)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 8
    chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, **STREAM, n=count)]
    for index in range(count):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert (own[0].delta.role, own[-1].finish_reason) == ("assistant", "stop")
    assert chunks[-1].usage == whole.usage


async def test_completions_whole_and_streamed_say_the_same(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(**COMPLETION)
    assert whole.choices[0].text == TEXT
    streamed = await client.completions.create(**COMPLETION, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in streamed]) == TEXT


async def test_log_probabilities_whole_and_streamed(client: openai.AsyncOpenAI, served: Running) -> None:
    whole = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(served.encode(TEXT))
    streamed = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True)
    told = [chunk.choices[0].logprobs async for chunk in streamed]
    assert [entry for logprobs in told if logprobs is not None for entry in logprobs.content or []] == entries


async def test_penalties_bias_and_what_the_sdk_does_not_know_reach_the_worker(
    client: openai.AsyncOpenAI, served: Running
) -> None:
    await client.chat.completions.create(
        **CHAT,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "cache_salt": "mine"},
    )
    submit = served.worker.submits[-1]
    sampling = submit.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.5, -0.5, 0.1)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.logit_bias) == (1.2, 3, ((7, -100.0),))
    assert submit.cache_salt


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "sluice"


async def test_errors_become_the_sdks_exceptions(client: openai.AsyncOpenAI, served: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**{**CHAT, "model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**CHAT, temperature=3, stream=True)
    assert (bad.value.code, bad.value.param) == ("decimal_above_max_value", "temperature")
    served.worker.refuse = RefusalReason.FULL
    with pytest.raises(openai.RateLimitError) as full:
        await client.completions.create(**COMPLETION)
    assert full.value.code == "queue_full"
    assert isinstance(full.value.body, dict)
    assert full.value.body["help"] == "/errors/queue_full"
    served.worker.refuse = None


async def test_an_error_in_the_middle_of_a_stream_is_raised(client: openai.AsyncOpenAI, served: Running) -> None:
    served.worker.finish = FinishReason.ERROR
    streamed = await client.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError) as failed:
        async for _ in streamed:
            pass
    assert failed.value.code == "request_failed"
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["help"] == "/errors/request_failed"
    served.worker.finish = FinishReason.STOP


async def test_closing_a_stream_early_cancels_the_request(client: openai.AsyncOpenAI, served: Running) -> None:
    served.worker.script = None
    streamed = await client.chat.completions.create(**CHAT, stream=True)
    await anext(aiter(streamed))
    assert len(served.worker.running) == 1
    await streamed.close()
    await served.worker.wait_cancelled()
    assert served.worker.running == {}
    await served.until_nothing_is_left()


async def test_the_sdk_retries_overload_and_then_succeeds(served: Running) -> None:
    """The default client tries three times; the worker has room from the second on."""
    served.worker.refuse = RefusalReason.FULL

    async def make_room() -> None:
        while not served.worker.submits:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        served.worker.refuse = None

    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
        room = asyncio.create_task(make_room())
        answer = await client.completions.create(**COMPLETION)
        await room
    assert answer.choices[0].text == TEXT


async def test_a_stream_with_event_ids_and_comments_is_read_to_its_end(serve: Serve) -> None:
    """The SDK takes a blank line for an event once it has seen an id: our comments have none then."""
    async with (
        serve(keep_alive_s=0.3) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers={"Idempotency-Key": "mine"})
        (item,) = await running.begun()
        first = await anext(aiter(stream))
        assert first.choices[0].delta.role == "assistant"
        (open_stream,) = running.front.streams._open
        assert isinstance(open_stream, EventStream)
        while open_stream.last_write_s + 0.3 > asyncio.get_running_loop().time():
            await asyncio.sleep(0.05)
        running.front.streams.sweep()
        await running.worker.emit(item, running.encode(TEXT), FinishReason.LENGTH)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
