"""Answers that are asked for again: cut at every event, resumed, and equal to the undisturbed ones, byte for byte."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse

from shared.messages.request import Submit
from sluice_client.sse import SseDecoder, SseEvent
from tests.support.dispatchers import CHAT, COMPLETIONS, TEXT, Running, Serve, index_of
from tests.support.dispatchers import texts_of as texts_of_events
from tests.support.raw_http import chat_bytes, connect
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """A worker that answers with TEXT, choice i after i letters; it goes on after the tokens that it is given."""

    def script(submit: Submit) -> Sequence[int]:
        return [*running.encode("x" * index_of(submit) + TEXT), running.end_id]

    async with serve(script) as running:
        yield running


_keys = iter(range(10**6))


def new_key() -> str:
    return f"key {next(_keys)}"


def ask(running: Running, key: str, seen: str = "", path: str = CHAT, **body: Any) -> Any:
    """Return the request for a stream; an asynchronous context."""
    headers = {"Idempotency-Key": key, **({"Last-Event-ID": seen} if seen else {})}
    return running.ask(path, headers, **{"stream": True, "max_tokens": 100, **body})


async def events_of(response: ClientResponse, count: int | None = None) -> list[SseEvent]:
    """Return the first events, or all."""
    assert response.status == 200, await response.text()
    decoder = SseDecoder()
    events: list[SseEvent] = []
    async for part in response.content.iter_any():
        events += decoder.feed(part)
        if count is not None and len(events) >= count:
            return events[:count]
    return events


def as_json(events: Sequence[SseEvent]) -> Iterator[Any]:
    return (json.loads(event.data) for event in events if event.data != "[DONE]")


def texts_of(events: Sequence[SseEvent], num_choices: int = 1) -> list[str]:
    return texts_of_events(as_json(events), num_choices)


def last_of(events: Sequence[SseEvent]) -> dict[str, Any]:
    assert events[-1].data == "[DONE]"
    found: dict[str, Any] = json.loads(events[-2].data)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"stop": ["end", "zzz"]}),
        (CHAT, {"stop": "T"}),
        (CHAT, {"stop": "nowhere, but begins like no"}),
        (CHAT, {"max_tokens": 7}),
        (CHAT, {"logprobs": True}),
        (CHAT, {"n": 3}),
        (CHAT, {"n": 2, "stop": "world", "logprobs": True}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"prompt": ["once", "upon"], "n": 2, "echo": True}),
    ],
)
async def test_a_stream_cut_after_any_event_goes_on_from_there(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    """The client has the first k events and asks again with the id of the last one: the rest is what it lacks.

    Every other time as by way of another dispatcher, which knows nothing of the request.
    """
    num_choices = body.get("n", 1) * (len(body["prompt"]) if "prompt" in body else 1)
    async with ask(served, new_key(), path=path, **body) as response:
        whole = await events_of(response)
    key = new_key()
    async with ask(served, key, path=path, **body) as response:
        first = await events_of(response)
    assert texts_of(first, num_choices) == texts_of(whole, num_choices)
    cuts = [k for k, event in enumerate(first, 1) if event.data != "[DONE]"]
    for k in cuts:
        if k % 2:
            served.front.live._kept.clear()
            served.front.live._num_kept_tokens = 0
        async with ask(served, key, first[k - 1].id, path=path, **body) as response:
            assert response.headers["Idempotency-Key"] == key
            rest = await events_of(response)
        joined = [a + b for a, b in zip(texts_of(first[:k], num_choices), texts_of(rest, num_choices), strict=True)]
        assert joined == texts_of(whole, num_choices)
        if body.get("stream_options"):
            assert last_of(rest)["usage"] == last_of(whole)["usage"]
        choices = [choice for event in as_json(rest) for choice in event["choices"]]
        assert sum(choice["finish_reason"] is not None for choice in choices) == num_choices
    await served.until_nothing_is_left()


async def test_an_answer_that_was_cut_off_is_resumed_at_its_worker_and_not_made_again(running: Running) -> None:
    """The work stops when the connection goes; the tokens that were there are given to the next attempt."""
    worker, key, ids = running.worker, new_key(), running.encode(TEXT)
    async with ask(running, key) as response:
        (first,) = await running.begun()
        await worker.emit(first, ids[:3])
        got = await events_of(response, 1)
    await worker.wait_cancelled()
    await running.until_nothing_is_left()
    assert running.front.live._num_kept_tokens == 3
    async with ask(running, key, got[-1].id) as response:
        (item,) = await running.begun()
        assert item.submit.generated_ids().tolist() == ids[:3]
        assert (item.submit.request_id, item.submit.attempt) == (first.submit.request_id, 2)
        assert item.submit.sampling.seed == first.submit.sampling.seed
        await worker.emit(item, ids[3:])
        await running.end(item)
        rest = await events_of(response)
    assert texts_of([*got, *rest]) == [TEXT]
    await running.until_nothing_is_left()


async def test_the_newest_connection_gets_the_answer(running: Running) -> None:
    worker, key, ids = running.worker, new_key(), running.encode(TEXT)
    async with ask(running, key) as old:
        (item,) = await running.begun()
        await worker.emit(item, ids[:4])
        begun = await events_of(old, 2)
        async with ask(running, key, begun[-1].id) as new:
            await until(lambda: len(worker.submits) == 2)
            (item,) = await running.begun()
            await worker.emit(item, ids[4:])
            await running.end(item)
            rest = await events_of(new)
        told = await events_of(old)
    assert last_of(told)["error"]["code"] == "request_superseded"
    assert texts_of([*begun, *rest]) == [TEXT]
    assert [cancel.attempt for cancel in worker.cancels] == [1]
    await running.until_nothing_is_left()


async def test_a_newer_connection_takes_over_from_one_that_waits_for_room(running: Running) -> None:
    worker, key = running.worker, {"Idempotency-Key": new_key()}
    worker.answers = False
    first = asyncio.create_task(running.ask(headers=key))
    await until(lambda: worker.submits)
    worker.answers = True
    second = asyncio.create_task(running.ask(headers=key))
    response = await first
    assert (response.status, (await response.json())["error"]["code"]) == (409, "request_superseded")
    assert response.headers["x-should-retry"] == "false"
    (item,) = await running.begun()
    await running.end(item, TEXT)
    response = await second
    assert (await response.json())["choices"][0]["message"]["content"] == TEXT
    await running.until_nothing_is_left()


async def test_two_dispatchers_derive_the_same_names_and_seeds_and_others_do_not(serve: Serve, served: Running) -> None:
    async with serve("hi") as other:

        async def submit(running: Running, key: str = "k", authorization: str = "Bearer a", **body: Any) -> Submit:
            headers = {"Idempotency-Key": key, "Authorization": authorization}
            async with running.ask(headers=headers, **body) as response:
                assert response.status == 200
            return running.worker.submits[-1]

        mine, theirs = await submit(served), await submit(other)
        assert mine.request_id == theirs.request_id
        assert mine.sampling.seed == theirs.sampling.seed
        await submit(served, n=2, key="n")
        assert [s.request_id.partition("-")[2] for s in served.worker.submits[-2:]] == ["", "1"]
        different = [
            await submit(other, key="k2"),
            await submit(other, authorization="Bearer b"),
            await submit(served, key="k3", temperature=0.5),
        ]
        assert len({mine.request_id, *(each.request_id for each in different)}) == 4
        assert (await submit(served, key="k4", seed=5)).sampling.seed == 5


async def test_a_key_belongs_to_one_body(served: Running) -> None:
    key = new_key()
    async with ask(served, key) as response:
        await events_of(response)
    async with ask(served, key, temperature=0.3) as response:
        assert response.status == 422
        assert response.headers["x-should-retry"] == "false"
        assert (await response.json())["error"]["code"] == "idempotency_mismatch"
    async with ask(served, key, stream=False) as response:  # how it is sent does not matter
        assert (await response.json())["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("key", "seen", "body"),
    [
        ("", None, {}),
        ("x" * 256, None, {}),
        ("ü", None, {}),
        (None, "3", {"stream": True}),
        ("a1", "3", {}),
        ("a2", "x", {"stream": True}),
        ("a3", "3,4", {"stream": True}),
        ("a4", "3", {"stream": True, "n": 2}),
        ("a5", ",".join("1" * 17), {"stream": True, "n": 17}),
        ("a6", "-1", {"stream": True}),
        ("a7", "1-12345", {"stream": True}),
    ],
)
async def test_what_cannot_be_resumed_is_refused(
    served: Running, key: str | None, seen: str | None, body: dict[str, Any]
) -> None:
    num_submits = len(served.worker.submits)
    given = {"Idempotency-Key": key, "Last-Event-ID": seen}
    async with served.ask(
        headers={name: value for name, value in given.items() if value is not None}, **body
    ) as response:
        error = (await response.json())["error"]
    param = "Idempotency-Key" if seen is None else "Last-Event-ID"
    assert (response.status, error["code"], error["param"]) == (400, "invalid_value", param)
    assert len(served.worker.submits) == num_submits


@pytest.mark.parametrize("seen", ["3-00000000", "500", "5-{crc}-end"])
async def test_an_answer_that_came_out_differently_is_never_joined_to_the_old_one(served: Running, seen: str) -> None:
    """Another digest, more tokens than there are now, or an end where there is none."""
    crc = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in served.encode(TEXT)[:5]))
    async with ask(served, new_key(), seen.replace("{crc}", f"{crc:08x}")) as response:
        events = await events_of(response)
    assert texts_of(events) == [""]
    assert last_of(events)["error"]["code"] == "resume_mismatch"
    await served.until_nothing_is_left()


async def test_a_client_that_only_counts_tokens_can_resume_too(served: Running) -> None:
    tokens = served.encode(TEXT)
    async with ask(served, new_key(), "2") as response:
        events = await events_of(response)
    shown = served.front.codec.decode(tokens[:2], skip_special_tokens=True)
    assert shown + texts_of(events)[0] == TEXT


async def test_streams_without_a_key_or_with_many_choices_have_no_ids(served: Running) -> None:
    async with served.ask(stream=True) as response:
        assert b"id:" not in (await response.read()).replace(b'"id":', b"")
        assert "Idempotency-Key" not in response.headers
    async with ask(served, new_key(), n=17) as response:
        assert b"\nid:" not in await response.read()
        assert "Idempotency-Key" not in response.headers


async def test_what_is_kept_is_bounded_in_tokens_and_time(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    live = served.front.live
    live._kept.clear()
    live._num_kept_tokens = 0
    num_tokens = len(served.encode(TEXT)) + 1
    monkeypatch.setattr("services.dispatcher.answers.live.MAX_KEPT_TOKENS", 3 * num_tokens)
    for _ in range(5):
        async with ask(served, new_key()) as response:
            await events_of(response)
    await until(lambda: not len(live))
    assert live._num_kept_tokens == 3 * num_tokens
    monkeypatch.setattr("services.dispatcher.answers.live.KEEP_S", -1.0)
    live._forget_old()
    assert (live._num_kept_tokens, len(live._kept)) == (0, 0)


async def test_a_silent_stream_with_ids_gets_comments_that_no_sdk_takes_for_an_event(serve: Serve) -> None:
    async with serve(keep_alive_s=0.5) as running, ask(running, new_key()) as response:
        await response.content.readuntil(b"\n\n")
        async with asyncio.timeout(5):
            assert await response.content.readuntil(b"\n") == b": keep-alive\n"
        (item,) = await running.begun()
        await running.end(item, "x")
        rest = (await response.read()).replace(b": keep-alive\n", b"")  # there may be more of them by now
        assert rest.startswith(b"id: ")
        assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_that_breaks_off_never_looks_like_a_whole_one(running: Running, version: str) -> None:
    """Neither a last chunk nor an orderly end of the connection: a reset."""
    reader, writer = await connect(running.url)
    writer.write(chat_bytes(version, stream=True))
    await reader.readuntil(b"assistant")
    (stream,) = running.front.streams._open
    stream._transport.close()  # what the system does when the process is killed
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await running.until_nothing_is_left()
