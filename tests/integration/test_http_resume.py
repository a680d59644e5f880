"""Answers that are asked for again: cut at every event, resumed, and equal to the undisturbed ones, byte for byte."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse

from services.dispatcher.build import ModelText
from shared.messages.request import Submit
from shared.types import FinishReason
from sluice_client.sse import SseDecoder, SseEvent
from tests.support.dispatchers import Running, end_id, running_dispatcher
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEXT = "Hello 🦊 world, 你好! The end."

pytestmark = pytest.mark.asyncio(loop_scope="module")


def index_of(submit: Submit) -> int:
    _, _, index = submit.request_id.partition("-")
    return int(index or 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    """A worker that answers with TEXT, choice i after i letters; it goes on after the tokens that it is given."""

    def script(submit: Submit) -> Sequence[int]:
        ids = text.codec.tokenizer.encode("x" * index_of(submit) + TEXT, add_special_tokens=False).ids
        return [*ids, end_id(text)]

    async with running_dispatcher(text, folder, script) as running:
        yield running


_keys = iter(range(10**6))


def new_key() -> str:
    return f"key {next(_keys)}"


def ask(running: Running, key: str, seen: str = "", path: str = CHAT, **body: Any) -> Any:
    """Return the request for a stream; an asynchronous context."""
    headers = {"Idempotency-Key": key, **({"Last-Event-ID": seen} if seen else {})}
    what = {"messages": HELLO} if path == CHAT else {"prompt": "once", "max_tokens": 100}
    body = {"model": "tiny", "stream": True, **what, **body}
    return running.http.post(running.url + path, json=body, headers=headers)


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


def texts_of(events: Sequence[SseEvent], num_choices: int = 1) -> list[str]:
    texts = [""] * num_choices
    for event in events:
        if event.data != "[DONE]":
            for choice in json.loads(event.data).get("choices", ()):
                part = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                texts[choice["index"]] += part
    return texts


def last_of(events: Sequence[SseEvent]) -> dict[str, Any]:
    assert events[-1].data == "[DONE]"
    found: dict[str, Any] = json.loads(events[-2].data)
    return found


def assert_nothing_left(running: Running) -> None:
    assert len(running.dispatcher.service.sessions.table) == 0
    assert len(running.dispatcher.front.live) == 0
    assert len(running.dispatcher.front.streams) == 0


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
            served.dispatcher.front.live._kept.clear()
            served.dispatcher.front.live._num_kept_tokens = 0
        async with ask(served, key, first[k - 1].id, path=path, **body) as response:
            assert response.headers["Idempotency-Key"] == key
            rest = await events_of(response)
        joined = [a + b for a, b in zip(texts_of(first[:k], num_choices), texts_of(rest, num_choices), strict=True)]
        assert joined == texts_of(whole, num_choices)
        if body.get("stream_options"):
            assert last_of(rest)["usage"] == last_of(whole)["usage"]
        reasons = [json.loads(e.data)["choices"] for e in rest[:-1]]
        assert sum(choice["finish_reason"] is not None for choices in reasons for choice in choices) == num_choices
    assert_nothing_left(served)


async def test_an_answer_that_was_cut_off_is_resumed_at_its_worker_and_not_made_again(
    text: ModelText, folder: Path
) -> None:
    """The work stops when the connection goes; the tokens that were there are given to the next attempt."""
    async with running_dispatcher(text, folder) as running:
        worker, key = running.worker, new_key()
        ids = running.encode(TEXT)
        async with ask(running, key) as response:
            await until(lambda: worker.running)
            (item,) = worker.running.values()
            await worker.emit(item, ids[:3])
            got = await events_of(response, 1)
        await worker.wait_cancelled()
        await until(lambda: not len(running.dispatcher.front.live))
        assert worker.running == {}
        assert running.dispatcher.front.live._num_kept_tokens == 3
        async with ask(running, key, got[-1].id) as response:
            await until(lambda: worker.running)
            (item,) = worker.running.values()
            assert item.submit.generated_ids().tolist() == ids[:3]
            assert (item.submit.request_id, item.submit.attempt) == (worker.submits[0].request_id, 2)
            assert item.submit.sampling.seed == worker.submits[0].sampling.seed
            await worker.emit(item, [*ids[3:], end_id(text)], FinishReason.STOP)
            rest = await events_of(response)
        assert texts_of([*got, *rest]) == [TEXT]
        assert_nothing_left(running)


async def test_the_newest_connection_gets_the_answer(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        worker, key = running.worker, new_key()
        ids = running.encode(TEXT)
        async with ask(running, key) as old:
            await until(lambda: worker.running)
            (item,) = worker.running.values()
            await worker.emit(item, ids[:4])
            begun = await events_of(old, 2)
            async with ask(running, key, begun[-1].id) as new:
                await until(lambda: len(worker.submits) == 2 and worker.running)
                (item,) = worker.running.values()
                await worker.emit(item, [*ids[4:], end_id(text)], FinishReason.STOP)
                rest = await events_of(new)
            told = await events_of(old)
        assert json.loads(told[-2].data)["error"]["code"] == "request_superseded"
        assert texts_of([*begun, *rest]) == [TEXT]
        assert [cancel.attempt for cancel in worker.cancels] == [1]
        assert_nothing_left(running)


async def test_a_newer_connection_takes_over_from_one_that_waits_for_room(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        worker, key = running.worker, new_key()
        worker.answers = False
        first = asyncio.create_task(running.http.post(running.url + CHAT, **waiting(key)))
        await until(lambda: worker.submits)
        worker.answers = True
        second = asyncio.create_task(running.http.post(running.url + CHAT, **waiting(key)))
        response = await first
        assert (response.status, (await response.json())["error"]["code"]) == (409, "request_superseded")
        assert response.headers["x-should-retry"] == "false"
        await until(lambda: worker.running)
        (item,) = worker.running.values()
        await worker.emit(item, [*running.encode(TEXT), end_id(text)], FinishReason.STOP)
        response = await second
        assert (await response.json())["choices"][0]["message"]["content"] == TEXT
        assert_nothing_left(running)


def waiting(key: str) -> dict[str, Any]:
    return {"json": {"model": "tiny", "messages": HELLO}, "headers": {"Idempotency-Key": key}}


async def test_two_dispatchers_derive_the_same_names_and_seeds_and_others_do_not(
    text: ModelText, folder: Path, served: Running
) -> None:
    async with running_dispatcher(text, folder, lambda _: [65]) as other:

        async def submit(running: Running, key: str = "k", authorization: str = "Bearer a", **body: Any) -> Submit:
            headers = {"Idempotency-Key": key, "Authorization": authorization}
            body = {"model": "tiny", "messages": HELLO, **body}
            async with running.http.post(running.url + CHAT, json=body, headers=headers) as response:
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
    ("headers", "body", "param"),
    [
        ({"Idempotency-Key": ""}, {}, "Idempotency-Key"),
        ({"Idempotency-Key": "x" * 256}, {}, "Idempotency-Key"),
        ({"Idempotency-Key": "ü"}, {}, "Idempotency-Key"),
        ({"Last-Event-ID": "3"}, {"stream": True}, "Last-Event-ID"),
        ({"Idempotency-Key": "a1", "Last-Event-ID": "3"}, {}, "Last-Event-ID"),
        ({"Idempotency-Key": "a2", "Last-Event-ID": "x"}, {"stream": True}, "Last-Event-ID"),
        ({"Idempotency-Key": "a3", "Last-Event-ID": "3,4"}, {"stream": True}, "Last-Event-ID"),
        ({"Idempotency-Key": "a4", "Last-Event-ID": "3"}, {"stream": True, "n": 2}, "Last-Event-ID"),
        ({"Idempotency-Key": "a5", "Last-Event-ID": ",".join("1" * 17)}, {"stream": True, "n": 17}, "Last-Event-ID"),
        ({"Idempotency-Key": "a6", "Last-Event-ID": "-1"}, {"stream": True}, "Last-Event-ID"),
        ({"Idempotency-Key": "a7", "Last-Event-ID": "1-12345"}, {"stream": True}, "Last-Event-ID"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(
    served: Running, headers: dict[str, str], body: dict[str, Any], param: str
) -> None:
    num_submits = len(served.worker.submits)
    body = {"model": "tiny", "messages": HELLO, **body}
    async with served.http.post(served.url + CHAT, json=body, headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "invalid_value", param)
    assert len(served.worker.submits) == num_submits


@pytest.mark.parametrize("seen", ["3-00000000", "500", "5-{crc}-end"])
async def test_an_answer_that_came_out_differently_is_never_joined_to_the_old_one(served: Running, seen: str) -> None:
    """Another digest, more tokens than there are now, or an end where there is none."""
    crc = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in served.encode(TEXT)[:5]))
    async with ask(served, new_key(), seen.replace("{crc}", f"{crc:08x}")) as response:
        events = await events_of(response)
    assert texts_of(events) == [""]
    assert json.loads(events[-2].data)["error"]["code"] == "resume_mismatch"
    await until(lambda: not len(served.dispatcher.service.sessions.table))


async def test_a_client_that_only_counts_tokens_can_resume_too(served: Running) -> None:
    tokens = served.encode(TEXT)
    async with ask(served, new_key(), "2") as response:
        events = await events_of(response)
    shown = served.dispatcher.front.codec.decode(tokens[:2], skip_special_tokens=True)
    assert shown + texts_of(events)[0] == TEXT


async def test_streams_without_a_key_or_with_many_choices_have_no_ids(served: Running) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    async with served.http.post(served.url + CHAT, json=body) as response:
        assert b"id:" not in (await response.read()).replace(b'"id":', b"")
        assert "Idempotency-Key" not in response.headers
    async with ask(served, new_key(), n=17) as response:
        assert b"\nid:" not in await response.read()
        assert "Idempotency-Key" not in response.headers


async def test_what_is_kept_is_bounded_in_tokens_and_time(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    live = served.dispatcher.front.live
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


async def test_a_silent_stream_with_ids_gets_comments_that_no_sdk_takes_for_an_event(
    text: ModelText, folder: Path
) -> None:
    async with (
        running_dispatcher(text, folder, keep_alive_s=0.5) as running,
        ask(running, new_key()) as response,
    ):
        await response.content.readuntil(b"\n\n")
        async with asyncio.timeout(5):
            assert await response.content.readuntil(b"\n") == b": keep-alive\n"
        (item,) = running.worker.running.values()
        await running.worker.emit(item, [*running.encode("x"), end_id(text)], FinishReason.STOP)
        rest = (await response.read()).replace(b": keep-alive\n", b"")  # there may be more of them by now
        assert rest.startswith(b"id: ")
        assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_that_breaks_off_never_looks_like_a_whole_one(
    text: ModelText, folder: Path, version: bytes
) -> None:
    """Neither a last chunk nor an orderly end of the connection: a reset."""
    async with running_dispatcher(text, folder) as running:
        data = json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        head = b"POST %b HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), version, len(data))
        writer.write(head + data)
        await reader.readuntil(b"assistant")
        (stream,) = running.dispatcher.front.streams._open
        stream._transport.close()  # what the system does when the process is killed
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await until(lambda: not len(running.dispatcher.service.sessions.table))
