"""Answers over a WebSocket: the same as over HTTP, several at a time; and clients that break the rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from services.dispatcher.http.websocket import MAX_IN_FLIGHT
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO, TEXT, Running, Serve, texts_of, write_keys
from tests.support.raw_http import check_error, connect_narrow, exchange, status_of
from tests.support.socket_talks import Talk, talk, text_of
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """A worker that answers every request with TEXT, from where it is told to go on."""
    async with serve(TEXT) as running:
        yield running


def without_names(event: dict[str, Any]) -> dict[str, Any]:
    event = {key: value for key, value in event.items() if key not in ("id", "created")}
    if "qoe" in event.get("sluice", {}):
        assert 0 <= event["sluice"]["qoe"] <= 1
        event["sluice"] = {**event["sluice"], "ttft_s": 0, "qoe": 1}  # both depend on how busy the machine is
    return event


async def say(running: Running, count: int, finish: FinishReason) -> None:
    """Answer the next request token by token, each choice in turn, once somebody reads it."""
    items = await running.begun(count)
    await until(lambda: all(session.reader for session in running.table))
    for token in running.encode(TEXT):
        for item in items:
            await running.worker.emit(item, [token])
    for item in items:
        await running.worker.emit(item, [running.end_id], finish)
    running.worker.running.clear()


@pytest.mark.parametrize(
    ("endpoint", "path", "body", "finish"),
    [
        ("chat", CHAT, {}, FinishReason.STOP),
        ("chat", CHAT, {"stream_options": {"include_usage": True}, "n": 2}, FinishReason.STOP),
        ("chat", CHAT, {"stop": "world", "logprobs": True}, FinishReason.STOP),
        ("completions", COMPLETIONS, {"max_tokens": 100, "echo": True}, FinishReason.LENGTH),
    ],
)
async def test_an_answer_is_event_by_event_that_of_http(
    running: Running, endpoint: str, path: str, body: dict[str, Any], finish: FinishReason
) -> None:
    async with talk(running) as client:
        answer = client.answer("a", endpoint=endpoint, body=body)
        messages, _ = await asyncio.gather(answer, say(running, body.get("n", 1), finish))
    kinds = [message["type"] for message in messages]
    assert kinds == ["start", *["event"] * (len(kinds) - 2), "done"]
    assert messages[0]["request_id"].startswith("req_")
    events, _ = await asyncio.gather(running.stream(path, **body), say(running, body.get("n", 1), finish))
    mine = [without_names(message["data"]) for message in messages[1:-1]]
    assert mine == [without_names(event) for event in events]


async def test_several_answers_come_side_by_side_and_a_name_can_be_used_again(running: Running) -> None:
    async with talk(running) as client:
        await client.ask("a")
        await client.ask("b")
        items = await running.begun(2)
        for word in ("one ", "two "):
            for item in items:
                await running.worker.emit(item, running.encode(word))
        await running.end(items[1])
        await until(lambda: len(running.table) == 1)
        await running.end(items[0])
        heard = await client.all_of("a", "b")
        assert [text_of(heard[name]) for name in "ab"] == ["one two "] * 2
        running.worker.script = lambda _: [*running.encode("three"), running.end_id]
        assert text_of(await client.answer("a")) == "three"


async def test_a_cancelled_answer_ends_and_the_others_go_on(running: Running) -> None:
    async with talk(running) as client:
        await client.ask("a")
        await client.ask("b")
        await running.begun(2)
        await client.say(type="cancel", id="a")
        await running.worker.wait_cancelled()
        (item,) = await running.begun()
        await running.end(item, "fine")
        all_heard = await client.all_of("a", "b")
        assert all_heard["a"][-2]["error"]["code"] == "request_cancelled"
        assert text_of(all_heard["b"]) == "fine"
        await client.say(type="cancel", id="a")  # of nothing: nothing is said
        await client.ask("c")
        await client.say(type="cancel", id="c")  # in the same breath
        assert (await client.all_of("c"))["c"][-2]["error"]["code"] == "request_cancelled"
        await until(lambda: not len(running.table))


async def test_a_client_that_leaves_cancels_all_of_its_answers(running: Running) -> None:
    async with talk(running) as client:
        for name in "abc":
            await client.ask(name)
        await running.begun(3)
        assert client.socket._response.connection is not None
        transport = client.socket._response.connection.transport
        assert transport is not None
        transport.abort()
        await until(lambda: not running.worker.running)
    await running.until_nothing_is_left()


async def test_refusals_are_those_of_http_and_end_only_their_answer(served: Running) -> None:
    async with talk(served) as client:
        error, done = await client.answer("a", body={"temperature": 9})
        assert done["type"] == "done"
        assert (error["status"], error["error"]["code"]) == (400, "decimal_above_max_value")
        assert error["error"]["help"] == "/errors/decimal_above_max_value"
        served.worker.refuse = RefusalReason.TOO_LONG
        assert (await client.answer("b"))[0]["error"]["code"] == "context_length_exceeded"
        served.worker.refuse = None
        assert (await client.answer("c", body={"model": "other"}))[0]["status"] == 404
        assert text_of(await client.answer("d")) == TEXT


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        ('{"type": "request"}', "missing_required_parameter", "id"),
        ('{"type": "request", "id": 5}', "invalid_type", "id"),
        ('{"type": "request", "id": ""}', "string_below_min_length", "id"),
        ('{"type": "request", "id": "' + "x" * 65 + '"}', "string_above_max_length", "id"),
        ('{"type": "dance", "id": "a"}', "invalid_value", "type"),
        ('{"type": "request", "id": "a"}', "missing_required_parameter", "body"),
        ('{"type": "request", "id": "a", "endpoint": "images", "body": {}}', "invalid_value", "endpoint"),
        ('{"type": "request", "id": "a", "body": {"stream": false}}', "invalid_value", "stream"),
        ('{"type": "request", "id": "a", "body": {}}', "missing_required_parameter", "model"),
        ('{"type": "request", "id": "a", "body": {"model": "tiny"}, "idempotency_key": ""}', None, None),
    ],
)
async def test_messages_that_mean_nothing_are_answered_and_the_connection_goes_on(
    served: Running, message: str, code: str | None, param: str | None
) -> None:
    async with talk(served) as client:
        await client.socket.send_str(message)
        error = await client.hear()
        assert (error["type"], error["status"]) == ("error", 400)
        if code is not None:
            assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        if error["id"] is not None:
            assert (await client.hear())["type"] == "done"
        assert text_of(await client.answer("next")) == TEXT


async def test_an_answer_is_resumed_over_another_connection_or_over_http(running: Running) -> None:
    ids = running.encode(TEXT)
    async with talk(running) as client:
        await client.ask("a", idempotency_key="k")
        (item,) = await running.begun()
        await running.worker.emit(item, ids[:5])
        start, _role, first = [await client.hear() for _ in range(3)]
    assert start["resumable"] is True
    await running.until_nothing_is_left()
    running.worker.script = lambda submit: [*ids, running.end_id]
    async with talk(running) as client:
        rest = await client.answer("z", idempotency_key="k", last_event_id=first["event_id"])
    assert text_of([first, *rest]) == TEXT
    headers = {"Idempotency-Key": "k", "Last-Event-ID": first["event_id"]}
    async with running.ask(headers=headers, stream=True) as response:
        raw = (await response.read()).decode()
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    assert text_of([first]) + texts_of(events)[0] == TEXT


async def test_more_answers_than_the_limit_are_refused_one_by_one(running: Running) -> None:
    async with talk(running) as client:
        for number in range(MAX_IN_FLIGHT + 1):
            await client.ask(f"r{number}")
        while (message := await client.hear())["type"] != "error":
            pass
        assert (message["id"], message["status"]) == (f"r{MAX_IN_FLIGHT}", 429)
        assert (message["error"]["code"], message["retry_after_ms"]) == ("too_many_in_flight", 1000)
        assert len(running.worker.running) <= MAX_IN_FLIGHT


async def test_a_thousand_messages_at_once_close_the_connection_and_no_other(running: Running) -> None:
    async with talk(running) as good, running.http.ws_connect(running.url + "/v1/ws", autoclose=False) as raw:
        await good.ask("fine")
        (item,) = await running.begun()
        bad = Talk(raw)
        for number in range(1000):
            await bad.ask(f"r{number}")
        assert await bad.closed() == (1008, "too many messages at once")
        await until(lambda: len(running.worker.running) == len(running.table) == 1)
        await running.end(item, "fine")
        assert text_of((await good.all_of("fine"))["fine"]) == "fine"


async def test_a_name_that_is_in_use_closes_the_connection(running: Running) -> None:
    async with talk(running) as client:
        await client.ask("a")
        await client.ask("a")
        assert await client.closed() == (1008, "the id is in use")
        await running.until_nothing_is_left()


@pytest.mark.parametrize(
    ("what", "code"), [("binary", 1003), ("large", 1009), ("bomb", 1009), ("text that is none", 1007)]
)
async def test_frames_that_are_not_allowed_close_the_connection(served: Running, what: str, code: int) -> None:
    async with talk(served, compress=15 if what == "bomb" else 0) as client:
        if what == "binary":
            await client.socket.send_bytes(b"{}")
        elif what == "text that is none":
            await client.socket.send_frame(b"\x83abc", aiohttp.WSMsgType.TEXT)
            assert (await client.hear())["error"]["code"] == "invalid_json"
            return
        else:
            await client.socket.send_str(" " * (5 if what == "large" else 64) * 1024 * 1024)
        assert (await client.closed())[0] == code


async def test_a_reader_that_stalls_is_cut_alone(serve: Serve) -> None:
    async with serve(write_limit_s=0.1) as running, talk(running) as good:
        worker, sockets = running.worker, running.front.sockets
        await good.ask("fine")
        await running.begun()
        stuck = await stalled_client(running)
        healthy, victim = await running.begun(2)
        long_text = running.encode("The quick brown fox jumps over the lazy dog. ") * 400
        for _ in range(2000):
            await worker.emit(victim, long_text)
            if any(each.num_unsent_bytes > 2**17 for each in sockets._open):
                break
            await asyncio.sleep(0)
        sockets.sweep()
        await asyncio.sleep(0.15)
        sockets.sweep()
        sockets.sweep()  # it is counted once, though it may stay open for a while
        await worker.wait_cancelled(limit_s=20.0)
        assert sockets.num_cut == 1
        assert [cancel.request_id for cancel in worker.cancels] == [victim.submit.request_id]
        await running.end(healthy, "fine")
        assert text_of((await good.all_of("fine"))["fine"]) == "fine"
        await until(lambda: len(sockets) == 1)
        stuck.transport.abort()


async def stalled_client(running: Running) -> asyncio.StreamWriter:
    """A WebSocket that asks, and never reads again after the handshake."""
    handshake = (
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    reader, writer = await connect_narrow(running.url, handshake)
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    request = {"type": "request", "id": "a", "body": {"model": "tiny", "messages": HELLO, "ignore_eos": True}}
    data = json.dumps(request).encode()
    size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    writer.write(b"\x81" + size + b"\0\0\0\0" + data)
    return writer


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 101),
        ("http://{host}", 101),
        ("https://{host}", 101),
        ("http://evil.example", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
        ("http://{host}.evil.example", 403),
        ("http://[::1", 403),
        ("http://]", 403),
        ("http://\u2100", 403),
    ],
)
async def test_pages_of_other_origins_cannot_connect(served: Running, origin: str | None, status: int) -> None:
    host = served.url.removeprefix("http://")
    headers = {} if origin is None else {"Origin": origin.replace("{host}", host)}
    try:
        async with served.http.ws_connect(served.url + "/v1/ws", headers=headers):
            got = 101
    except aiohttp.WSServerHandshakeError as error:
        got = error.status
    assert got == status


async def test_what_is_no_handshake_is_told_so_in_json(served: Running) -> None:
    async with served.http.get(served.url + "/v1/ws") as response:
        assert (response.status, response.headers["Upgrade"]) == (426, "websocket")
        assert (await response.json())["error"]["code"] == "upgrade_required"
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "9"}
    async with served.http.get(served.url + "/v1/ws", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_request")
    async with served.http.post(served.url + "/v1/ws", json={}) as response:
        assert response.status == 405
    for strange in ("Sec-WebSocket-Version: \xb2", "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \xff\xff"):
        head = "GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
        answer, body = await exchange(served.url, f"{head}{strange}\r\n\r\n".encode("latin-1"))
        assert check_error(status_of(answer), body) == (400, "bad_request", None)


async def test_a_draining_server_lets_answers_end_and_sends_idle_clients_away(running: Running) -> None:
    async with talk(running) as busy, talk(running) as idle:
        await busy.ask("a")
        (item,) = await running.begun()
        draining = asyncio.create_task(running.dispatcher.drain())
        assert await idle.closed() == (1013, "the server is shutting down")
        await busy.ask("b")
        await running.end(item, "whole")
        heard = await busy.all_of("a", "b")
        assert text_of(heard["a"]) == "whole"
        assert (heard["b"][0]["status"], heard["b"][0]["error"]["code"]) == (503, "draining")
        await draining
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await running.http.ws_connect(running.url + "/v1/ws")
        assert await busy.closed() == (1013, "the server is shutting down")


async def test_a_server_that_stops_closes_its_sockets_and_cancels_their_answers(running: Running) -> None:
    async with talk(running) as client:
        await client.ask("a")
        await running.begun()
        stopping = asyncio.create_task(running.dispatcher.stop())
        assert await client.closed() == (1013, "the server is shutting down")
        await client.socket.close()
        await stopping
        assert running.worker.running == {}


async def test_callers_are_told_apart_by_the_key_of_the_handshake(served: Running) -> None:
    salts = []
    for key in "aba":
        async with talk(served, key) as client:
            await client.answer("r")
        salts.append(served.worker.submits[-1].cache_salt)
    assert salts[0] == salts[2] != salts[1]


async def test_a_socket_needs_a_key_and_a_key_that_is_taken_away_ends_with_the_next_answer(
    serve: Serve, tmp_path: Path
) -> None:
    """Row 53: 401 at the handshake. The answer that runs goes on; the next one is refused, the connection stays."""
    keys = dict.fromkeys(("sk-mine", "sk-other"), ("acme", "infer"))
    path = write_keys(tmp_path / "keys.toml", keys)
    async with serve(api_keys_file=path) as running:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.url + "/v1/ws", headers=headers)
            assert refused.value.status == 401
        async with talk(running, "sk-mine") as client:
            await client.ask("a")
            (item,) = await running.begun()
            del keys["sk-mine"]
            write_keys(path, keys)
            assert await running.front.access.reload()
            await client.ask("b")
            await running.end(item, "whole")
            heard = await client.all_of("a", "b")
        assert text_of(heard["a"]) == "whole"
        assert (heard["b"][0]["status"], heard["b"][0]["error"]["code"]) == (401, "invalid_api_key")
