"""Limits of tenants, tiers and overload over a real socket: what is refused, with which words, and what it costs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.dispatcher.access.grants import Grant
from services.dispatcher.limits.tenants import Permit, Tenants, UsageLimit
from shared.api_keys import Tier
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.dispatchers import CHAT, COMPLETIONS, Running, Serve, write_keys
from tests.support.fake_worker import Running as RunningRequest
from tests.support.fake_worker import make_status
from tests.support.raw_http import chat_bytes, connect_narrow
from tests.support.socket_talks import talk
from tests.support.waiting import until

NUM_PROMPT = 13
"""Tokens of the greeting in the test's template."""

pytestmark = pytest.mark.asyncio(loop_scope="module")
Limited = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def limited(serve: Serve, tmp_path: Path) -> Limited:
    """Serves two tenants: `a` with the limits, `b` without any; their keys are their names."""

    @asynccontextmanager
    async def serve_both(limits: str, script: Any = lambda _: [65, 66], **settings: Any) -> AsyncIterator[Running]:
        keys = {name: (name, "infer", "metrics") for name in "ab"}
        path = write_keys(tmp_path / "keys.toml", keys, {"a": limits})
        async with serve(script, api_keys_file=path, **settings) as running:
            yield running

    return serve_both


async def ask(running: Running, key: str = "a", **body: Any) -> tuple[int, dict[str, str], Any]:
    """Return status, headers (names in small letters) and JSON of a chat."""
    async with running.ask(headers={"Authorization": f"Bearer {key}"}, **{"max_tokens": 10, **body}) as response:
        is_json = response.content_type == "application/json"
        data = await response.json() if is_json else await response.text()
        return response.status, {name.lower(): value for name, value in response.headers.items()}, data


async def samples(running: Running, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by its labels but the model's, sorted by name."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "model_name"): sample.value
        for sample in await running.samples(Authorization="Bearer a")
        if sample.name == name
    }


async def test_requests_per_minute_end_in_a_429_that_says_when_to_come_back(limited: Limited) -> None:
    async with limited("requests_per_min = 3") as running:
        remaining = []
        for _ in range(3):
            status, headers, _ = await ask(running)
            assert status == 200
            assert headers["x-ratelimit-limit-requests"] == "3"
            remaining.append(headers["x-ratelimit-remaining-requests"])
            assert "x-ratelimit-limit-tokens" not in headers
        assert remaining == ["2", "1", "0"]
        status, headers, body = await ask(running)
        assert status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert "3 requests per minute" in body["error"]["message"]
        assert headers["x-should-retry"] == "true"
        assert 15 <= int(headers["retry-after"]) <= 20
        assert 15_000 < int(headers["retry-after-ms"]) <= 20_000
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        assert (await ask(running, "b"))[0] == 200
        assert len(running.worker.submits) == 4
        assert await samples(running, "sluice:limited_total") == {("requests", "a"): 1}
        assert await samples(running, "sluice:shed_total") == {("rate_limit_exceeded", "default"): 1}


def check_left(headers: Mapping[str, str], what: str, left: int, per_min: int, since_s: float) -> None:
    """Check what the headers say is left, which is more where it was refilled since (a time of `time.monotonic`)."""
    found = int(headers[f"x-ratelimit-remaining-{what}"])
    assert left <= found <= left + (time.monotonic() - since_s) * per_min / 60 + 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_are_charged_in_full_at_the_start_and_given_back_at_the_end(
    limited: Limited, streamed: bool
) -> None:
    """200 per minute. 13 of the prompt and 100 asked for leave 87; 2 are used, so 185 are there at the end."""
    async with limited("tokens_per_min = 200") as running:
        started_s = time.monotonic()
        status, headers, _ = await ask(running, max_tokens=100, stream=streamed)
        assert status == 200
        check_left(headers, "tokens", 200 - NUM_PROMPT - 100, 200, started_s)
        assert headers["x-ratelimit-limit-tokens"] == "200"
        _, headers, _ = await ask(running, max_tokens=100)
        check_left(headers, "tokens", 200 - (NUM_PROMPT + 2) - (NUM_PROMPT + 100), 200, started_s)
        assert await samples(running, "sluice:tenant_tokens_total") == {
            ("generation", "a"): 4,
            ("prompt", "a"): 2 * NUM_PROMPT,
        }


