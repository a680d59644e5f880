"""The SDK against a small server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from sluice_client import (
    APIConnectionError,
    APIStatusError,
    APIStreamError,
    AsyncSluiceClient,
    ClientLimits,
    ConnectionLostError,
    IncompleteStreamError,
    ProtocolError,
    QoeTarget,
    RetryPolicy,
)
from sluice_client.protocol import AnswerRecord
from tests.support.openai_server import (
    FINISH,
    ROLE,
    WHOLE,
    WORDS,
    Server,
    chunk,
    delta,
    events,
    refuse,
    running,
    say,
    stream,
)

FAST = QoeTarget(ttft_s=0.001, speed_tokens_per_s=10_000.0)
LIMITS = ClientLimits(retry=RetryPolicy(first_backoff_s=0.001, max_backoff_s=0.004))


@asynccontextmanager
async def serving(
    *replies: Any, limits: ClientLimits = LIMITS, **options: Any
) -> AsyncIterator[tuple[AsyncSluiceClient, Server]]:
    server = Server(*replies)
    async with (
        running(server) as url,
        AsyncSluiceClient(url, limits=limits, rng=random.Random(1), **options) as client,
    ):
        yield client, server


@pytest.mark.parametrize("pace", ["reading", "smooth", "off"])
async def test_a_chat_streams_its_text_and_then_knows_all_about_it(pace: Any) -> None:
    async with serving(stream(WHOLE, request_id="r-7"), api_key="secret", model="demo") as (client, server):
        answer = client.chat([{"role": "user", "content": "hi"}], pace=pace, qoe=FAST, max_tokens=9)
        assert "".join([piece async for piece in answer]) == "".join(WORDS) == answer.text
        assert answer.finish_reason == "stop"
        assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        assert answer.request_id == "r-7"
        assert answer.model == "demo"
        assert answer.server_stats == {"qoe": 0.97, "ttft_s": 0.2, "tokens": 6}
        assert 0 <= answer.qoe <= 1
        assert answer.ttft_s is not None
        assert 0 < answer.ttft_s < 10
        assert answer.stats.buffered_tokens == 0
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "qoe": {"ttft_s": 0.001, "speed_tokens_per_s": 10_000.0},
    }


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_chunks_cut_anywhere_keep_alives_and_line_ends_change_nothing(size: int) -> None:
    """A piece border inside a code point, inside CR LF, and between; a comment before, between and after events."""
    raw = b": hello\r\n\r\n" + WHOLE.replace(b"\n\n", b"\r\n\r\n: keep-alive\r\n\r\n")
    parts = [raw[i : i + size] for i in range(0, len(raw), size)]
    async with serving(stream(*parts)) as (client, _):
        assert await client.chat("hi", model="demo", qoe=FAST).read() == "".join(WORDS)


async def test_completions_stream_text_and_take_token_ids() -> None:
    raw = events(
        {"id": "c", "choices": [{"index": 0, "text": "a ", "finish_reason": None}]},
        {"id": "c", "choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
    )
    async with serving(stream(raw)) as (client, server):
        answer = client.complete([1, 2, 3], "demo", pace="off")
        assert [piece async for piece in answer] in (["a ", "b"], ["a b"])
        assert (answer.finish_reason, answer.request_id, answer.usage) == ("length", "c", None)
    assert server.requests[0][0] == "/v1/completions"
    assert server.posts[0]["prompt"] == [1, 2, 3]
    assert "qoe" not in server.posts[0]


async def test_chunks_of_several_tokens_count_as_such() -> None:
    raw = events(
        delta("ab", sluice={"n": 3}), delta("c"), delta("", sluice={"n": 2}), delta("d", sluice={"n": -1}), FINISH
    )
    async with serving(stream(raw)) as (client, _):
        answer = client.chat("hi", "demo", pace="reading", qoe=QoeTarget(0.001, 1000.0))
        async for _ in answer:
            pass
        assert answer.text == "abcd"
        assert answer._stream.pacer._state.num_tokens == 3 + 1 + 2 + 1


def test_the_reader_s_timeline_begins_behind_the_thinking_and_its_tags() -> None:
    """A tag has tokens and no text; a chunk may end the thinking and begin the text."""
    record = AnswerRecord()

    def take(num_tokens: int, **delta: str) -> tuple[str, int, bool] | None:
        piece = record.take_chunk({"choices": [{"index": 0, "delta": delta}], "sluice": {"n": num_tokens}})
        return None if piece is None else (piece.text, piece.num_tokens, piece.thinks)

    assert take(1) == ("", 1, False)
    assert [take(2, reasoning="hm, "), take(1), take(0)] == [("", 0, True), ("", 0, True), None]
    assert [take(2, reasoning="yes", content="so"), take(1), take(1, content="!")] == [
        ("so", 2, True),
        ("", 1, False),
        ("!", 1, False),
    ]


async def test_tool_calls_and_reasoning_are_collected_and_not_displayed() -> None:
    def call(**fields: Any) -> dict[str, Any]:
        return chunk(choices=[{"index": 0, "delta": fields, "finish_reason": None}])

    raw = events(
        call(reasoning_content="hm, "),
        {**call(reasoning_content="yes", reasoning="yes"), "sluice": {"n": 3}},
        call(tool_calls=[{"index": 0, "id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        {**call(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]), "sluice": {"n": 2}},
        call(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]),
    )
    async with serving(stream(raw)) as (client, _):
        answer = client.chat("hi", "demo")
        assert await answer.read() == ""
        assert answer.reasoning == "hm, yes"
        assert answer._stream.pacer._state.num_tokens == 0
        assert answer.tool_calls == [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ]


@pytest.mark.parametrize("pace", ["reading", "smooth", "off"])
@pytest.mark.parametrize(
    ("tail", "lose", "error", "match"),
    [
        (
            events({"error": {"message": "worker lost", "type": "server_error", "code": "lost"}}),
            False,
            APIStreamError,
            "worker lost",
        ),
        (events({"error": "plain"}), False, APIStreamError, "plain"),
        (b"", True, ConnectionLostError, "broke off"),
        (b"", False, IncompleteStreamError, "finish reason"),
        (events("[DONE]"), False, IncompleteStreamError, "finish reason"),
        (b'data: {"choices": [{"del', False, ProtocolError, "not JSON"),
        (events("[1, 2]"), False, ProtocolError, "not an object"),
        (events({"choices": 3}), False, ProtocolError, "choices"),
        (events(chunk(choices=[{"index": 0, "delta": {"content": 5}}])), False, ProtocolError, "content"),
        (b"data: \xff\n\n", False, ProtocolError, "UTF-8"),
    ],
)
async def test_an_answer_that_is_cut_raises_after_the_text_that_came(
    pace: Any, tail: bytes, lose: bool, error: type[Exception], match: str
) -> None:
    async with serving(stream(events(ROLE, delta("so "), delta("far")), tail, lose=lose)) as (client, server):
        seen, answer = [], client.chat("hi", "demo", pace=pace, qoe=FAST)
        with pytest.raises(error, match=match) as caught:  # noqa: PT012  the loop shows what came before the error
            async for piece in answer:
                seen.append(piece)
        assert "".join(seen) == answer.text == "so far"
        assert answer.finish_reason is None
        assert len(server.posts) == 1, "no retry after the first token"
        if isinstance(caught.value, APIStreamError) and match == "worker lost":
            assert (caught.value.code, caught.value.kind, caught.value.request_id) == ("lost", "server_error", "chat-1")


async def test_a_connection_lost_after_the_finish_reason_loses_nothing() -> None:
    async with serving(stream(events(delta("all"), FINISH), lose=True)) as (client, _):
        answer = client.chat("hi", "demo")
        assert await answer.read() == "all"
        assert answer.finish_reason == "stop"


async def test_silence_longer_than_the_limit_is_a_lost_connection() -> None:
    limits = ClientLimits(idle_timeout_s=1.0)  # it also holds for the headers
    async with serving(stream(events(delta("so far")), hang=True), limits=limits) as (client, _):
        with pytest.raises(ConnectionLostError):
            await client.chat("hi", "demo").read()


async def test_an_event_larger_than_the_limit_is_refused() -> None:
    limits = ClientLimits(max_event_bytes=1000)
    async with serving(stream(events(delta("x" * 2000), FINISH)), limits=limits) as (client, _):
        with pytest.raises(ProtocolError, match="1000 bytes"):
            await client.chat("hi", "demo").read()


@pytest.mark.parametrize("status", [429, 503])
async def test_overload_is_retried_before_the_first_token(status: int) -> None:
    replies = (refuse(status), refuse(status, **{"retry-after": "0.01"}), stream(WHOLE))
    async with serving(*replies) as (client, server):
        assert await client.chat("hi", "demo").read() == "".join(WORDS)
        assert len(server.posts) == 3


async def test_retries_end_with_the_servers_own_error() -> None:
    async with serving(refuse(429, "try later", **{"retry-after": "0.002", "x-request-id": "r9"})) as (client, server):
        with pytest.raises(APIStatusError, match="429: try later") as caught:
            await client.chat("hi", "demo").read()
        error = caught.value
        assert (error.status, error.code, error.kind) == (429, "too_many", "overloaded")
        assert (error.request_id, error.retry_after_s) == ("r9", 0.002)
        assert len(server.posts) == 1 + LIMITS.retry.max_retries


@pytest.mark.parametrize(
    "reply",
    [
        refuse(400),
        refuse(500),
        refuse(307, location="/elsewhere"),
        refuse(503, **{"x-should-retry": "false"}),
        refuse(429, **{"retry-after": "3600"}),
    ],
)
async def test_other_refusals_are_not_retried(reply: Any) -> None:
    async with serving(reply) as (client, server):
        with pytest.raises(APIStatusError):
            await client.chat("hi", "demo").read()
        assert len(server.posts) == 1


async def test_an_error_without_json_still_names_its_status() -> None:
    async with serving(say("<html>bad gateway</html>", 502)) as (client, _):
        with pytest.raises(APIStatusError, match="502: Bad Gateway") as caught:
            await client.chat("hi", "demo").read()
        assert caught.value.code is None


async def test_a_server_that_is_not_there_is_tried_a_bounded_number_of_times(unused_tcp_port: int) -> None:
    async with AsyncSluiceClient(f"http://127.0.0.1:{unused_tcp_port}", limits=LIMITS, rng=random.Random(1)) as client:
        with pytest.raises(APIConnectionError, match=f"127.0.0.1:{unused_tcp_port}"):
            await client.chat("hi", "demo").read()
        with pytest.raises(APIConnectionError):
            await client.models()


async def test_a_connection_that_closes_before_the_headers_is_retried() -> None:
    async def lose(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(lose, stream(WHOLE)) as (client, server):
        assert await client.chat("hi", "demo").read() == "".join(WORDS)
        assert len(server.posts) == 2


@pytest.mark.parametrize("how", ["aclose", "context", "cancel", "stop", "break"])
async def test_an_answer_left_early_closes_its_connection(how: str) -> None:
    """The server's handler is cancelled when the connection closes; it would wait for ever otherwise."""
    raw = events(ROLE, *(delta(word) for word in WORDS))
    async with serving(stream(raw, hang=True)) as (client, server):
        answer, has_begun = client.chat("hi", "demo", pace="smooth"), asyncio.Event()

        async def read() -> None:
            async for _ in answer:
                has_begun.set()

        if how == "cancel":
            task = asyncio.create_task(read())
            await has_begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "context":
            async with answer:
                await anext(answer)
        else:
            await anext(answer)
            if how == "break":
                del answer
            else:
                await getattr(answer, how)()
        await asyncio.wait_for(server.ended.wait(), 5)
        if how == "stop":
            await read()
            assert answer.text == "".join(WORDS)
            assert answer.finish_reason is None


