"""The whole table of bad inputs against a real cluster, while eight healthy streams go on: their texts do not change.

The numbers are those of the security design. `test_http_bad_inputs.py` has the same rows one by one, with a clearer
message when one fails.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import numpy as np
import pytest

from tests.support.bad_inputs import ALLOWED, KEY, LATE, MIB, REQUEST_IDS, bad_inputs, content, raw_inputs
from tests.support.cluster import Cluster, cluster
from tests.support.dispatchers import CHAT, COMPLETIONS, HELLO, write_keys
from tests.support.fault_cluster import DEMO_MODEL
from tests.support.fault_streams import Ask, Reader, all_read, ask
from tests.support.processes import wait_until
from tests.support.raw_http import check_error, exchange, send, status_of
from tests.support.text_models import CHATML
from tests.support.waiting import rounds

NUM_STREAMS = 8
CONTEXT = 512
LIMIT_S = 4.0
"""For a head and for a body. Longer than a row takes on a machine that stands still now and then."""
LONGEST_GAP_S = 10.0
"""On a machine that other work keeps busy too. A row that held up the event loop for longer would be seen here."""
MAX_REQUESTS = 160
METRICS_KEY = "sk-for-metrics-only-0001"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tmp_path_factory.mktemp("model")
    shutil.copytree(DEMO_MODEL, model, dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text(CHATML)  # reads neither tools nor a switch, as the rows have it
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(keys, {KEY: ("table", "infer", "metrics"), METRICS_KEY: ("table", "metrics")})
    env = {
        "SLUICE_DISPATCHER_BODY_LIMIT_S": str(LIMIT_S),
        "SLUICE_DISPATCHER_HEAD_LIMIT_S": str(LIMIT_S),
        "SLUICE_DISPATCHER_MAX_REQUESTS": str(MAX_REQUESTS),
    }
    flags = ["--served-model-name", "tiny", "--memory", "512MiB", "--threads", "1", "--deterministic"]
    flags += ["--model", str(model), "--max-model-len", str(CONTEXT), "--api-keys-file", str(keys)]
    with cluster(*flags, env=env) as running:
        running.key = KEY
        yield running
        running.wait_until_idle()


def asked(index: int) -> Ask:
    """Return a stream; each draws with its own seed, and ends by its length."""
    prompt = f"Once upon a time there were {index} "
    return ask(str(index), COMPLETIONS, model="tiny", prompt=prompt, seed=index, temperature=0.8, max_tokens=150)


@asynccontextmanager
async def undisturbed_streams(http: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Read eight streams alone, then again and again beside the block; the answers must be the same."""
    alone = [Reader(http, url, asked(index), {}) for index in range(NUM_STREAMS)]
    await all_read(alone)
    seen, stopping = [Reader(http, url, asked(index), {}) for index in range(NUM_STREAMS)], asyncio.Event()
    reading = [asyncio.create_task(_read_on(reader, stopping)) for reader in seen]
    try:
        yield
    finally:
        stopping.set()
        await asyncio.wait(reading)
    await asyncio.gather(*reading)
    for once, reader in zip(alone, seen, strict=True):
        assert (once.told.is_whole, once.told.error) == (True, None), once.told
        for told in (*reader.earlier, reader.told):
            assert told.answer() == once.told.answer(), f"stream {reader.asked.name} has another answer"
    _tell_gaps("alone", alone)
    assert _tell_gaps("beside bad inputs", seen) < LONGEST_GAP_S


async def _read_on(reader: Reader, stopping: asyncio.Event) -> None:
    """Ask for the same again when it has ended, until somebody says to stop; then read to the end."""
    await reader.task
    while not stopping.is_set():
        reader.ask_anew()
        await reader.task


def _tell_gaps(when: str, readers: list[Reader]) -> float:
    """Print what pauses the readers saw; return the longest."""
    gaps_s = [gap_s for reader in readers for told in (*reader.earlier, reader.told) for gap_s in told.gaps_s]
    p50_s, p99_s, longest_s = np.percentile(gaps_s, (50, 99, 100))
    print(f"{when}: gaps of {len(gaps_s)} tokens: p50 {p50_s:.3f} s, p99 {p99_s:.3f} s, longest {longest_s:.3f} s")
    return float(longest_s)


@pytest.mark.slow
async def test_no_bad_input_changes_what_eight_readers_get(served: Cluster) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http, undisturbed_streams(http, served.url):
        for part in (_refused, _late, _allowed, _overload, _names, _keys, _sockets):
            await part(http, served.url)
    wait_until(lambda: _is_idle(served), "nothing is left")


def _is_idle(served: Cluster) -> bool:
    state = served.get("/v1/cluster")["dispatcher"]
    return (state["num_requests"], state["num_queued"], state["num_streams"]) == (0, 0, 0)


