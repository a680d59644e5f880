"""Keys over a real socket: who gets in, what each scope opens, what a refusal says. Rows 1 to 3 of the bad inputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio

from services.dispatcher.__main__ import serve as serve_process
from services.dispatcher.access.throttle import BURST
from shared.errors import StartupError
from shared.troubleshooting import sections
from tests.support.dispatchers import CHAT, HELLO, Running, Serve, make_settings, write_keys
from tests.support.socket_talks import talk

OPEN = ["/live", "/ready", "/health", "/errors/invalid_api_key"]
SCOPES = {name: ("acme", name) for name in ("infer", "metrics", "batch", "admin")} | {"other": ("other", "infer")}
KEYS = {f"sk-{name}": what for name, what in SCOPES.items()}
"""Each scope has a key that is called like it, and a second tenant has one to infer."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve, tmp_path: Path) -> AsyncIterator[Running]:
    async with serve("hi", api_keys_file=write_keys(tmp_path / "keys.toml", KEYS)) as running:
        yield running


async def ask(
    served: Running, path: str, key: str | None = None, *, method: str = "GET", body: Any = None, header: str = ""
) -> tuple[int, Any, Any]:
    """Return status, headers and JSON (or text)."""
    value = header or (f"Bearer {f'sk-{key}' if key in SCOPES else key}" if key is not None else "")
    headers = {"Authorization": value} if value else {}
    async with served.http.request(method, served.url + path, headers=headers, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, response.headers, await response.json() if is_json else await response.text()


async def chat(served: Running, key: str | None, **body: Any) -> tuple[int, Any, Any]:
    return await ask(served, CHAT, key, method="POST", body={"model": "tiny", "messages": HELLO, **body})


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer  ", "Basic c2stOmluZmVy", "sk-infer", "Token sk-infer"])
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/models", "/metrics", "/v1/cluster", "/v1/requests", "/version", "/tokenize", "/nowhere", "/"]
)
async def test_every_path_but_the_probes_needs_a_key(served: Running, header: str, path: str) -> None:
    status, headers, body = await ask(served, path, header=header)
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Bearer")
    assert headers["x-request-id"]
    assert body["error"]["type"] == "authentication_error"
    assert body["error"]["code"] == "invalid_api_key"
    assert body["error"]["param"] is None


async def test_probes_and_pages_of_errors_are_open(served: Running) -> None:
    for path in OPEN:
        assert (await ask(served, path))[0] == 200


async def test_whose_key_is_wrong_may_read_the_help_of_the_error(served: Running) -> None:
    _, _, body = await ask(served, "/v1/models", "wrong")
    status, headers, text = await ask(served, body["error"]["help"], "wrong")
    assert (status, headers["Content-Type"]) == (200, "text/markdown; charset=utf-8")
    assert text == sections()["invalid_api_key"]


@pytest.mark.parametrize(
    ("key", "opened"),
    [
        ("infer", {"/v1/models", "/v1/models/tiny", "/version"}),
        ("metrics", {"/v1/models", "/metrics", "/v1/cluster", "/v1/requests", "/version"}),
        ("batch", {"/v1/models", "/version"}),
        ("admin", {"/v1/models", "/version"}),
    ],
)
async def test_a_scope_opens_its_own_paths_and_no_others(served: Running, key: str, opened: set[str]) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/metrics", "/v1/cluster", "/v1/requests"):
        status, headers, body = await ask(served, path, key)
        assert status == (200 if path in opened else 403), path
        if status == 403:
            assert (body["error"]["type"], body["error"]["code"]) == ("permission_error", "insufficient_permissions")
            assert "WWW-Authenticate" not in headers
    status, _, body = await chat(served, key)
    assert status == (200 if key == "infer" else 403)
    if key != "infer":
        assert "'infer'" in body["error"]["message"]


async def test_what_does_not_exist_is_said_only_to_those_who_may_ask(served: Running) -> None:
    assert (await ask(served, "/v1/nowhere"))[0] == 401
    assert (await ask(served, "/v1/nowhere", "metrics"))[0] == 403
    assert (await ask(served, "/v1/nowhere", "infer"))[0] == 404
    assert (await ask(served, CHAT, "infer"))[0] == 405
    assert (await ask(served, CHAT))[0] == 401
    for path, key, status in (
        ("/admin/drain", "admin", 404),
        ("/v1/files", "batch", 400),
        ("/v1/batches/x", "batch", 400),
    ):
        assert (await ask(served, path, "infer"))[0] == 403
        assert (await ask(served, path, key))[0] == status


async def test_a_wrong_key_is_refused_before_the_body_is_read_and_nothing_reaches_a_worker(served: Running) -> None:
    before = len(served.worker.submits)
    status, _, body = await ask(served, CHAT, "sk-wrong", method="POST", body="x" * 100_000)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert "sk-wrong" not in str(body)
    assert len(served.worker.submits) == before


