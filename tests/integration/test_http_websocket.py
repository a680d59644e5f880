"""Answers over a WebSocket: the same as over HTTP, several at a time; and clients that break the rules."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from services.dispatcher.build import ModelText
from services.dispatcher.http.websocket import MAX_IN_FLIGHT
from shared.api_keys import hash_key
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.dispatchers import Running, end_id, running_dispatcher
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEXT = "Hello 🦊 world, 你好! The end."

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    """A worker that answers every request with TEXT, from where it is told to go on."""
    ids = [*text.codec.tokenizer.encode(TEXT, add_special_tokens=False).ids, end_id(text)]
    async with running_dispatcher(text, folder, lambda submit: ids) as running:
        yield running


class Talk:
    """A client's end."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def ask(self, name: str, endpoint: str = "chat", **fields: Any) -> None:
        what = {"messages": HELLO} if endpoint == "chat" else {"prompt": "once", "max_tokens": 100}
        body = {"model": "tiny", **what, **fields.pop("body", {})}
        await self.say(type="request", id=name, endpoint=endpoint, body=body, **fields)

    async def say(self, **message: Any) -> None:
        await self.socket.send_str(json.dumps(message))

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            message = await self.socket.receive()
        assert message.type is aiohttp.WSMsgType.TEXT, message
        found: dict[str, Any] = json.loads(message.data)
        return found

    async def all_of(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Return the messages about some answers, each up to its `done`."""
        heard: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        while any(not messages or messages[-1]["type"] != "done" for messages in heard.values()):
            message = await self.hear()
            heard[message["id"]].append(message)
        return heard

    async def closed(self) -> tuple[int, str]:
        """Return code and reason of the server's close."""
        async with asyncio.timeout(10):
            while True:
                message = await self.socket.receive()
                if message.type is aiohttp.WSMsgType.CLOSE:
                    await self.socket.close()
                    return message.data, str(message.extra)
                assert message.type is aiohttp.WSMsgType.TEXT, message


@asynccontextmanager
async def talk(running: Running, **options: Any) -> AsyncIterator[Talk]:
    async with running.http.ws_connect(running.url + "/v1/ws", **{"autoclose": False, **options}) as socket:
        yield Talk(socket)
    await until(lambda: not len(running.dispatcher.front.sockets))


def text_of(messages: list[dict[str, Any]]) -> str:
    choices = [choice for m in messages if m["type"] == "event" for choice in m["data"]["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


async def sse_events(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with running.http.post(running.url + path, json={"model": "tiny", "stream": True, **body}) as response:
        raw = (await response.read()).decode()
    return [json.loads(block[6:]) for block in raw.split("\n\n") if block and not block.endswith("[DONE]")]


def without_names(event: dict[str, Any]) -> dict[str, Any]:
    event = {key: value for key, value in event.items() if key not in ("id", "created")}
    if "qoe" in event.get("sluice", {}):
        assert 0 <= event["sluice"]["qoe"] <= 1
        event["sluice"] = {**event["sluice"], "ttft_s": 0, "qoe": 1}  # both depend on how busy the machine is
    return event


def is_text(event: dict[str, Any]) -> bool:
    """Return whether an event carries text and nothing that begins or ends an answer."""
    choices = event["choices"]
    return len(choices) == 1 and choices[0]["finish_reason"] is None and "role" not in choices[0].get("delta", {})


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join events with text that follow each other: how many tokens one holds depends on how busy the machine is."""
    result: list[dict[str, Any]] = []
    for event in events:
        num_tokens = event.get("sluice", {}).get("n", 1) if is_text(event) else 0
        if not (num_tokens and result and is_text(result[-1])):
            result.append({**event, "sluice": {"n": num_tokens}} if num_tokens else event)
            continue
        before, (choice,) = result[-1], event["choices"]
        (old,) = before["choices"]
        both = {**old}
        if "delta" in choice:
            both["delta"] = {"content": old["delta"]["content"] + choice["delta"]["content"]}
        else:
            both["text"] = old["text"] + choice["text"]
        if choice["logprobs"] is not None:
            both["logprobs"] = {
                key: said if old["logprobs"][key] is None else old["logprobs"][key] + said
                for key, said in choice["logprobs"].items()
            }
        result[-1] = {**before, "choices": [both], "sluice": {"n": before["sluice"]["n"] + num_tokens}}
    return result


@pytest.mark.parametrize(
    ("endpoint", "path", "body"),
    [
        ("chat", CHAT, {"messages": HELLO}),
        ("chat", CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}, "n": 2}),
        ("chat", CHAT, {"messages": HELLO, "stop": "world", "logprobs": True}),
        ("completions", "/v1/completions", {"prompt": "once", "max_tokens": 4, "echo": True}),
    ],
)
async def test_an_answer_is_event_by_event_that_of_http(
    served: Running, endpoint: str, path: str, body: dict[str, Any]
) -> None:
    async with talk(served) as client:
        await client.ask("a", endpoint, body=body)
        messages = (await client.all_of("a"))["a"]
    kinds = [message["type"] for message in messages]
    assert kinds == ["start", *["event"] * (len(kinds) - 2), "done"]
    assert messages[0]["request_id"].startswith("req_")
    mine = [without_names(message["data"]) for message in messages[1:-1]]
    theirs = [without_names(event) for event in await sse_events(served, path, body)]
    for index in range(body.get("n", 1) + 1):  # the order between choices is not fixed

        def of_choice(events: list[dict[str, Any]], at: int = index) -> list[dict[str, Any]]:
            own = [e for e in events if (e["choices"] or [{"index": body.get("n", 1)}])[0]["index"] == at]
            return joined(own)

        assert of_choice(mine) == of_choice(theirs)


async def test_several_answers_come_side_by_side_and_a_name_can_be_used_again(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as client:
        worker = running.worker
        await client.ask("a")
        await client.ask("b")
        await until(lambda: len(worker.running) == 2)
        items = list(worker.running.values())
        for word in ("one ", "two "):
            for item in items:
                await worker.emit(item, running.encode(word))
        await worker.emit(items[1], [end_id(text)], FinishReason.STOP)
        await until(lambda: len(running.dispatcher.service.sessions.table) == 1)
        await worker.emit(items[0], [end_id(text)], FinishReason.STOP)
        heard = await client.all_of("a", "b")
        assert [text_of(heard[name]) for name in "ab"] == ["one two "] * 2
        worker.script = lambda _: [*running.encode("three"), end_id(text)]
        await client.ask("a")
        assert text_of((await client.all_of("a"))["a"]) == "three"


async def test_a_cancelled_answer_ends_and_the_others_go_on(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as client:
        worker = running.worker
        await client.ask("a")
        await client.ask("b")
        await until(lambda: len(worker.running) == 2)
        await client.say(type="cancel", id="a")
        await worker.wait_cancelled()
        (item,) = worker.running.values()
        await worker.emit(item, [*running.encode("fine"), end_id(text)], FinishReason.STOP)
        all_heard = await client.all_of("a", "b")
        assert all_heard["a"][-2]["error"]["code"] == "request_cancelled"
        assert text_of(all_heard["b"]) == "fine"
        await client.say(type="cancel", id="a")  # of nothing: nothing is said
        await client.ask("c")
        await client.say(type="cancel", id="c")  # in the same breath
        assert (await client.all_of("c"))["c"][-2]["error"]["code"] == "request_cancelled"
        await until(lambda: not len(running.dispatcher.service.sessions.table))


async def test_a_client_that_leaves_cancels_all_of_its_answers(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        async with talk(running) as client:
            for name in "abc":
                await client.ask(name)
            await until(lambda: len(running.worker.running) == 3)
            assert client.socket._response.connection is not None
            transport = client.socket._response.connection.transport
            assert transport is not None
            transport.abort()
            await until(lambda: not running.worker.running)
        assert len(running.dispatcher.service.sessions.table) == 0
        assert len(running.dispatcher.front.live) == 0


async def test_refusals_are_those_of_http_and_end_only_their_answer(served: Running) -> None:
    async with talk(served) as client:
        await client.ask("a", body={"temperature": 9})
        error, done = (await client.all_of("a"))["a"]
        assert done["type"] == "done"
        assert (error["status"], error["error"]["code"]) == (400, "decimal_above_max_value")
        served.worker.refuse = RefusalReason.TOO_LONG
        await client.ask("b")
        assert (await client.all_of("b"))["b"][0]["error"]["code"] == "context_length_exceeded"
        served.worker.refuse = None
        await client.ask("c", body={"model": "other"})
        assert (await client.all_of("c"))["c"][0]["status"] == 404
        await client.ask("d")
        assert text_of((await client.all_of("d"))["d"]) == TEXT


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
        await client.ask("next")
        assert text_of((await client.all_of("next"))["next"]) == TEXT


async def test_an_answer_is_resumed_over_another_connection_or_over_http(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        worker, ids = running.worker, running.encode(TEXT)
        async with talk(running) as client:
            await client.ask("a", idempotency_key="k")
            await until(lambda: worker.running)
            (item,) = worker.running.values()
            await worker.emit(item, ids[:5])
            start, _role, first = [await client.hear() for _ in range(3)]
        assert start["resumable"] is True
        await until(lambda: not worker.running and not len(running.dispatcher.front.live))
        worker.script = lambda submit: [*ids, end_id(text)]
        async with talk(running) as client:
            await client.ask("z", idempotency_key="k", last_event_id=first["event_id"])
            rest = (await client.all_of("z"))["z"]
        assert text_of([first, *rest]) == TEXT
        headers = {"Idempotency-Key": "k", "Last-Event-ID": first["event_id"]}
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        async with running.http.post(running.url + CHAT, json=body, headers=headers) as response:
            raw = (await response.read()).decode()
        events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
        joined = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert text_of([first]) + joined == TEXT


async def test_more_answers_than_the_limit_are_refused_one_by_one(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as client:
        for number in range(MAX_IN_FLIGHT + 1):
            await client.ask(f"r{number}")
        while (message := await client.hear())["type"] != "error":
            pass
        assert (message["id"], message["status"]) == (f"r{MAX_IN_FLIGHT}", 429)
        assert (message["error"]["code"], message["retry_after_ms"]) == ("too_many_in_flight", 1000)
        assert len(running.worker.running) <= MAX_IN_FLIGHT


async def test_a_thousand_messages_at_once_close_the_connection_and_no_other(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as good:
        await good.ask("fine")
        await until(lambda: running.worker.running)
        (item,) = running.worker.running.values()
        async with running.http.ws_connect(running.url + "/v1/ws", autoclose=False) as raw:
            bad = Talk(raw)
            for number in range(1000):
                await bad.ask(f"r{number}")
            assert await bad.closed() == (1008, "too many messages at once")
        await until(lambda: len(running.worker.running) == 1)
        await until(lambda: len(running.dispatcher.service.sessions.table) == 1)
        await running.worker.emit(item, [*running.encode("fine"), end_id(text)], FinishReason.STOP)
        assert text_of((await good.all_of("fine"))["fine"]) == "fine"


async def test_a_name_that_is_in_use_closes_the_connection(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as client:
        await client.ask("a")
        await client.ask("a")
        assert await client.closed() == (1008, "the id is in use")
        await until(lambda: not running.worker.running and not len(running.dispatcher.service.sessions.table))


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


async def test_a_reader_that_stalls_is_cut_alone(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder, write_limit_s=0.1) as running, talk(running) as good:
        worker, sockets = running.worker, running.dispatcher.front.sockets
        await good.ask("fine")
        await until(lambda: len(worker.running) == 1)
        (healthy,) = worker.running.values()
        stuck = await stalled_client(running)
        await until(lambda: len(worker.running) == 2)
        victim = next(item for item in worker.running.values() if item is not healthy)
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
        await worker.emit(healthy, [*running.encode("fine"), end_id(text)], FinishReason.STOP)
        assert text_of((await good.all_of("fine"))["fine"]) == "fine"
        await until(lambda: len(sockets) == 1)
        stuck.close()


async def stalled_client(running: Running) -> socket.socket:
    """A WebSocket that asks, and never reads again after the handshake."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", int(running.url.rpartition(":")[2])))
    handshake = (
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    await loop.sock_sendall(sock, handshake)
    assert b"101" in await loop.sock_recv(sock, 1024)
    request = {"type": "request", "id": "a", "body": {"model": "tiny", "messages": HELLO, "ignore_eos": True}}
    data = json.dumps(request).encode()
    size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    await loop.sock_sendall(sock, b"\x81" + size + b"\0\0\0\0" + data)
    return sock


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


async def test_a_draining_server_lets_answers_end_and_sends_idle_clients_away(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as busy, talk(running) as idle:
        await busy.ask("a")
        await until(lambda: running.worker.running)
        draining = asyncio.create_task(running.dispatcher.drain())
        assert await idle.closed() == (1013, "the server is shutting down")
        await busy.ask("b")
        (item,) = running.worker.running.values()
        await running.worker.emit(item, [*running.encode("whole"), end_id(text)], FinishReason.STOP)
        heard = await busy.all_of("a", "b")
        assert text_of(heard["a"]) == "whole"
        assert (heard["b"][0]["status"], heard["b"][0]["error"]["code"]) == (503, "draining")
        await draining
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await running.http.ws_connect(running.url + "/v1/ws")
        assert await busy.closed() == (1013, "the server is shutting down")


async def test_a_server_that_stops_closes_its_sockets_and_cancels_their_answers(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running, talk(running) as client:
        await client.ask("a")
        await until(lambda: running.worker.running)
        stopping = asyncio.create_task(running.dispatcher.stop())
        assert await client.closed() == (1013, "the server is shutting down")
        await client.socket.close()
        await stopping
        assert running.worker.running == {}


async def test_callers_are_told_apart_by_the_key_of_the_handshake(served: Running) -> None:
    salts = []
    for key in ("a", "b", "a"):
        async with talk(served, headers={"Authorization": f"Bearer {key}"}) as client:
            await client.ask("r")
            await client.all_of("r")
        salts.append(served.worker.submits[-1].cache_salt)
    assert salts[0] == salts[2] != salts[1]


async def test_a_socket_needs_a_key_and_a_key_that_is_taken_away_ends_with_the_next_answer(
    text: ModelText, folder: Path, tmp_path: Path
) -> None:
    """Row 53: 401 at the handshake. The answer that runs goes on; the next one is refused, the connection stays."""
    path = tmp_path / "keys.toml"

    def write_keys(*keys: str) -> None:
        entries = [f'[[keys]]\nsha256 = "{hash_key(key)}"\ntenant = "acme"\nscopes = ["infer"]' for key in keys]
        path.write_text("\n".join(["[tenants.acme]", *entries]))

    write_keys("sk-mine", "sk-other")
    async with running_dispatcher(text, folder, api_keys_file=path) as running:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.url + "/v1/ws", headers=headers)
            assert refused.value.status == 401
        async with talk(running, headers={"Authorization": "Bearer sk-mine"}) as client:
            await client.ask("a")
            await until(lambda: running.worker.running)
            write_keys("sk-other")
            assert await running.dispatcher.front.access.reload()
            await client.ask("b")
            (item,) = running.worker.running.values()
            await running.worker.emit(item, [*running.encode("whole"), end_id(text)], FinishReason.STOP)
            heard = await client.all_of("a", "b")
        assert text_of(heard["a"]) == "whole"
        assert (heard["b"][0]["status"], heard["b"][0]["error"]["code"]) == (401, "invalid_api_key")
