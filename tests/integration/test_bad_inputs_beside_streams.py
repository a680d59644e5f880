"""The whole table of bad inputs against a real cluster, while eight healthy streams go on: their texts do not change.

The numbers are those of the security design. `test_http_bad_inputs.py` has the same rows one by one, with a clearer
message when one fails.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.bad_inputs import ALLOWED, KEY, LATE, MIB, REQUEST_IDS, bad_inputs, content, raw_inputs
from tests.support.cluster import Cluster, cluster
from tests.support.dispatchers import CHAT, HELLO, write_keys
from tests.support.processes import wait_until
from tests.support.raw_http import check_error, exchange, send, status_of
from tests.support.reader_streams import Readers, read_once, reading

NUM_STREAMS = 8
CONTEXT = 512
LIMIT_S = 4.0
"""For a head and for a body. Longer than a row takes on a machine that stands still now and then."""
LONGEST_GAP_S = 10.0
"""On a machine that other work keeps busy too. A row that held up the event loop for longer would be seen here."""
MAX_REQUESTS = 160
METRICS_KEY = "sk-for-metrics-only-0001"
BAD_INPUTS = bad_inputs()
RAW_INPUTS = raw_inputs()

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(keys, {KEY: ("table", "infer", "metrics"), METRICS_KEY: ("table", "metrics")})
    env = {
        "SLUICE_DISPATCHER_BODY_LIMIT_S": str(LIMIT_S),
        "SLUICE_DISPATCHER_HEAD_LIMIT_S": str(LIMIT_S),
        "SLUICE_DISPATCHER_MAX_REQUESTS": str(MAX_REQUESTS),
    }
    flags = ["--served-model-name", "tiny", "--memory", "512MiB", "--threads", "1", "--deterministic"]
    flags += ["--max-model-len", str(CONTEXT), "--api-keys-file", str(keys)]
    with cluster(*flags, env=env) as running:
        running.key = KEY
        yield running
        running.wait_until_idle()


def bodies() -> list[dict[str, Any]]:
    """Return the streams; each draws with its own seed, and ends by its length."""
    return [
        {"model": "tiny", "prompt": f"Once upon a time there were {index} ", "seed": index, "temperature": 0.8}
        | {"max_tokens": 150, "ignore_eos": True}
        for index in range(NUM_STREAMS)
    ]


@asynccontextmanager
async def undisturbed_streams(http: aiohttp.ClientSession, url: str) -> AsyncIterator[Readers]:
    """Read eight streams alone, then again and again beside the block; the texts must be the same."""
    alone = await read_once(http, url, bodies())
    async with reading(http, url, bodies()) as seen:
        yield seen
    assert seen.errors == []
    for index, texts in seen.texts.items():
        assert texts, "no stream has ended"
        assert set(texts) == set(alone.texts[index]), f"stream {index} has another text"
    print(
        f"gaps of {len(seen.gaps_s)} tokens: p50 {seen.percentile_s(0.5):.3f} s, p99 {seen.percentile_s(0.99):.3f} s, "
        f"longest {max(seen.gaps_s):.3f} s; alone {alone.percentile_s(0.5):.3f}, {alone.percentile_s(0.99):.3f} and "
        f"{max(alone.gaps_s):.3f} s"
    )
    assert max(seen.gaps_s) < LONGEST_GAP_S


async def test_no_bad_input_changes_what_eight_readers_get(served: Cluster) -> None:
    wrong: list[str] = []
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http, undisturbed_streams(http, served.url):
        for part in (_refused, _refused_by_the_parser, _late, _allowed, _overload, _names, _keys, _sockets):
            wrong += await part(http, served.url)
    assert wrong == []
    wait_until(lambda: _is_idle(served), "nothing is left")


def _is_idle(served: Cluster) -> bool:
    state = served.get("/v1/cluster")["dispatcher"]
    return (state["num_requests"], state["num_queued"], state["num_streams"]) == (0, 0, 0)


async def _refused(http: aiohttp.ClientSession, url: str) -> list[str]:
    wrong = []
    for row in BAD_INPUTS:
        try:
            answer = await send(http, url, row)
        except AssertionError as error:
            wrong.append(f"{row.name}: {error}")
            continue
        if answer != (row.status, row.code, row.param):
            wrong.append(f"{row.name}: {answer}")
    return wrong


async def _refused_by_the_parser(_http: aiohttp.ClientSession, url: str) -> list[str]:
    wrong = []
    for row in RAW_INPUTS:
        head, body = await exchange(url, row.data)
        answer = check_error(status_of(head), body)
        if answer != (row.status, row.code, None):
            wrong.append(f"{row.name}: {answer}")
    return wrong


async def _late(_http: aiohttp.ClientSession, url: str) -> list[str]:
    """Row 20: all of them at once, and sockets on which nothing comes."""
    silent = [exchange(url, limit_s=30.0) for _ in range(50)]
    answers = await asyncio.gather(*silent, *(exchange(url, *pieces, limit_s=30.0) for _, pieces in LATE))
    wrong = [f"20 silent: {answer}" for answer in answers[:50] if answer != (b"", None)]
    for (name, _), (head, body) in zip(LATE, answers[50:], strict=True):
        answer = check_error(status_of(head), body)
        if answer != (408, "request_timeout", None):
            wrong.append(f"{name}: {answer}")
    return wrong


async def _allowed(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Rows 14, 26, 29, 36, 42, 44, 46: strange, but answered."""
    wrong = []
    for name, fields in ALLOWED:
        body = {"model": "tiny", "max_tokens": 2, **fields}
        async with http.post(url + CHAT, json=body) as response:
            if response.status != 200 or (await response.json())["service_tier"] != "default":
                wrong.append(f"{name}: {await response.text()}")
    for given in REQUEST_IDS:
        async with http.get(url + "/live", headers={"X-Request-Id": given}) as response:
            if response.status != 200 or not response.headers["x-request-id"].startswith("req_"):
                wrong.append(f"46 {given[:20]}: {response.status}, {response.headers['x-request-id'][:20]}")
    return wrong


