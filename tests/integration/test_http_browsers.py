"""What browsers send, over bare sockets: strangers' pages are refused, allowed ones are told what they may read."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from multidict import CIMultiDict

from services.dispatcher.build import _browser_rules
from services.dispatcher.http.server import _ROUTES
from shared.browsers import Foreign
from tests.support.dispatchers import CHAT, HELLO, Running, Serve, make_settings, write_keys
from tests.support.raw_http import check_error, exchange, status_of
from tests.support.socket_talks import talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "https://chat.example"
EVIL = "https://evil.example"
KEY = "sk-mine"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
PATHS = [*_ROUTES, "/v1/models/tiny", "/v1/requests/x/cancel", "/v1/files", "/nowhere", "/"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
SAFE = {"cache-control", "content-language", "content-length", "content-type", "expires", "last-modified", "pragma"}
"""What every page may read (Fetch standard, "CORS-safelisted response-header name")."""
OF_THE_CONNECTION = {"date", "server", "connection", "transfer-encoding", "x-accel-buffering", "vary"}
"""What means nothing to a page."""
BODY = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 2}).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyless(serve: Serve) -> AsyncIterator[Running]:
    async with serve("hi", allow_host=("dispatcher",)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_to_a_page(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A server with keys and rates that lets one page use it."""
    keys = {KEY: ("acme", "infer"), "sk-poor": ("poor", "infer")}
    limits = {"acme": "requests_per_min = 100000", "poor": "requests_per_min = 1"}
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", keys, limits)
    async with serve("hi", api_keys_file=path, allow_origin=(PAGE,)) as running:
        yield running


def raw(*lines: str, method: str = "POST", path: str = CHAT, version: str = "1.1", body: bytes = BODY) -> bytes:
    head = [f"{method} {path} HTTP/{version}", *lines, "Connection: close", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(head).encode() + body


async def ask(running: Running, *lines: str, **what: Any) -> tuple[int, str | None]:
    """Return status and, if it is an error, its code."""
    head, body = await exchange(running.url, raw(*lines, **what))
    status = status_of(head)
    return status, check_error(status, body)[1] if status >= 400 and body is not None else None


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["Host: evil.example"], "foreign_host"),
        (["Host: localhost", f"Origin: {EVIL}"], "foreign_origin"),
        (["Host: localhost", "Origin: null"], "foreign_origin"),
        (["Host: localhost", "Origin: http://["], "foreign_origin"),
        (["Host: localhost:8000", "Origin: http://localhost:8001"], "foreign_origin"),
        (["Host: localhost", "Sec-Fetch-Site: cross-site"], "foreign_origin"),
    ],
)
async def test_a_strangers_page_is_refused_on_every_path_and_by_every_method(
    keyless: Running, lines: list[str], code: str
) -> None:
    before = len(keyless.worker.submits)
    handshake = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    for path in PATHS:
        for method in METHODS:
            extra = handshake if path == "/v1/ws" else ["Access-Control-Request-Method: POST"]
            expected = (403, None if method == "HEAD" else code)
            assert await ask(keyless, *lines, *extra, method=method, path=path) == expected, (method, path)
    assert len(keyless.worker.submits) == before
    denied = {
        each.labels["reason"]: each.value for each in await keyless.samples() if each.name == "sluice:denied_total"
    }
    assert denied[code] >= len(PATHS) * len(METHODS)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (["Host: localhost:8000"], {}),
        (["Host: DISPATCHER:8000"], {}),  # another container, by the name that the operator gave
        (["Host: 10.1.2.3:8000", "User-Agent: kube-probe/1.33"], {}),
        (["Host: [::1]:8000", "Origin: http://[::1]:8000", "Sec-Fetch-Site: same-origin"], {}),
        (["Host: localhost", "Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"], {}),
        ([], {"version": "1.0"}),
        (["Host: localhost"], {"path": f"http://localhost{CHAT}"}),
    ],
)
async def test_programs_probes_and_own_pages_are_not_refused(
    keyless: Running, lines: list[str], what: dict[str, str]
) -> None:
    assert await ask(keyless, *lines, **what) == (200, None)