async def test_each_choice_is_charged(limited: Limited) -> None:
    limits = "tokens_per_min = 1000\nrequests_per_min = 100"
    async with limited(limits) as running:
        started_s = time.monotonic()
        _, headers, _ = await ask(running, n=4, max_tokens=50)
        check_left(headers, "tokens", 1000 - NUM_PROMPT - 200, 1000, started_s)
        check_left(headers, "requests", 96, 100, started_s)


async def test_limits_hold_over_a_websocket_too(limited: Limited) -> None:
    async with limited("requests_per_min = 1") as running:
        async with talk(running, "a") as client:
            assert "error" not in {message["type"] for message in await client.answer("first")}
            error, done = await client.answer("second")
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", 429, "rate_limit_exceeded")
        assert 50_000 < error["retry_after_ms"] <= 60_000
        assert error["should_retry"] is True
        assert done["type"] == "done"
        assert running.front.tenants._usage["a"].num_open == 0


async def test_what_an_earlier_connection_got_is_charged_once(limited: Limited) -> None:
    """Of 1 000: 4 tokens come over one connection and 3 over the next, and each of the two pays for the prompt."""
    async with limited("tokens_per_min = 1000", script=None) as running:
        headers = {"Authorization": "Bearer a", "Idempotency-Key": "mine"}
        front, started_s = running.front, time.monotonic()
        for number, (tokens, finish) in enumerate(
            (([65, 66, 67, 68], FinishReason.NONE), ([65, 66, 67], FinishReason.STOP))
        ):
            async with running.ask(headers=headers, max_tokens=100, stream=True) as response:
                await until(lambda number=number: len(running.worker.submits) == number + 1)
                item = running.worker.running[running.worker.submits[-1].request_id, running.worker.submits[-1].attempt]
                await running.worker.emit(item, tokens, finish)
                if finish is FinishReason.STOP:
                    await response.read()
                else:
                    await until(lambda: sum(len(session.tokens) for session in running.table) == 4)
            await until(lambda: front.tenants._usage["a"].num_open == 0)
        (tenant,) = {grant.tenant for grant in [front.access.authenticate("Bearer a", "")] if isinstance(grant, Grant)}
        (rate,) = front.tenants.rates(tenant, front.now())
        used = 2 * NUM_PROMPT + 4 + 3
        refilled = (time.monotonic() - started_s) * 1000 / 60 + 1
        assert 1000 - used <= rate.remaining <= 1000 - used + refilled


def resumed(running: Running, **body: Any) -> Any:
    """Return a request of tenant `a` that is the same one each time; an asynchronous context, or to be awaited."""
    headers = {"Authorization": "Bearer a", "Idempotency-Key": "mine"}
    return running.ask(headers=headers, **{"max_tokens": 100, "stream": True, **body})


async def newest(running: Running, count: int) -> RunningRequest:
    """Return what the worker runs once it has been asked so often."""
    submits = running.worker.submits
    await until(lambda: len(submits) >= count)
    await until(lambda: (submits[-1].request_id, submits[-1].attempt) in running.worker.running)
    return running.worker.running[submits[-1].request_id, submits[-1].attempt]


def tokens_left(running: Running) -> int:
    grant = running.front.access.authenticate("Bearer a", "")
    assert isinstance(grant, Grant)
    (left,) = [
        rate.remaining
        for rate in running.front.tenants.rates(grant.tenant, running.front.now())
        if rate.limit is UsageLimit.TOKENS
    ]
    return left