async def test_replies_that_are_not_streamed() -> None:
    replies = [
        say({"id": "c-1", "choices": [{"index": 0, "finish_reason": "stop", **text}], "usage": {"total_tokens": 4}})
        for text in ({"message": {"role": "assistant", "content": "yes"}}, {"text": "yes"})
    ]
    async with serving(*replies) as (client, server):
        for once in (await client.chat_once("hi", "demo"), await client.complete_once("hi", "demo")):
            assert (once.text, once.finish_reason, once.request_id) == ("yes", "stop", "c-1")
            assert once.usage == {"total_tokens": 4}
        assert [("messages" in body, body["stream"]) for body in server.posts] == [(True, False), (False, False)]


async def test_all_choices_of_a_reply_are_kept_in_order_with_the_firsts_log_probabilities() -> None:
    numbers = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}], "refusal": None}

    second = {"index": 1, "message": {"content": "b"}}
    first = {"index": 0, "message": {"content": "a"}, "logprobs": numbers, "finish_reason": "stop"}
    async with serving(say({"id": "c-1", "choices": [second, first]})) as (client, server):
        once = await client.chat_once("hi", "demo", n=2, logprobs=True)
        assert server.posts[0]["n"] == 2
        assert (once.text, once.texts, once.finish_reason, once.logprobs) == ("a", ["a", "b"], "stop", numbers)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"content": [{"token": "x"}]}, {"content": [{"token": "y"}, {"token": "z"}]}], ["x", "y", "z"]),
        ([{"tokens": ["x"], "token_logprobs": [-1.0]}, {"content": None}, None], [["x"]]),
    ],
)
async def test_log_probabilities_of_a_stream_are_collected(parts: list[Any], expected: list[Any]) -> None:
    pieces = [chunk(choices=[{"index": 0, "delta": {"content": "x"}, "logprobs": part}]) for part in parts]
    async with serving(stream(events(*pieces, FINISH, "[DONE]"))) as (client, _):
        answer = client.chat("hi", "demo")
        await answer.read()
        assert [entry.get("token") or entry["tokens"] for entry in answer.logprobs] == expected