@pytest.mark.parametrize("lines", [[], ["Host: localhost", "Host: localhost"]])
async def test_a_request_has_one_host(keyless: Running, open_to_a_page: Running, lines: list[str]) -> None:
    """RFC 9112, section 3.2: HTTP/1.1 without exactly one is a 400, wherever it leads."""
    for running in (keyless, open_to_a_page):
        assert await ask(running, *lines) == (400, "bad_request")


async def test_the_name_at_which_it_listens_is_an_own_one(folder: Path) -> None:
    """What `sluice up --host gpu1.lan` prints works when it is opened."""
    rules = _browser_rules(make_settings(folder, host="gpu1.lan", allow_no_key=True))
    assert rules.judge("/", CIMultiDict(Host="gpu1.lan:8000")) is None
    assert rules.judge("/", CIMultiDict(Host="gpu2.lan:8000")) is Foreign.HOST


async def test_with_keys_any_name_leads_to_the_server_and_foreign_pages_still_do_not(open_to_a_page: Running) -> None:
    key = f"Authorization: Bearer {KEY}"
    assert await ask(open_to_a_page, "Host: anything.example", key) == (200, None)
    assert await ask(open_to_a_page, "Host: anything.example") == (401, "invalid_api_key")
    assert await ask(open_to_a_page, "Host: anything.example", key, f"Origin: {EVIL}") == (403, "foreign_origin")
    assert await ask(open_to_a_page, "Host: localhost", key, "Sec-Fetch-Site: cross-site") == (403, "foreign_origin")
    assert await ask(open_to_a_page, "Host: x", key, f"Origin: {PAGE}", "Sec-Fetch-Site: cross-site") == (200, None)


