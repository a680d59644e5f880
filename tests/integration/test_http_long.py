"""Long bodies and long answers: none of them keeps the event loop, and an answer waits for a slow reader.

Callbacks are measured in processor time of the loop's thread (`timed_callbacks`); the clients are threads of their own.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from services.dispatcher.answers.generate import MAX_KEPT_LOGPROBS
from services.dispatcher.endpoints.completions import MAX_ECHOED_CHARS
from services.dispatcher.endpoints.tokenize import MAX_LISTED_TOKENS
from services.dispatcher.http.body import parse_object
from services.dispatcher.http.sse import PIECE_BYTES, Outgoing
from shared.types import MAX_TOP_LOGPROBS
from sluice_client.sse import SseDecoder
from tests.support.callbacks import timed_callbacks
from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO, Running, Serve, texts_of
from tests.support.fake_worker import make_status
from tests.support.raw_http import connect_narrow
from tests.support.socket_talks import talk
from tests.support.waiting import until

LIMIT_S = 0.1
"""Longest callback."""
CONTEXT = 300_000
BODY_BYTES = 4 * 1024 * 1024 - 4096

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """As in the dispatcher's own process, what was there before is not looked through for garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def large_context(running: Running) -> None:
    await running.view(make_status(max_model_len=CONTEXT, num_blocks=CONTEXT, max_sequences=1000))


