"""GET /v1/requests: what it says of the requests that are served now, and what it never says."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from services.dispatcher.endpoints import open_requests
from tests.support.dispatchers import COMPLETIONS, Running, Serve, write_keys
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMPTY = {"queued": 0, "prefill": 0, "streaming": 0, "paused": 0}


async def until_ended(asked: list[asyncio.Task[Any]]) -> None:
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_nothing_is_listed_while_nothing_runs(running: Running) -> None:
    status, body = await running.get("/v1/requests")
    assert status == 200
    assert body["counts"] == [{"tier": tier, **EMPTY} for tier in ("priority", "default", "flex")]
    assert (body["requests"], body["waiting"], body["num_left_out"], body["num_late"]) == ([], [], 0, 0)


async def test_a_stream_is_listed_with_its_reader_until_it_ends(running: Running) -> None:
    """The reader of ten tokens, four a second, has them for two seconds and a half after the first second."""
    qoe = {"ttft_s": 1.0, "speed_tokens_per_s": 4.0}
    async with running.ask(COMPLETIONS, prompt="a secret", stream=True, max_tokens=50, qoe=qoe) as response:
        (item,) = await running.begun()
        _, body = await running.get("/v1/requests")
        (row,) = body["requests"]
        assert (row["state"], row["worker_id"], row["num_output_tokens"]) == ("queued", "w0", 0)
        assert 0 < row["slack_s"] <= 1.0
        await running.worker.emit(item, running.encode("ten words ") * 3)
        num_tokens = len(item.tokens)
        await until(lambda: all(len(session.tokens) == num_tokens for session in running.table))
        _, body = await running.get("/v1/requests")
        (row,) = body["requests"]
        assert body["dispatcher_id"] == running.front.settings.instance_id
        assert body["counts"][1] == {"tier": "default", **EMPTY, "streaming": 1}
        assert (row["state"], row["tier"], row["tenant"]) == ("streaming", "default", "")
        assert (row["num_output_tokens"], row["qoe"]) == (num_tokens, 1.0)
        assert row["num_prompt_tokens"] > 0
        expected_s = 1.0 + num_tokens / 4 - row["age_s"]
        assert row["slack_s"] == pytest.approx(expected_s, abs=0.002)
        assert not {"prompt", "text", "messages"} & row.keys()
        await running.end(item)
        await response.read()
    assert (await running.get("/v1/requests"))[1]["requests"] == []


async def test_what_is_listed_is_cancelled_by_its_name(running: Running) -> None:
    asked = asyncio.ensure_future(running.post(COMPLETIONS))
    await running.begun()
    _, body = await running.get("/v1/requests")
    (row,) = body["requests"]
    assert (row["slack_s"], row["qoe"]) == (None, None), "nobody reads it as it comes"
    async with running.http.post(f"{running.url}/v1/requests/{row['id']}/cancel") as response:
        assert response.status == 200
    assert (await asked)[1]["error"]["code"] == "request_cancelled"


async def test_of_many_the_most_urgent_are_listed_all_are_counted_and_others_have_their_turn(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 choices: 80 late already, 80 with half an hour, and 80 that nobody reads."""
    monkeypatch.setattr(open_requests, "CHOICES_AT_ONCE", 20)
    common = {"n": 80, "max_tokens": 9}
    kinds: list[dict[str, Any]] = [{"stream": True, "qoe": {"ttft_s": ttft_s}} for ttft_s in (0.001, 1800.0)] + [{}]
    async with aiohttp.ClientSession() as http:
        asked = [
            asyncio.ensure_future(_read(http, running.url, {"model": "tiny", "prompt": "x", **common, **kind}))
            for kind in kinds
        ]
        await running.begun(240)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        answer = await open_requests.list_requests(running.front, None, "")  # type: ignore[arg-type]
        counting.cancel()
        assert turns >= 240 / 20
        assert answer.body
        _, body = await running.get("/v1/requests")
        rows = body["requests"]
        assert (len(rows), body["num_left_out"], body["num_late"]) == (open_requests.MAX_LISTED, 40, 80)
        assert body["counts"][1] == {"tier": "default", **EMPTY, "queued": 240}
        slack = [row["slack_s"] for row in rows]
        assert slack[160:] == [None] * 40
        assert slack[:160] == sorted(slack[:160])
        assert (slack[79] < 0, slack[80] > 0) == (True, True)
        assert len({(row["id"], row["choice"]) for row in rows}) == len(rows)
        await until_ended(asked)
    await running.until_nothing_is_left()


async def _read(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url + COMPLETIONS, json=body) as response:
        await response.read()


async def test_a_key_for_metrics_sees_whose_each_request_is(serve: Serve, tmp_path: Any) -> None:
    """As in `sluice:tenant_tokens`: who may look at the cluster looks at all of it."""
    keys = {"sk-of-acme-0000000": ("acme", "infer"), "sk-of-others-00000": ("others", "metrics")}
    async with serve(api_keys_file=write_keys(tmp_path / "keys.toml", keys)) as running:
        headers = {"Authorization": "Bearer sk-of-acme-0000000"}
        async with running.ask(COMPLETIONS, headers, stream=True):
            await running.begun()
            status, body = await running.get("/v1/requests", Authorization="Bearer sk-of-others-00000")
            assert (status, [row["tenant"] for row in body["requests"]]) == (200, ["acme"])
            status, _ = await running.get("/v1/requests", Authorization="Bearer sk-of-acme-0000000")
            assert status == 403
