"""What a dispatcher tells of the service tiers: in its metrics, and of each request in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.api_keys import Tier
from shared.messages.report import TierCounts
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.dispatchers import Running, Serve
from tests.support.fake_worker import make_status
from tests.support.waiting import until

NEVER_S, ALWAYS_S = 1e-9, 3600.0

pytestmark = pytest.mark.asyncio(loop_scope="module")
Lines = list[dict[str, Any]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The access lines, as they come, and warnings."""
    found: Lines = []

    class Log:
        def info(self, event: str, **fields: Any) -> None:
            found.append({"event": event, **fields})

        warning = info  # no parameter of these tests is one that nobody knows

    for module in ("records", "front"):
        monkeypatch.setattr(f"services.dispatcher.http.{module}._log", Log())
    return found


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(lambda _: [65, 66, 67]) as running:
        yield running


async def by_labels(running: Running, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by some of its labels."""
    found = [sample for sample in await running.samples() if sample.name == name]
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in found}


@pytest.mark.parametrize(
    ("asked", "is_ttft_kept", "is_tpot_kept"),
    [
        ({}, None, None),
        ({"slo": {"ttft_s": ALWAYS_S}}, True, None),
        ({"slo": {"ttft_s": NEVER_S, "tpot_s": ALWAYS_S}}, False, True),
        ({"slo": {"tpot_s": NEVER_S}, "max_tokens": 1}, None, True),
        ({"slo": {"ttft_s": ALWAYS_S, "tpot_s": ALWAYS_S}, "n": 2}, True, True),
    ],
)
async def test_a_request_keeps_or_misses_the_limits_that_it_names(
    served: Running, lines: Lines, asked: dict[str, Any], is_ttft_kept: bool | None, is_tpot_kept: bool | None
) -> None:
    labels = ("tier", "limit")
    before = {name: await by_labels(served, f"sluice:deadline_{name}_total", *labels) for name in ("kept", "miss")}
    assert (await served.post(service_tier="flex", **asked))[0] == 200
    (line,) = lines
    found = line.get("is_ttft_kept"), line.get("is_tpot_kept")
    assert (*found, line["tier"], line["num_preemptions"]) == (is_ttft_kept, is_tpot_kept, "flex", 0)
    for name, value in (("kept", True), ("miss", False)):
        after = await by_labels(served, f"sluice:deadline_{name}_total", *labels)
        for limit, is_kept in (("ttft", is_ttft_kept), ("tpot", is_tpot_kept)):
            key = ("flex", limit)
            assert after.get(key, 0) - before[name].get(key, 0) == (is_kept is value)


async def test_an_answer_that_fails_keeps_nothing_and_a_reader_who_leaves_has_asked_nothing(
    serve: Serve, lines: Lines
) -> None:
    slo = {"ttft_s": ALWAYS_S, "tpot_s": ALWAYS_S}
    async with serve() as running:
        task = asyncio.create_task(running.post(slo=slo))
        (item,) = await running.begun()
        await running.worker.emit(item, [65, 66], FinishReason.NONE)
        await running.worker.emit(item, [], FinishReason.ERROR)
        assert (await task)[0] == 500
        task = asyncio.create_task(running.post(slo=slo))
        await running.begun(2)
        task.cancel()
        await until(lambda: len(lines) == 2)
    failed, left = lines
    assert (failed["is_ttft_kept"], failed["is_tpot_kept"]) == (False, False)
    assert left["finish"] == "cancelled"
    assert not {"is_ttft_kept", "is_tpot_kept"} & set(left)


async def test_best_effort_has_no_reader(served: Running, lines: Lines) -> None:
    """Neither its QoE nor a late begin says anything of people."""
    for tier in ("flex", "default"):
        events = await served.stream(service_tier=tier, qoe={"ttft_s": NEVER_S}, stream_options={"include_usage": True})
        assert (events[-1]["sluice"]["qoe"] is None) is (tier == "flex")
    flex, default = lines
    assert not {"qoe", "stall_s", "is_late"} & set(flex)
    assert default["is_late"] is True
    misses = await by_labels(served, "sluice:deadline_miss_total", "tier", "limit")
    assert ("flex", "reader") not in misses
    assert misses["default", "reader"] == 1


async def test_tokens_are_counted_by_tier(serve: Serve) -> None:
    async with serve(lambda _: [65, 66, 67]) as running:
        for tier, max_tokens in (("flex", 3), ("flex", 2), ("default", 1)):
            assert (await running.post(service_tier=tier, max_tokens=max_tokens))[0] == 200
        found = await by_labels(running, "sluice:tier_tokens_total", "tier", "kind")
        assert (found["flex", "generation"], found["default", "generation"]) == (5, 1)
        assert found["flex", "prompt"] == 2 * found["default", "prompt"] > 0


async def test_what_runs_and_waits_and_is_held_is_told_by_tier(serve: Serve) -> None:
    """Of w1, which tells no tiers, all is of the default one."""
    tiers = (
        TierCounts(tier="priority", num_running=1, num_waiting=0, num_used_blocks=5),
        TierCounts(tier="flex", num_running=2, num_waiting=3, num_used_blocks=40),
    )
    counts: dict[str, Any] = {"num_blocks": 100, "num_used_blocks": 45}
    mixed = make_status("w0", num_running=3, num_waiting=2, num_preempted=1, tiers=tiers, **counts)
    plain = make_status("w1", num_running=4, num_waiting=1, num_preempted=1, **counts)
    async with serve() as running:
        running.worker.refuse = RefusalReason.FULL
        task = asyncio.create_task(running.post(service_tier="flex"))
        await until(lambda: running.front.sessions.num_queued == 1)
        await running.view(mixed, plain)
        requests = await by_labels(running, "sluice:tier_requests", "tier", "state")
        assert requests == {
            (tier, state): number
            for tier, numbers in (("priority", (1, 0, 0)), ("default", (4, 2, 0)), ("flex", (2, 3, 1)))
            for state, number in zip(("running", "waiting", "queued"), numbers, strict=True)
        }
        blocks = await by_labels(running, "sluice:tier_kv_blocks", "tier")
        assert blocks == {("priority",): 5, ("default",): 45, ("flex",): 40}
        assert {tier for tier, _ in requests} == {tier.label for tier in Tier}
        task.cancel()