async def test_a_thousand_wrong_keys_are_turned_away_and_the_right_one_is_not(served: Running) -> None:
    statuses, waits = [], set()
    for _ in range(1000):
        status, headers, body = await ask(served, "/v1/models", "sk-wrong")
        statuses.append(status)
        if status == 429:
            waits.add((headers["Retry-After"], headers["x-should-retry"]))
            assert body["error"]["code"] == "rate_limit_exceeded"
    assert statuses[:BURST] == [401] * BURST
    assert statuses.count(429) >= 1000 - BURST - 60
    assert waits == {("1", "true")}
    assert (await ask(served, "/v1/models", "infer"))[0] == 200
    page = (await ask(served, "/metrics", "metrics"))[2]
    assert 'sluice:denied_total{model_name="tiny",reason="too_many_wrong_keys"}' in page


async def test_cached_prompts_are_shared_within_a_tenant_and_never_between_two(served: Running) -> None:
    salts: dict[str, set[str]] = {}
    for key in ("infer", "other", "infer"):
        assert (await chat(served, key))[0] == 200
        salts.setdefault(key, set()).add(served.worker.submits[-1].cache_salt)
    assert all(len(found) == 1 for found in salts.values())
    assert salts["infer"] != salts["other"]


async def test_a_key_that_is_added_while_the_dispatcher_runs_is_let_in(served: Running) -> None:
    path = served.front.settings.api_keys_file
    assert path is not None
    assert (await ask(served, "/v1/models", "sk-new"))[0] in (401, 429)
    write_keys(path, {**KEYS, "sk-new": ("acme", "infer")})
    assert await served.front.access.reload()
    assert (await ask(served, "/v1/models", "sk-new"))[0] == 200


async def test_a_websocket_needs_a_key_when_it_opens(served: Running) -> None:
    for key, status in ((None, 401), ("sk-nobody", 401), ("sk-metrics", 403)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await served.http.ws_connect(served.url + "/v1/ws", headers=headers)
        assert refusal.value.status in (status, 429)
    async with talk(served, "sk-infer") as client:
        assert (await client.answer("a"))[0]["type"] == "start"
    salt = served.worker.submits[-1].cache_salt
    await chat(served, "infer")
    assert served.worker.submits[-1].cache_salt == salt


async def test_a_request_is_cancelled_by_its_tenant_and_is_unknown_to_others(served: Running) -> None:
    """Row 52: not even that it exists is said to another tenant."""
    served.worker.script = None
    headers = {"Authorization": "Bearer sk-infer", "x-request-id": "job"}
    asked = asyncio.create_task(served.ask(headers=headers))
    await served.begun()
    path = "/v1/requests/job/cancel"
    assert (await ask(served, path, method="POST"))[0] == 401
    assert (await ask(served, path, "metrics", method="POST"))[0] == 403
    status, _, answer = await ask(served, path, "other", method="POST")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert (await ask(served, path, "infer", method="POST"))[0] == 200
    async with await asked as response:
        assert (response.status, (await response.json())["error"]["code"]) == (409, "request_cancelled")


async def test_a_dispatcher_that_others_reach_does_not_start_without_keys_or_somebodys_word(folder: Path) -> None:
    """It is refused before anything is read or connected: there is no process here to connect with."""
    with pytest.raises(StartupError, match=r"--api-keys-file.*--allow-no-key"):
        await serve_process(make_settings(folder, host="0.0.0.0"), cast("Any", None))
    with pytest.raises(StartupError, match="there is no model folder"):
        await serve_process(make_settings(folder / "nowhere", host="0.0.0.0", allow_no_key=True), cast("Any", None))


async def test_a_dispatcher_that_starts_without_its_file_of_keys_lets_nobody_in_and_serves_when_it_is_there(
    serve: Serve, tmp_path: Path
) -> None:
    """Neither keyless nor dead: probes say why, requests are told to come back."""
    path = tmp_path / "late.toml"
    async with serve("hi", api_keys_file=path) as running:
        status, _, body = await ask(running, "/ready")
        assert (status, body["reason"]) == (503, "the file of keys cannot be used")
        assert (await ask(running, "/live"))[0] == 200
        for key in (None, "infer"):
            status, headers, body = await chat(running, key)
            assert (status, body["error"]["code"]) == (503, "keys_unknown")
            assert (headers["Retry-After"], headers["x-should-retry"]) == ("2", "true")
            assert str(tmp_path) not in str(body)
        assert running.worker.submits == []
        write_keys(path, KEYS)
        assert await running.front.access.reload()
        assert (await ask(running, "/ready"))[0] == 200
        assert (await chat(running, None))[0] == 401
        assert (await chat(running, "infer"))[0] == 200


async def test_one_key_of_the_settings_opens_what_a_user_needs(serve: Serve) -> None:
    key = "sk-" + "x" * 20
    async with serve("hi", api_key=key) as running:
        assert (await chat(running, None))[0] == 401
        assert (await chat(running, key))[0] == 200
        for path in ("/metrics", "/v1/cluster", "/v1/requests", "/v1/models"):
            assert (await ask(running, path, key))[0] == 200