async def _refused(http: aiohttp.ClientSession, url: str) -> None:
    for row in bad_inputs():
        assert await send(http, url, row) == (row.status, row.code, row.param), row.name
    for raw in raw_inputs():
        head, body = await exchange(url, raw.data)
        assert check_error(status_of(head), body) == (raw.status, raw.code, None), raw.name


async def _late(_http: aiohttp.ClientSession, url: str) -> None:
    """Row 20: all of them at once, and sockets on which nothing comes."""
    silent = [exchange(url, limit_s=30.0) for _ in range(50)]
    answers = await asyncio.gather(*silent, *(exchange(url, *pieces, limit_s=30.0) for _, pieces in LATE))
    assert answers[:50] == [(b"", None)] * 50
    for (name, _), (head, body) in zip(LATE, answers[50:], strict=True):
        assert check_error(status_of(head), body) == (408, "request_timeout", None), name


async def _allowed(http: aiohttp.ClientSession, url: str) -> None:
    """Rows 14, 26, 29, 36, 42, 44, 46: strange, but answered."""
    for name, fields in ALLOWED:
        async with http.post(url + CHAT, json={"model": "tiny", "max_tokens": 2, **fields}) as response:
            assert response.status == 200, (name, await response.text())
            assert (await response.json())["service_tier"] == "default", name
    for given in REQUEST_IDS:
        async with http.get(url + "/live", headers={"X-Request-Id": given}) as response:
            assert response.status == 200
            assert response.headers["x-request-id"].startswith("req_"), given[:20]


async def _overload(http: aiohttp.ClientSession, url: str) -> None:
    """Row 56: as many choices as may be open, beside the eight streams; all of these may be between two answers."""
    body = {"model": "tiny", "prompt": ["a"] * (MAX_REQUESTS // 2), "n": 2}
    for _ in rounds("56 queue full", 5):
        async with http.post(url + "/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            assert check_error(response.status, answer) == (429, "queue_full", None)
            assert "Retry-After" in response.headers
            return
        assert len(answer["choices"]) == MAX_REQUESTS


async def _names(http: aiohttp.ClientSession, url: str) -> None:
    """Row 55: names that users choose do not become labels. Row 23: no URL of a message is opened."""
    before = await _num_series(http, url)
    for index in range(300):
        body = {"model": f"model-{index}", "user": f"user-{index}", "messages": HELLO}
        async with http.post(url + CHAT, json=body, headers={"X-Request-Id": f"id-{index}"}) as response:
            assert response.status == 404
        for path in (f"/v1/models/model-{index}", f"/path-{index}"):
            async with http.get(url + path) as response:
                assert response.status == 404
    assert await _num_series(http, url) == before, "there are new series"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        image = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        body = {"model": "tiny", **content({"type": "image_url", "image_url": {"url": image}})}
        async with http.post(url + CHAT, json=body) as response:
            assert response.status == 400
        with pytest.raises(BlockingIOError):
            listener.accept()


async def _num_series(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url + "/metrics") as response:
        return sum(not line.startswith("#") for line in (await response.text()).splitlines())


async def _keys(_http: aiohttp.ClientSession, url: str) -> None:
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
    async with aiohttp.ClientSession() as nobody:
        for name, path, authorization, status, code in rows:
            headers = {} if authorization is None else {"Authorization": authorization}
            async with nobody.post(url + path, json={}, headers=headers) as response:
                assert check_error(response.status, await response.json()) == (status, code, None), name
                assert status != 401 or "WWW-Authenticate" in response.headers, name
        statuses = set()
        for index in range(1000):
            async with nobody.post(url + CHAT, json={}, headers={"Authorization": bearer(f"sk-{index}")}) as response:
                statuses.add(check_error(response.status, await response.json())[:2])
        assert statuses == {(401, "invalid_api_key"), (429, "rate_limit_exceeded")}
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await nobody.ws_connect(url + "/v1/ws")
        assert refusal.value.status == 401


async def _sockets(http: aiohttp.ClientSession, url: str) -> None:
    """Row 53."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await http.ws_connect(url + "/v1/ws", headers={"Origin": "https://elsewhere.example"})
    assert refusal.value.status == 403
    for name, sent, code in (
        ("binary", [b"{}"], 1003),
        ("5 MiB", [" " * 5 * MIB], 1009),
        ("bomb", [" " * 16 * MIB], 1009),
        ("a thousand", ["{}"] * 1000, 1008),
    ):
        async with http.ws_connect(url + "/v1/ws", compress=15 if name == "bomb" else 0, autoclose=False) as client:
            with suppress(ConnectionError):  # it is closed already; why, is in what it has sent
                for data in sent:
                    await (client.send_bytes(data) if isinstance(data, bytes) else client.send_str(data))
            message = await client.receive(10)
            while message.type is aiohttp.WSMsgType.TEXT:
                message = await client.receive(10)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, code), name