def post(running: Running, path: str, data: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Send a request from this thread, and return status and body."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    status, body = response.status, response.read()
    connection.close()
    return status, body


def filled(before: str, item: str, after: str, most: int = 10**9) -> bytes:
    """Return JSON with as many items as a body may have, or as are allowed."""
    count = min(most, (BODY_BYTES - len(before) - len(after)) // (len(item) + 1))
    return (before + ",".join([item] * count) + after).encode()


PROMPT = '{"model":"tiny","max_tokens":2,"prompt":['
OTHER = '{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"a"}],"other":['
PARTS = '{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":['
LONG: dict[str, tuple[str, bytes, int]] = {
    "ids": (COMPLETIONS, filled(PROMPT, "300", "]}"), 400),
    "prompts": (COMPLETIONS, filled(PROMPT, "[300]", "]}", 199_000), 400),
    "numbers": (CHAT, filled(OTHER, "1", "]}"), 200),
    "arrays": (CHAT, filled(OTHER, "[]", "]}", 199_000), 200),
    "parts": (CHAT, filled(PARTS, '{"type":"text","text":""}', "]}]}", 9_999), 200),
    "detokenize": ("/v1/detokenize", filled('{"tokens":[', "300", "]}", MAX_LISTED_TOKENS), 200),
    "tokenize": ("/v1/tokenize", json.dumps({"prompt": "fox " * 60_000, "return_token_strs": True}).encode(), 200),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LONG)
async def test_long_bodies_keep_the_loop_for_less_than_it_takes_to_read_one(serve: Serve, what: str) -> None:
    """Four at once; each with a key, whose request is known by a digest of all that is in its body."""
    path, data, expected = LONG[what]
    async with serve("fox") as running:
        await large_context(running)
        with timed_callbacks() as seen:
            headers = [{"Idempotency-Key": str(number)} for number in range(4)]
            answers = await asyncio.gather(*(asyncio.to_thread(post, running, path, data, each) for each in headers))
    assert [status for status, _ in answers] == [expected] * 4, answers[0][1][:300]
    assert seen.longest_s < min(LIMIT_S, reading_s(data)), seen.longest


def reading_s(data: bytes) -> float:
    """Processor time that it takes to read a body, at least 20 ms: smaller ones are not what this is about."""
    began_s = time.thread_time()
    parse_object(data)
    return max(time.thread_time() - began_s, 0.02)


@pytest.mark.slow
async def test_a_long_message_over_a_websocket_does_not_keep_the_loop_either(serve: Serve) -> None:
    body = LONG["numbers"][1].decode()
    async with serve("fox") as running, talk(running) as client:
        message = f'{{"type":"request","id":"a","body":{body}}}'
        with timed_callbacks() as seen:
            await client.socket.send_str(message)
            heard = (await client.all_of("a"))["a"]
    assert [each["type"] for each in heard][-1] == "done"
    assert texts_of([each["data"] for each in heard if each["type"] == "event"]) == ["fox"]
    assert seen.longest_s < min(LIMIT_S, reading_s(body.encode())), seen.longest


async def test_the_answer_to_a_short_body_does_not_wait_for_long_ones(serve: Serve) -> None:
    async with serve("fox") as running:
        running.front.bodies.num_pending = running.front.settings.max_tokenizing
        status, body = await asyncio.to_thread(post, running, *LONG["parts"][:2])
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        assert (await running.post())[0] == 200
        async with talk(running) as client:
            message = f'{{"type":"request","id":"a","body":{LONG["parts"][1].decode()}}}'
            await client.socket.send_str(message)
            error = await client.hear()
            assert (error["type"], error["id"], error["status"]) == ("error", None, 429)
        running.front.bodies.num_pending = 0


@pytest.mark.parametrize("is_http", [True, False])
async def test_long_bodies_of_best_effort_wait_apart(serve: Serve, *, is_http: bool) -> None:
    """Either crowd is full; the other one's next body is read."""
    path, body = LONG["parts"][:2]
    flex = body[:1] + b'"service_tier": "flex", ' + body[1:]

    async def said(running: Running, asked: bytes) -> str:
        if is_http:
            _, answer = await asyncio.to_thread(post, running, path, asked)
            return str(json.loads(answer).get("error", {}).get("code", "served"))
        async with talk(running) as client:
            await client.socket.send_str(f'{{"type":"request","id":"a","body":{asked.decode()}}}')
            heard = await client.hear()
            return str(heard["error"]["code"] if heard["type"] == "error" else "served")

    async with serve("fox") as running:
        pool = running.front.bodies
        pool.num_pending = running.front.settings.max_tokenizing
        assert [await said(running, each) for each in (body, flex)] == ["queue_full", "served"]
        pool.num_pending, pool._num_flex = 0, running.front.settings.max_queued_flex
        assert [await said(running, each) for each in (body, flex)] == ["served", "resource_unavailable"]
        pool._num_flex = 0


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_many_choices_with_many_log_probabilities_keep_the_loop_no_longer_than_a_step(
    serve: Serve, streamed: bool
) -> None:
    num_choices, num_tokens = 32, 150
    async with serve(lambda _: [65] * num_tokens) as running:
        await large_context(running)
        fields = {"n": num_choices, "max_tokens": num_tokens, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS}
        data = json.dumps({"model": "tiny", "messages": HELLO, "stream": streamed, **fields}).encode()
        with timed_callbacks() as seen:
            status, body = await asyncio.to_thread(post, running, CHAT, data)
    assert status == 200
    assert body.count(b'"bytes":') == num_choices * num_tokens * (1 + MAX_TOP_LOGPROBS)
    assert seen.longest_s < LIMIT_S, seen.longest


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"n": 128, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20}, MAX_KEPT_LOGPROBS // (128 * 21)),
        ({"n": 100, "logprobs": True}, MAX_KEPT_LOGPROBS // 100),
    ],
)
async def test_more_log_probabilities_than_are_kept_are_refused_by_name_unless_they_are_streamed(
    serve: Serve, fields: dict[str, Any], most: int
) -> None:
    async with serve("fox") as running:
        await large_context(running)
        status, body = await running.post(**fields)
        error = body["error"]
        assert (status, error["code"], error["param"]) == (400, "integer_above_max_value", "max_tokens")
        assert f"at most {most}." in error["message"]
        assert running.worker.submits == []
        assert (await running.post(**{**fields, "max_tokens": most, "n": 1}))[0] == 200
        assert texts_of(await running.stream(**fields), fields["n"]) == ["fox"] * fields["n"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_long_whole_answer_comes_in_pieces_and_is_what_a_short_one_is(serve: Serve, version: str) -> None:
    prompt = 'Ein "Fuchs" \u2028 🦊\n' * 8000
    async with serve("fox") as running:
        await large_context(running)
        own = aiohttp.HttpVersion10 if version == "1.0" else aiohttp.HttpVersion11
        async with aiohttp.ClientSession(version=own) as client:
            body = {"model": "tiny", "prompt": prompt, "echo": True, "n": 3, "max_tokens": 9}
            async with client.post(running.url + COMPLETIONS, json=body) as response:
                raw = await response.read()
                assert response.content_type == "application/json"
                assert "Content-Length" not in response.headers
        assert len(raw) > 3 * PIECE_BYTES
        assert [choice["text"] for choice in json.loads(raw)["choices"]] == [prompt + "fox"] * 3
        async with running.ask() as short:
            assert int(short.headers["Content-Length"]) == len(await short.read())


ECHOED = "The quick brown fox jumps over the lazy dog. " * 4000
ECHO = {"model": "tiny", "prompt": ECHOED, "echo": True, "n": 32, "max_tokens": 9}


def num_taken(outgoing: Outgoing) -> int:
    return outgoing.num_written - outgoing.num_unsent_bytes - outgoing._num_in_kernel()


async def slow_reader(running: Running, *, streamed: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for 6 MB of answer over a connection that takes next to nothing by itself."""
    data = json.dumps({**ECHO, "stream": streamed}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return await connect_narrow(running.url, head + data)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reader_that_takes_little_gets_all_of_it_and_one_that_takes_nothing_is_cut(
    serve: Serve, streamed: bool
) -> None:
    """A little in 20 seconds, again and again, by a clock of the test's: what waits for it stays small all the time."""
    async with serve("fox", max_unsent=1_000_000) as running:
        await large_context(running)
        streams, clock_s = running.front.streams, [running.front.now()]
        reader, writer = await slow_reader(running, streamed=streamed)
        await until(lambda: any(outgoing.num_unsent_bytes for outgoing in streams._open), limit_s=30.0)
        streams.now = lambda: clock_s[0]
        (outgoing,) = streams._open
        for _ in range(20):
            before = num_taken(outgoing)
            await reader.readexactly(20_000)
            await until(lambda before=before: num_taken(outgoing) > before)
            clock_s[0] += 20.0
            streams.sweep()
            assert streams.num_cut == 0
            assert outgoing.num_unsent_bytes < 1_000_000
        if streamed:
            clock_s[0] += 31.0
            streams.sweep()
            clock_s[0] += 31.0
            streams.sweep()
            assert streams.num_cut == 1
        else:
            raw = await reader.read()
            assert raw.count(b"fox jumps") > 20_000
            assert raw.endswith(b"}")
        writer.transport.abort()
        await running.until_nothing_is_left()


async def test_an_echo_that_no_event_can_hold_is_refused_by_name(serve: Serve) -> None:
    async with serve("fox") as running:
        await large_context(running)
        data = json.dumps({"model": "tiny", "prompt": "a" * (MAX_ECHOED_CHARS + 1), "echo": True}).encode()
        status, body = await asyncio.to_thread(post, running, COMPLETIONS, data)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (400, "string_above_max_length", "prompt")


async def test_a_resumed_answer_of_many_tokens_is_handed_on_in_parts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stop string never comes, so that each token's text is searched; others have their turns in between."""
    monkeypatch.setattr("services.dispatcher.answers.answers.MAX_TOKENS_AT_ONCE", 16)
    async with serve("The quick brown fox jumps. " * 20) as running:
        headers, stop = {"Idempotency-Key": "k"}, ["nowhere", "zzz"]
        async with running.ask(headers=headers, stop=stop) as response:
            whole = (await response.json())["choices"][0]["message"]["content"]
        async with running.ask(headers=headers, stream=True, stop=stop) as response:
            told = SseDecoder().feed(await response.read())
    events = [json.loads(event.data) for event in told if event.data != "[DONE]"]
    assert texts_of(events) == [whole]
    counts = [event["sluice"]["n"] for event in events if "n" in event.get("sluice", {})]
    assert len(counts) > 5
    assert max(counts) <= 16 + 1  # the end token comes with the last text