async def _overload(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Row 56: as many choices as may be open, beside the eight streams; all of these may be between two answers."""
    body = {"model": "tiny", "prompt": ["a"] * (MAX_REQUESTS // 2), "n": 2}
    for _ in range(5):
        async with http.post(url + "/v1/completions", json=body) as response:
            if response.status == 200:
                assert len((await response.json())["choices"]) == MAX_REQUESTS
                continue
            answer = check_error(response.status, await response.json())
            if answer == (429, "queue_full", None) and "Retry-After" in response.headers:
                return []
        return [f"56 queue full: {answer}, {dict(response.headers)}"]
    return ["56 queue full: never refused"]


async def _names(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Row 55: names that users choose do not become labels. Row 23: no URL of a message is opened."""
    before = await _num_series(http, url)
    for index in range(300):
        body = {"model": f"model-{index}", "user": f"user-{index}", "messages": HELLO}
        async with http.post(url + CHAT, json=body, headers={"X-Request-Id": f"id-{index}"}) as response:
            assert response.status == 404
        for path in (f"/v1/models/model-{index}", f"/path-{index}"):
            async with http.get(url + path) as response:
                assert response.status == 404
    wrong = [] if await _num_series(http, url) == before else ["55: there are new series"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        image = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        body = {"model": "tiny", **content({"type": "image_url", "image_url": {"url": image}})}
        async with http.post(url + CHAT, json=body) as response:
            assert response.status == 400
        try:
            listener.accept()
        except BlockingIOError:
            return wrong
    return [*wrong, "23: the URL was opened"]


async def _num_series(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url + "/metrics") as response:
        return sum(not line.startswith("#") for line in (await response.text()).splitlines())


async def _keys(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Rows 1 to 3; the wrong keys come from the address that the streams come from too."""
    bearer = "Bearer {}".format
    rows: list[tuple[str, str, str | None, int, str]] = [
        ("1 none", CHAT, None, 401, "invalid_api_key"),
        ("1 scheme", CHAT, f"Basic {KEY}", 401, "invalid_api_key"),
        ("1 empty", CHAT, bearer(""), 401, "invalid_api_key"),
        ("2 wrong", CHAT, bearer("sk-wrong"), 401, "invalid_api_key"),
        ("3 scope", CHAT, bearer(METRICS_KEY), 403, "insufficient_permissions"),
        ("3 admin", "/admin/keys", bearer(KEY), 403, "insufficient_permissions"),
        ("3 no key, no such path", "/v1/nothing", None, 401, "invalid_api_key"),
    ]
    wrong = []
    async with aiohttp.ClientSession() as nobody:
        for name, path, authorization, status, code in rows:
            headers = {} if authorization is None else {"Authorization": authorization}
            async with nobody.post(url + path, json={}, headers=headers) as response:
                answer = check_error(response.status, await response.json())
                if answer != (status, code, None) or (status == 401 and "WWW-Authenticate" not in response.headers):
                    wrong.append(f"{name}: {answer}")
        statuses = set()
        for index in range(1000):
            async with nobody.post(url + CHAT, json={}, headers={"Authorization": bearer(f"sk-{index}")}) as response:
                statuses.add(check_error(response.status, await response.json())[:2])
        if statuses != {(401, "invalid_api_key"), (429, "rate_limit_exceeded")}:
            wrong.append(f"2 a thousand: {statuses}")
        try:
            await nobody.ws_connect(url + "/v1/ws")
        except aiohttp.WSServerHandshakeError as error:
            return wrong if error.status == 401 else [*wrong, f"53 no key: {error.status}"]
    return [*wrong, "53 no key: let in"]


async def _sockets(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Row 53."""
    wrong = []
    try:
        await http.ws_connect(url + "/v1/ws", headers={"Origin": "https://elsewhere.example"})
    except aiohttp.WSServerHandshakeError as error:
        wrong += [] if error.status == 403 else [f"53 origin: {error.status}"]
    for name, sent, code in (
        ("binary", [b"{}"], 1003),
        ("5 MiB", [" " * 5 * MIB], 1009),
        ("bomb", [" " * 16 * MIB], 1009),
        ("a thousand", ["{}"] * 1000, 1008),
    ):
        async with http.ws_connect(url + "/v1/ws", compress=15 if name == "bomb" else 0, autoclose=False) as client:
            try:
                for data in sent:
                    await (client.send_bytes(data) if isinstance(data, bytes) else client.send_str(data))
            except ConnectionError:
                pass  # it is closed already; why, is in what it has sent
            message = await client.receive(10)
            while message.type is aiohttp.WSMsgType.TEXT:
                message = await client.receive(10)
            if (message.type, message.data) != (aiohttp.WSMsgType.CLOSE, code):
                wrong.append(f"53 {name}: {message}")
    return wrong