def readable(response: aiohttp.ClientResponse) -> set[str]:
    """Return which headers the page may read, after having checked that it may read the answer."""
    assert response.headers["Access-Control-Allow-Origin"] == PAGE
    assert response.headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in response.headers
    return SAFE | set(response.headers["Access-Control-Expose-Headers"].split(", "))


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", CHAT, AUTHORIZED, {}, 200),
        ("POST", CHAT, {**AUTHORIZED, "Idempotency-Key": "k1"}, {"stream": True}, 200),
        ("GET", "/v1/models", AUTHORIZED, None, 200),
        ("GET", "/live", {}, None, 200),
        ("POST", CHAT, AUTHORIZED, {"n": -1}, 400),
        ("POST", CHAT, {}, {}, 401),
        ("POST", CHAT, {"Authorization": "Bearer sk-no"}, {}, 401),
        ("GET", "/metrics", AUTHORIZED, None, 403),
        ("GET", "/v1/nowhere", AUTHORIZED, None, 404),
        ("GET", CHAT, AUTHORIZED, None, 405),
        ("POST", CHAT, AUTHORIZED, {"user": "x" * 5 * 1024 * 1024}, 413),
        ("POST", CHAT, {**AUTHORIZED, "Content-Encoding": "gzip"}, {}, 415),
        ("POST", CHAT, {"Authorization": "Bearer sk-poor"}, {"n": 2}, 429),
        ("GET", "/v1/models", {**AUTHORIZED, "X-Long": "x" * 9000}, None, 431),
    ],
)
async def test_an_allowed_page_reads_every_answer_and_what_it_says_about_limits(
    open_to_a_page: Running, method: str, path: str, headers: dict[str, str], body: Any, status: int
) -> None:
    data = None if body is None else io.BytesIO(json.dumps({"model": "tiny", "messages": HELLO, **body}).encode())
    headers = {"Content-Type": "application/json", **headers, "Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
    async with open_to_a_page.http.request(method, open_to_a_page.url + path, headers=headers, data=data) as response:
        assert response.status == status
        named = {name.lower() for name in response.headers if not name.startswith("Access-Control-")}
        assert named - OF_THE_CONNECTION <= readable(response)
        assert "x-request-id" in named
        assert ("x-ratelimit-remaining-requests" in named) == (status in (200, 429) and path == CHAT)
        assert status < 400 or check_error(status, json.loads(await response.read()))


async def test_a_failure_of_the_server_is_readable_too(
    open_to_a_page: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("services.dispatcher.answers.generate.stream_answer", fail)
    headers = {**AUTHORIZED, "Origin": PAGE}
    async with open_to_a_page.ask(headers=headers, stream=True) as response:
        assert response.status == 500
        assert "x-request-id" in readable(response)


ASKED = "authorization, content-type, x-stainless-os, Last-Event-ID, idempotency-key, x-request-id, traceparent"


@pytest.mark.parametrize("path", PATHS)
async def test_a_preflight_is_answered_without_a_key_and_alike_on_every_path(
    open_to_a_page: Running, path: str
) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED}
    async with open_to_a_page.http.options(open_to_a_page.url + path, headers=asked) as response:
        assert (response.status, await response.read()) == (204, b"")
        assert "x-request-id" in readable(response)
        assert response.headers["Access-Control-Allow-Methods"] == "GET, HEAD, POST"
        assert response.headers["Access-Control-Allow-Headers"] == ASKED
        assert int(response.headers["Access-Control-Max-Age"]) > 0


async def test_a_preflight_gives_back_names_only(open_to_a_page: Running) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    for names, given in ((" x-a ,,b c, é, x:y, x-d", "x-a, x-d"), ("", None), ("(", None)):
        headers = {**asked, "Access-Control-Request-Headers": names}
        async with open_to_a_page.http.options(open_to_a_page.url + CHAT, headers=headers) as response:
            assert response.headers.get("Access-Control-Allow-Headers") == given


@pytest.mark.parametrize("headers", [{"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}])
async def test_what_is_no_preflight_is_an_ordinary_request(open_to_a_page: Running, headers: dict[str, str]) -> None:
    async with open_to_a_page.http.options(open_to_a_page.url + CHAT, headers=headers) as response:
        assert response.status == 401


async def test_other_pages_and_programs_are_told_nothing_but_that_it_depends(
    open_to_a_page: Running, keyless: Running
) -> None:
    for running, vary in ((open_to_a_page, "Origin"), (keyless, None)):
        for headers in ({}, {"Origin": EVIL}, {"Origin": running.url}):
            async with running.http.get(running.url + "/v1/models", headers={**AUTHORIZED, **headers}) as response:
                assert response.status == (403 if headers.get("Origin") == EVIL else 200)
                assert [name for name in response.headers if name.startswith("Access-Control")] == []
                assert response.headers.get("Vary") == vary


async def test_everybodys_pages_may_where_the_settings_say_so(serve: Serve) -> None:
    key = "k" * 16
    async with serve("hi", api_key=key, allow_origin=("*",)) as running:
        for origin in (EVIL, "null", "\udcff"):
            lines = [f"Authorization: Bearer {key}", "Host: localhost", "Sec-Fetch-Site: cross-site"]
            data = raw(*lines).replace(b"Host:", b"Origin: %b\r\nHost:" % origin.encode(errors="surrogateescape"))
            head, _ = await exchange(running.url, data)
            assert status_of(head) == 200
            assert b"\r\nAccess-Control-Allow-Origin: *\r\n" in head


async def test_a_websocket_opens_for_the_page_that_may_and_for_no_other(open_to_a_page: Running) -> None:
    async with talk(open_to_a_page, KEY, origin=PAGE) as client:
        assert (await client.answer("a"))[0]["type"] == "start"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await open_to_a_page.http.ws_connect(open_to_a_page.url + "/v1/ws", headers=AUTHORIZED, origin=EVIL)
    assert refusal.value.status == 403


@pytest.mark.parametrize(
    ("limit", "size", "status"),
    [
        (8192, 7 * 1024, 200),
        (8192, 12 * 1024, 431),
        (32768, 12 * 1024, 200),
        (32768, 31 * 1024, 200),
        (32768, 33 * 1024, 431),
        (32768, 80 * 1024, 431),
        (1024, 2 * 1024, 431),
    ],
)
async def test_the_size_of_a_head_is_a_setting(serve: Serve, limit: int, size: int, status: int) -> None:
    """Behind single sign-on 12 KiB of cookies are usual."""
    async with serve("hi", head_limit=limit) as running:
        for line in (f"Cookie: {'x' * size}", f"X-Request-Id: a\r\nCookie: {'x' * size}"):
            head, body = await exchange(running.url, raw("Host: localhost", line))
            assert status_of(head) == status
            assert status == 200 or f"longer than {limit} bytes" in body["error"]["message"]
        line = f"Host: localhost\r\nX-Request-Id: {'x' * limit}"
        assert await ask(running, line) == (200, None), "it is just replaced"
