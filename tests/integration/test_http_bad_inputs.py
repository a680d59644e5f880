"""Bad input over a real socket: the status, the code and the parameter, in OpenAI's format, and nothing submitted.

Numbers are those of the table of bad inputs in the security design; the rows stand in `tests/support/bad_inputs.py`.
What they do to streams that run meanwhile is `test_bad_inputs_beside_streams.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.http.connection import LINGER_S
from tests.support.bad_inputs import (
    ALLOWED,
    LATE,
    REQUEST_IDS,
    BadInput,
    RawInput,
    as_json,
    bad_inputs,
    message,
    raw_inputs,
)
from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO, Running, Serve
from tests.support.fault_streams import Reader, all_read, ask
from tests.support.raw_http import check_error, connect, exchange, send, status_of
from tests.support.waiting import until

LIMIT_S = 0.5

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """Answers without a text."""
    async with serve("") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def hasty(serve: Serve) -> AsyncIterator[Running]:
    """Waits for heads and bodies for half a second only."""
    async with serve("", body_limit_s=LIMIT_S, head_limit_s=LIMIT_S) as running:
        yield running


@pytest.mark.parametrize("row", bad_inputs(), ids=lambda row: row.name)
async def test_a_bad_request_is_refused_and_what_is_bad_is_named(served: Running, row: BadInput) -> None:
    assert await send(served.http, served.url, row) == (row.status, row.code, row.param)
    assert served.worker.submits == []


@pytest.mark.parametrize("prompt", ["", ["a", ""]])
async def test_a_prompt_without_a_token_is_refused(served: Running, prompt: object) -> None:
    """Row 47; a tokenizer that puts a BOS before every text has no such prompt."""
    status, body = await served.post(COMPLETIONS, prompt=prompt)
    assert check_error(status, body) == (400, "invalid_value", "prompt")


@pytest.mark.parametrize("row", raw_inputs(), ids=lambda row: row.name)
async def test_what_the_parser_refuses_is_answered_in_json_too_and_the_connection_closed(
    served: Running, row: RawInput
) -> None:
    head, body = await exchange(served.url, row.data)
    assert check_error(status_of(head), body) == (row.status, row.code, None)
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: req_" in head.lower()
    assert served.worker.submits == []


async def test_what_does_not_arrive_in_time_is_given_up(hasty: Running) -> None:
    """Row 20. A connection on which nothing came is closed without a word: there is nothing to answer."""

    async def measure(pieces: tuple[bytes, ...]) -> tuple[bytes, Any, float]:
        started_s = time.monotonic()
        head, body = await exchange(hasty.url, *pieces)
        return head, body, time.monotonic() - started_s

    answers = await asyncio.gather(*(measure(pieces) for _, pieces in LATE), measure(()))
    for (name, _), (head, body, took_s) in zip(LATE, answers[:-1], strict=True):
        assert check_error(status_of(head), body) == (408, "request_timeout", None), name
        assert took_s >= LIMIT_S * 0.9
    head, body, took_s = answers[-1]
    assert (head, body) == (b"", None)
    assert took_s >= LIMIT_S * 0.9


async def test_between_two_requests_a_connection_may_be_idle_for_longer_than_headers_may_take(hasty: Running) -> None:
    """And the headers of the next one are due again from their first byte on."""
    get, first = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b""
    while not first:  # none: the machine stood still for the whole limit before anything was sent
        reader, writer = await connect(hasty.url)
        writer.write(get)
        with contextlib.suppress(ConnectionError):
            first = await reader.readline()
    assert first.startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"}")
    await asyncio.sleep(1.3 * LIMIT_S)
    writer.write(get)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"}")
    writer.write(get[:10])
    async with asyncio.timeout(LIMIT_S + LINGER_S + 5):
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.slow
async def test_a_body_that_never_ends_does_not_keep_its_connection(served: Running) -> None:
    """Row 17, endless: the answer comes at 4 MiB, the connection is closed soon after, whatever still comes."""
    reader, writer = await connect(served.url)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    async with asyncio.timeout(20):
        await _pour(writer, b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    answer = await _rest(reader)
    assert not answer or answer.startswith(b"HTTP/1.1 413")  # a reset may have overtaken it
    writer.close()


async def _pour(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send the data again and again until the connection is broken."""
    try:
        while True:
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_the_roles_that_are_offered_are_those_that_are_taken(served: Running) -> None:
    _, body = await served.post(CHAT, **message(role="wizard", content="a"))
    assert "must be one of system, developer, user, assistant, tool." in str(body)


@pytest.mark.parametrize("model", ["a\x00b", "x" * 100_000])
async def test_an_unknown_model_is_echoed_short_and_printable(served: Running, model: str) -> None:
    """Row 45."""
    _, body = await served.post(model=model)
    assert len(body["error"]["message"]) < 150
    assert body["error"]["message"].isprintable()