async def test_who_asks_again_takes_over_what_the_connection_before_had_of_the_limits(limited: Limited) -> None:
    """One at a time, one a minute, and tokens for one: the newer connection is refused nothing, and charged nothing."""
    limits = "max_concurrent = 1\nrequests_per_min = 1\ntokens_per_min = 120"
    async with limited(limits, script=None) as running:
        started_s, usage = time.monotonic(), running.front.tenants._usage
        async with resumed(running) as first:
            item = await newest(running, 1)
            await running.worker.emit(item, [65, 66, 67, 68])
            async with resumed(running) as second:
                await newest(running, 2)
                assert (second.status, usage["a"].num_open) == (200, 1)
                async with resumed(running) as third:
                    item = await newest(running, 3)
                    assert (third.status, usage["a"].num_open) == (200, 1)
                    await running.worker.emit(item, [65, 66, 67], FinishReason.STOP)
                    await third.read()
                assert b"request_superseded" in await second.read()
            assert b"request_superseded" in await first.read()
        await until(lambda: usage["a"].num_open == 0)
        used = NUM_PROMPT + 4 + 3
        assert 120 - used <= tokens_left(running) <= 120 - used + (time.monotonic() - started_s) * 2 + 1
        async with resumed(running) as again:  # that answer is over: a request of its own
            assert again.status == 429
        assert usage["a"].num_open == 0


async def test_who_asks_again_is_not_refused_because_the_queue_is_full_of_itself(limited: Limited) -> None:
    async with limited("max_queued = 1\nmax_concurrent = 1", max_queued=1) as running:
        running.worker.refuse = RefusalReason.FULL
        sessions = running.front.sessions
        old = asyncio.create_task(resumed(running, stream=False).__aenter__())
        await until(lambda: sessions.num_queued == 1)
        new = asyncio.create_task(resumed(running, stream=False).__aenter__())
        assert (await old).status == 409
        await until(lambda: sessions.num_queued == 1)
        running.worker.refuse = None
        await running.view(make_status())
        assert (await new).status == 200


async def test_who_asks_again_while_the_server_drains_does_not_end_what_runs(limited: Limited) -> None:
    async with limited("max_concurrent = 1", script=None) as running, resumed(running) as old:
        item = await newest(running, 1)
        running.front.sessions.draining = True
        async with resumed(running) as new:
            assert (new.status, (await new.json())["error"]["code"]) == (503, "draining")
        await running.worker.emit(item, [65], FinishReason.STOP)
        assert b"[DONE]" in await old.read()
        assert running.front.tenants._usage["a"].num_open == 0
        running.front.sessions.draining = False