async def test_models_are_listed_and_the_first_one_is_the_default() -> None:
    async with serving(stream(WHOLE)) as (client, server):
        assert await client.models() == ["demo", "other/model"]
        await client.chat("hi").read()
        await client.chat("hi").read()
        assert [body["model"] for body in server.posts] == ["demo", "demo"]
        assert [path for path, _, _ in server.requests].count("/v1/models") == 2


async def test_json_instead_of_a_stream_is_refused() -> None:
    async with serving(say({"choices": []})) as (client, _):
        with pytest.raises(ProtocolError, match="event stream"):
            await client.chat("hi", "demo").read()
        with pytest.raises(ProtocolError, match="no choice"):
            await client.chat_once("hi", "demo")


@pytest.mark.parametrize("raw", [WHOLE, events(delta("x"), FINISH)], ids=["done", "end"])
async def test_connections_are_reused_after_a_whole_answer(raw: bytes) -> None:
    ports = set()

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return await stream(raw)(request)

    async with serving(reply, limits=ClientLimits(end_timeout_s=5.0)) as (client, server):
        for _ in range(5):
            await client.chat("hi", "demo").read()
            await server.ended.wait()
    assert len(ports) == 1


async def test_a_server_that_does_not_end_after_done_holds_nothing_up() -> None:
    limits = ClientLimits(end_timeout_s=0.01)
    async with serving(stream(WHOLE, hang=True), limits=limits) as (client, server):
        assert await client.chat("hi", "demo").read() == "".join(WORDS)
        await asyncio.wait_for(server.ended.wait(), 5)


async def test_misuse_is_told_at_once() -> None:
    client = AsyncSluiceClient("http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="async with"):
        await client.chat("hi", "demo").read()
    with pytest.raises(ValueError, match="one choice"):
        client.chat("hi", "demo", n=2)
    with pytest.raises(ValueError, match="pace"):
        client.chat("hi", "demo", pace="fast")  # type: ignore[arg-type]
    for url in ("127.0.0.1:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="base_url"):
            AsyncSluiceClient(url)


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/api/openai", "https://h/api/openai"),
    ],
)
def test_the_path_of_the_base_url_is_v1_unless_it_has_one(base_url: str, expected: str) -> None:
    assert AsyncSluiceClient(base_url)._transport._servers.current == expected