async def test_a_wrong_method_is_told_the_right_ones(served: Running) -> None:
    """Row 5."""
    async with served.http.get(served.url + CHAT) as response:
        assert response.headers["Allow"] == "POST"
    async with served.http.post(served.url + "/v1/models") as response:
        assert response.headers["Allow"] == "GET, HEAD"
    async with served.http.head(served.url + "/") as response:
        assert response.status == 404


@pytest.mark.parametrize("given", REQUEST_IDS)
async def test_a_request_id_that_could_do_harm_is_replaced(served: Running, given: str) -> None:
    """Row 46."""
    async with served.http.get(served.url + "/live", headers={"X-Request-Id": given}) as response:
        assert response.status == 200
        assert response.headers["x-request-id"].startswith("req_")


async def test_a_harmless_request_id_comes_back_also_with_an_error(served: Running) -> None:
    async with served.http.get(served.url + "/nope", headers={"X-Request-Id": "abc-1.2:3_4"}) as response:
        assert response.headers["x-request-id"] == "abc-1.2:3_4"


@pytest.mark.parametrize(("name", "fields"), ALLOWED, ids=[row[0] for row in ALLOWED])
async def test_what_is_strange_but_allowed_is_answered(served: Running, name: str, fields: dict[str, Any]) -> None:
    status, body = await served.post(CHAT, **fields)
    served.worker.submits.clear()
    assert status == 200, (name, body)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["service_tier"] == "default"


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"CHUNKED", b" chunked "])
async def test_chunks_are_read_however_their_name_is_written(served: Running, coding: bytes) -> None:
    data = as_json(messages=HELLO)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: %b\r\n\r\n"
    )
    answer, _ = await exchange(served.url, head % coding + body)
    served.worker.submits.clear()
    assert status_of(answer) == 200


async def test_a_body_without_a_type_is_read_as_json(served: Running) -> None:
    """Row 6."""
    data = as_json(messages=HELLO)
    head, body = await exchange(
        served.url,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data),
    )
    served.worker.submits.clear()
    assert head.startswith(b"HTTP/1.1 200")
    assert body["object"] == "chat.completion"


HEADERS = {"content-type", "content-length", "date", "server", "x-request-id"}
BUGS: list[tuple[str, BaseException]] = [
    ("services.dispatcher.text.prompts.PromptCodec.encode_chat", RuntimeError("secret /path/of/a/file")),
    ("services.dispatcher.endpoints.chat.parse_messages", KeyError("secret")),
    ("services.dispatcher.session.sessions.Sessions.open", OSError(2, "secret", "/path/of/a/file")),
    ("services.dispatcher.session.sessions.Sessions.place", AssertionError("secret at 10.0.0.7")),
    ("services.dispatcher.http.server._find", RecursionError("secret")),
    ("services.dispatcher.http.arrival.read_body", TimeoutError("secret")),
]


@pytest.mark.parametrize(("where", "bug"), BUGS, ids=[name.rpartition(".")[2] for name, _ in BUGS])
async def test_a_bug_of_our_own_is_a_500_that_tells_nothing_and_disturbs_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str, bug: BaseException
) -> None:
    """Row 57, beside eight streams."""

    def broken(*_args: object, **_options: object) -> None:
        raise bug

    words = "Once upon a time. " * 10
    async with serve(words) as running:
        running.worker.step_s = 0.1  # none ends before all have begun
        asked = ask("a", COMPLETIONS, model="tiny", max_tokens=1000)
        readers = [Reader(running.http, running.url, asked, {}) for _ in range(8)]
        await until(lambda: len(running.front.streams) == len(readers))
        running.worker.step_s = 0.005
        with monkeypatch.context() as patch:
            patch.setattr(where, broken)
            async with running.ask() as response:
                answer = await response.text()
                assert "secret" not in f"{answer} {response.headers}"
                assert check_error(response.status, json.loads(answer)) == (500, "internal_error", None)
                assert {name.lower() for name in response.headers} <= HEADERS
        await all_read(readers)
        assert "cancelled" not in {sample.labels.get("finish") for sample in await running.samples()}
        assert len(running.table) == 0
    assert [(reader.told.is_whole, reader.told.error, reader.told.texts) for reader in readers] == [
        (True, None, {0: words})
    ] * len(readers)


async def test_no_answer_names_the_model_folder(served: Running) -> None:
    folder = str(Path(served.front.settings.model))
    for path in ("/v1/models", "/v1/models/x", "/ready", "/v1/cluster", "/v1/requests", "/metrics", "/version"):
        async with served.http.get(served.url + path) as response:
            assert folder not in await response.text()