async def disturb(
    running: Running, rng: random.Random, tasks: list[asyncio.Task[Any]], connect: Callable[[], Any]
) -> None:
    """Open a connection, or close one, or have the worker send a token; and let some callbacks run."""
    what = rng.choice(("ask", "ask", "token", "token", "token", "leave", "wait"))
    if what == "ask":
        tasks.append(asyncio.create_task(connect()))
    elif what == "leave" and tasks:
        rng.choice(tasks).cancel()
    elif what == "token" and running.worker.running:
        await running.worker.emit(list(running.worker.running.values())[-1], [65])
    for _ in range(rng.choice((0, 1, 5, 30))):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_the_order_of_connections_and_ends_each_token_is_paid_once_and_each_place_given_back(
    limited: Limited, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections for one answer come and go; each that comes while another is open replaces it, whatever that does."""
    rng, permits = random.Random(seed), []
    enter = Tenants.enter

    def counted(*args: Any) -> Any:
        permits.append(enter(*args))
        return permits[-1]

    monkeypatch.setattr(Tenants, "enter", counted)
    async with limited("max_concurrent = 1\ntokens_per_min = 10000", script=None) as running:
        worker, started_s, tasks = running.worker, time.monotonic(), list[asyncio.Task[Any]]()

        async def connect() -> tuple[int, bytes]:
            async with resumed(running, max_tokens=400) as response:
                return response.status, await response.read()

        for _ in range(40):
            await disturb(running, rng, tasks, connect)
            assert not permits or running.front.tenants._usage["a"].num_open in (0, 1)
        tasks.append(asyncio.create_task(connect()))
        while not all(task.done() for task in tasks):  # whichever is the newest in the end
            item = list(worker.running.values())[-1] if worker.running else None
            if item is not None and not item.finish:
                await worker.emit(item, [66], FinishReason.STOP)
            await asyncio.sleep(0.002)
        for task in tasks:
            with suppress(asyncio.CancelledError):
                assert (await task)[0] in (200, 409)
        await running.until_nothing_is_left()
        assert running.front.tenants._usage["a"].num_open == 0
        assert all(isinstance(permit, Permit) for permit in permits), "none was refused"
        assert item is not None
        num_tokens, refilled = len(item.tokens), (time.monotonic() - started_s) * 10_000 / 60 + 1
        used = 10_000 - tokens_left(running)
        assert num_tokens + NUM_PROMPT - refilled <= used <= num_tokens + len(permits) * NUM_PROMPT


async def test_a_request_that_can_never_fit_is_not_to_be_tried_again(limited: Limited) -> None:
    limits = "tokens_per_min = 100\nrequests_per_min = 5\nmax_concurrent = 3"
    async with limited(limits) as running:
        for name, value, what in (("max_tokens", 100, "tokens per minute"), ("n", 4, "requests at a time")):
            fields: dict[str, Any] = {name: value}
            status, headers, body = await ask(running, **fields)
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert headers["x-should-retry"] == "false"
            assert "retry-after" not in headers
            assert what in body["error"]["message"]
        assert (await ask(running))[0] == 200
        assert await samples(running, "sluice:limited_total") == {("tokens", "a"): 1, ("concurrent", "a"): 1}


async def test_places_are_held_until_the_answer_ends_or_the_client_leaves(limited: Limited) -> None:
    async with limited("max_concurrent = 2\ntokens_per_min = 500", script=None) as running:
        tenants = running.front.tenants
        first = asyncio.create_task(ask(running, n=2))
        await running.begun(2)
        status, headers, body = await ask(running)
        assert (status, headers["retry-after"], headers["x-should-retry"]) == (429, "1", "true")
        assert "2 requests at a time" in body["error"]["message"]
        first.cancel()
        await until(lambda: tenants._usage["a"].num_open == 0 and not running.worker.running)
        second = asyncio.create_task(ask(running))
        (item,) = await running.begun()
        assert tenants._usage["a"].num_open == 1
        await running.worker.emit(item, [65], FinishReason.STOP)
        status, headers, _ = await second
        assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) >= 500 - 2 * NUM_PROMPT - 10
        assert tenants._usage["a"].num_open == 0


async def test_a_tenant_that_may_not_wait_is_refused_where_others_wait(limited: Limited) -> None:
    async with limited("max_queued = 1", queue_limit_s=30.0) as running:
        running.worker.refuse = RefusalReason.FULL
        sessions = running.front.sessions
        waiting = [asyncio.create_task(ask(running, key)) for key in "abb"]
        await until(lambda: sessions.num_queued == 3)
        status, headers, body = await ask(running)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert headers["x-should-retry"] == "true"
        running.worker.refuse = None
        await running.view(make_status())
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 3


@pytest.mark.parametrize(
    ("tier", "asked", "given"),
    [
        ("flex", "auto", "flex"),
        ("flex", "priority", "flex"),
        ("default", "flex", "flex"),
        ("default", "scale", "default"),
        ("default", "priority", "default"),
        ("default", None, "default"),
        ("priority", "priority", "priority"),
        ("priority", "fast", "priority"),
        ("priority", "auto", "default"),
    ],
)
async def test_a_tier_above_the_keys_is_served_as_the_keys_and_the_answer_says_so(
    limited: Limited, tier: str, asked: str | None, given: str
) -> None:
    async with limited(f'tier = "{tier}"') as running:
        status, _, body = await ask(running, service_tier=asked)
        assert (status, body["service_tier"]) == (200, given)
        assert running.worker.submits[-1].tier.label == given
        _, _, events = await ask(running, service_tier=asked, stream=True)
        assert f'"service_tier":"{given}"' in events


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_the_keys_tier_is_the_most_that_anybody_gets_whatever_way_it_comes_in(
    limited: Limited, endpoint: str
) -> None:
    """Over HTTP and a WebSocket; the other tenant, for which the file names no tier, gets the default at most."""
    path, prompt = (COMPLETIONS, "Hello") if endpoint == "completions" else (CHAT, None)
    body: dict[str, Any] = {"max_tokens": 4, "service_tier": "priority"} | ({"prompt": prompt} if prompt else {})
    async with limited('tier = "flex"') as running:
        for key, given in (("a", Tier.FLEX), ("b", Tier.DEFAULT)):
            async with running.ask(path, headers={"Authorization": f"Bearer {key}"}, **body) as response:
                assert (response.status, (await response.json())["service_tier"]) == (200, given.label)
            async with talk(running, key) as client:
                assert "error" not in {each["type"] for each in await client.answer(key, endpoint=endpoint, body=body)}
            assert [submit.tier for submit in running.worker.submits] == [given] * 2
            running.worker.submits.clear()


async def test_best_effort_waits_apart_and_more_urgent_requests_take_the_place_of_others(limited: Limited) -> None:
    """Two may wait, and three of best effort. When there is room, they go by tier and arrival."""
    async with limited('tier = "priority"', max_queued=2, max_queued_flex=3) as running:
        running.worker.refuse = RefusalReason.FULL
        sessions = running.front.sessions
        tasks = []
        for number, tier in enumerate(("flex", "flex", "default", "flex", "default"), start=1):
            tasks.append(asyncio.create_task(ask(running, service_tier=tier, seed=number)))
            await until(lambda number=number: sessions.num_queued == number)
        status, headers, body = await ask(running, service_tier="flex")
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "resource_unavailable", "10")
        assert body["error"]["type"] == "rate_limit_error"
        tasks.append(asyncio.create_task(ask(running, service_tier="priority", seed=6)))
        status, headers, body = await tasks.pop(4)
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "2")
        assert sessions.num_queued == 5
        running.worker.refuse = None
        running.worker.submits.clear()
        await running.view(make_status())
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 5
        assert [submit.sampling.seed for submit in running.worker.submits] == [6, 3, 1, 2, 4]
        assert await samples(running, "sluice:shed_total") == {
            ("resource_unavailable", "flex"): 1,
            ("queue_full", "default"): 1,
        }


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
async def test_best_effort_leaves_a_quarter_of_the_connections_to_others(limited: Limited, limit: str) -> None:
    """Of eight: the seventh that wants to wait is refused and its connection closed; others have that and the last."""
    async with limited('tier = "priority"', **{limit: 8}) as running:
        running.worker.refuse = RefusalReason.FULL
        sessions, doorway = running.front.sessions, running.front.doorway
        waiting = []
        for number in range(1, 7):
            waiting.append(asyncio.create_task(ask(running, service_tier="flex", seed=number)))
            await until(lambda number=number: sessions.num_queued == number)
        for _ in range(3):
            status, headers, body = await ask(running, service_tier="flex")
            assert (status, body["error"]["code"], headers["connection"]) == (429, "resource_unavailable", "close")
            await until(lambda: doorway.num_open == 6)
        for number, tier in ((7, None), (8, "priority")):
            waiting.append(asyncio.create_task(ask(running, service_tier=tier, seed=number)))
            await until(lambda number=number: sessions.num_queued == number)
        running.worker.refuse = None
        await running.view(make_status())
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 8
        assert await samples(running, "sluice:shed_total") == {("resource_unavailable", "flex"): 3}
        assert sum((await samples(running, "sluice:requests_total")).values()) == 8 + 3


async def test_one_request_may_not_take_the_whole_dispatcher(serve: Serve) -> None:
    async with serve(lambda _: [65], max_choices=6) as running:
        status, body = await running.post(COMPLETIONS, prompt=["a"] * 3, n=2)
        assert (status, len(body["choices"])) == (200, 6)
        status, body = await running.post(COMPLETIONS, prompt=["a"] * 4, n=2)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "array_above_max_length", "prompt")
        assert "at most 6 choices in one request" in body["error"]["message"]
        status, body = await running.post(n=7)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "integer_above_max_value", "n")


async def test_while_the_broker_is_away_requests_wait_and_are_served_when_it_is_back(serve: Serve) -> None:
    async with serve(lambda _: [65], max_queued=2) as running:
        sessions = running.front.sessions
        running.broker.available = False
        waiting = [asyncio.create_task(running.post()) for _ in range(2)]
        await until(lambda: sessions.num_queued == 2)
        status, body = await running.post()
        assert (status, body["error"]["code"]) == (503, "no_capacity")
        running.broker.available = True
        await running.view(make_status())
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_broker_that_stays_away_is_a_503_after_the_queues_limit(serve: Serve) -> None:
    async with serve(lambda _: [65], queue_limit_s=0.2) as running:
        running.broker.available = False
        async with running.ask() as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (503, "no_capacity", "server_error")
            assert response.headers["Retry-After"] == "5"
            assert response.headers["x-should-retry"] == "true"
        running.broker.available = True


async def test_a_request_that_failed_for_good_is_not_to_be_tried_again(running: Running) -> None:
    task = asyncio.create_task(running.ask())
    (item,) = await running.begun()
    await running.worker.emit(item, [], FinishReason.ERROR)
    async with await task as response:
        assert (response.status, (await response.json())["error"]["code"]) == (500, "request_failed")
        assert response.headers["x-should-retry"] == "false"
        assert "Retry-After" not in response.headers


async def test_a_stream_that_nobody_reads_is_noticed_within_a_megabyte(serve: Serve) -> None:
    """The kernel would take 2.8 MB of it, so that most answers would never be seen to be unread."""
    async with serve(write_limit_s=1.0) as running:
        _, stuck = await connect_narrow(running.url, chat_bytes(stream=True, ignore_eos=True))
        (item,) = await running.begun()
        words = running.encode("The quick brown fox jumps over the lazy dog. ")
        streams = running.front.streams
        await until(lambda: len(streams) == 1)
        (stream,) = streams._open
        while not stream.num_unsent_bytes and stream.num_written < 1_000_000:
            await running.worker.emit(item, words)
            await asyncio.sleep(0)
        assert stream.num_written < 1_000_000
        await running.worker.wait_cancelled(limit_s=20.0)
        assert streams.num_cut == 1
        stuck.transport.abort()


async def test_a_reader_of_a_whole_answer_that_does_not_read_is_cut_too(serve: Serve) -> None:
    async with serve(write_limit_s=1.0) as running:
        _, stuck = await connect_narrow(running.url, chat_bytes(stream=False, ignore_eos=True))
        (item,) = await running.begun()
        words = running.encode("The quick brown fox jumps over the lazy dog. ") * 10_000
        for _ in range(10):  # 4.5 MB, of which the kernel takes 2.8 MB
            await running.worker.emit(item, words)
        await running.worker.emit(item, [65], FinishReason.STOP)
        streams = running.front.streams
        await until(
            lambda: len(streams) == 1 or streams.num_cut, limit_s=60.0
        )  # a busy machine takes long to make the text
        await until(lambda: streams.num_cut == 1, limit_s=60.0)
        assert len(streams) == 0
        stuck.transport.abort()


async def test_the_access_line_says_whose_request_it_was_and_how_it_went(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def info(self, event: str, **fields: Any) -> None:
            lines.append({"event": event, **fields})

    monkeypatch.setattr("services.dispatcher.http.records._log", Log())
    async with limited("requests_per_min = 1") as running:
        await ask(running, stream=True, service_tier="scale")
        await ask(running)
        await ask(running, "b", stop="A")
    first, second, third = lines
    assert (first["event"], first["tenant"], first["tier"], first["finish"]) == ("request", "a", "default", "stop")
    assert (first["attempts"], first["num_prompt_tokens"], first["num_output_tokens"]) == (1, NUM_PROMPT, 2)
    assert first["is_late"] is False
    for name in ("queue_s", "prefill_s", "ttft_s", "decode_s", "tpot_s", "e2e_s", "qoe"):
        assert first[name] >= 0
    assert (second["finish"], second["attempts"]) == ("rate_limit_exceeded", 0)
    assert "ttft_s" not in second
    assert (third["finish"], third["worker"], third["attempts"], third["num_recoveries"]) == ("stop", "w0", 1, 0)
