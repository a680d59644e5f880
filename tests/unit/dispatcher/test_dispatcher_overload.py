"""A burst of five times what the worker can do, on the virtual clock: who is served, who is refused, what is done."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from services.dispatcher.session.request import FailureCode, RequestFailedError
from shared.api_keys import Tier
from shared.messages.request import RefusalReason, Submit
from shared.types import FinishReason
from tests.support.fake_worker import FakeWorker
from tests.support.session_cluster import Cluster, with_cluster

PLACES = 4
ANSWER_S = 0.2
"""Of 20 tokens, 10 ms each: so four places make 20 answers a second."""
BURST_S = 4.0
RATE_PER_S = 100
SHARES = {Tier.PRIORITY: 0.1, Tier.DEFAULT: 0.3, Tier.FLEX: 0.6}


def limit_places(worker: FakeWorker) -> None:
    """Have the worker refuse what exceeds its places."""

    def judge(_submit: Submit) -> RefusalReason | None:
        busy = sum(1 for item in worker.running.values() if item.finish is FinishReason.NONE)
        return RefusalReason.FULL if busy >= PLACES else None

    worker.judge = judge


async def burst(made: Cluster, rng: random.Random) -> tuple[Counter[Tier], Counter[Tier], list[float]]:
    """Send the burst; return the served and the refused by tier, and when answers ended."""
    served: Counter[Tier] = Counter()
    refused: Counter[Tier] = Counter()
    ends_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def ask(name: str, tier: Tier) -> None:
        try:
            await made.serve(name, tier=tier)
        except RequestFailedError as error:
            flex = FailureCode.RESOURCE_UNAVAILABLE
            refused[tier] += error.code is (flex if tier is Tier.FLEX else FailureCode.QUEUE_FULL)
        else:
            served[tier] += 1
            ends_s.append(loop.time())

    async with asyncio.TaskGroup() as group:
        for index in range(int(BURST_S * RATE_PER_S)):
            (tier,) = rng.choices(list(SHARES), list(SHARES.values()))
            group.create_task(ask(f"r{index}", tier))
            await asyncio.sleep(rng.expovariate(RATE_PER_S))
    return served, refused, ends_s


@pytest.mark.parametrize("seed", [1, 2, 3])
@with_cluster(max_queued=32, max_queued_flex=32, queue_limit_s=2.0)
async def test_under_a_burst_urgent_requests_are_served_flexible_ones_refused_and_the_worker_stays_busy(
    made: Cluster, seed: int
) -> None:
    """Urgent requests are half of what the worker can do: none is refused. It answers at 95 % of its rate or more.

    Of best effort there is more than the others leave room for: what waits for it is served after the burst.
    """
    limit_places(await made.add())
    served, refused, ends_s = await burst(made, random.Random(seed))
    assert served.total() + refused.total() == BURST_S * RATE_PER_S
    assert refused[Tier.PRIORITY] == 0
    rates = [refused[tier] / (served[tier] + refused[tier]) for tier in (Tier.DEFAULT, Tier.FLEX)]
    assert rates[0] < rates[1]
    assert rates[1] > 0.8
    under_load = [end_s for end_s in ends_s if ends_s[0] <= end_s <= ends_s[0] + BURST_S - 0.5]
    assert len(under_load) >= 0.95 * PLACES / ANSWER_S * (BURST_S - 0.5)


@with_cluster(max_queued=32, queue_limit_s=30.0)
async def test_urgent_requests_wait_in_front_of_those_that_came_before(made: Cluster) -> None:
    limit_places(await made.add())
    order: list[str] = []

    async def ask(name: str, tier: Tier) -> None:
        await made.serve(name, tier=tier)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in ("a0", "a1", "a2", "a3", "flex", "default", "priority"):
            tier = Tier[name.upper()] if name[0] != "a" else Tier.DEFAULT
            group.create_task(ask(name, tier))
            await asyncio.sleep(0.001)
    assert order == ["a0", "a1", "a2", "a3", "priority", "default", "flex"]


@with_cluster(max_queued=8, queue_limit_s=30.0)
async def test_a_tenant_that_fills_its_part_of_the_queue_leaves_room_for_others(made: Cluster) -> None:
    limit_places(await made.add())
    greedy = [asyncio.create_task(made.serve(f"g{index}", tenant="greedy", max_tenant_queued=2)) for index in range(20)]
    await asyncio.sleep(0.05)
    assert made.sessions.num_queued == 2
    await made.serve("modest", tenant="modest", max_tenant_queued=2)
    outcomes = await asyncio.gather(*greedy, return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, RequestFailedError)]
    assert [refusal.code for refusal in refusals] == [FailureCode.QUEUE_FULL] * (20 - PLACES - 2)


@with_cluster(max_queued=2, queue_limit_s=30.0)
async def test_what_replaces_a_request_is_not_refused_for_a_full_queue_and_goes_first(made: Cluster) -> None:
    limit_places(await made.add())
    order: list[str] = []

    async def ask(name: str, *, replaces: bool = False) -> None:
        await made.serve(name, replaces=replaces)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in ("a0", "a1", "a2", "a3", "w0"):
            group.create_task(ask(name))
            await asyncio.sleep(0.001)
        last = group.create_task(made.refusal("w1"))
        await asyncio.sleep(0.001)
        assert await made.refusal("late") is FailureCode.QUEUE_FULL
        group.create_task(ask("heir", replaces=True))
    assert last.result() is FailureCode.QUEUE_FULL, "its place was taken"
    assert order.index("heir") < order.index("w0")
