"""What a planner does about requests that should change their worker: all choices together, and who fails rests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from services.planner.balancing import Balancer
from services.planner.policy.load_balance import balance
from services.planner.policy.patience import PatienceParams
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome, ListRunning, RunningList, RunningPart
from shared.messages.report import ClusterView
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.systems import Migrates
from shared.transport.bus import Endpoint, Message, ServiceInfo
from shared.transport.memory_bus import MemoryBroker
from shared.wire import decode, encode
from tests.support.statuses import make_status, make_view

pytestmark = pytest.mark.virtual_time
PAUSE_S = 0.5
PATIENCE = PatienceParams(retry_s=2.0, max_retry_s=16.0)


class Cluster:
    """Two workers of which one is full, and what is asked of them."""

    def __init__(self, broker: MemoryBroker, requests: Sequence[RunningPart]) -> None:
        self.asked: list[tuple[float, RequestId, int]] = []
        """When each was to be fetched, and its attempt."""
        self.told: list[tuple[str, str]] = []
        """Events."""
        self.outcome = FetchOutcome.MOVED
        self.is_full = True
        self._bus = broker.connect("workers")
        self._requests = requests

    async def start(self) -> None:
        handlers = {"full": self._list, "empty": self._fetch}
        subjects = {name: Subjects().fetch(WorkerId(name)) for name in handlers}
        endpoints = [Endpoint(f"fetch-{name}", subjects[name], answer) for name, answer in handlers.items()]
        await self._bus.serve(ServiceInfo("workers", "0.1.0", "two workers", {}, "both"), endpoints)

    async def hear(self, name: str, reason: str) -> None:
        self.told.append((name, reason))

    def view(self) -> ClusterView:
        used = {"full": 90 if self.is_full else 50, "empty": 10 if self.is_full else 50}
        common: dict[str, Any] = {"num_blocks": 100, "model_digest": "m", "stage_address": "a"}
        return make_view(*(make_status(name, num_used_blocks=blocks, **common) for name, blocks in used.items()))

    async def _list(self, message: Message) -> bytes:
        assert decode(message.data, ListRunning).most_blocks == 40
        return encode(RunningList(requests=tuple(self._requests)))

    async def _fetch(self, message: Message) -> bytes:
        fetch = decode(message.data, Fetch)
        assert (fetch.source, fetch.source_address) == ("full", "a")
        self.asked.append((asyncio.get_running_loop().time(), fetch.request_id, fetch.attempt))
        return encode(Fetched(outcome=self.outcome))


def request(*names: str, num_blocks: int = 5) -> RunningPart:
    choices = tuple((RequestId(name), number) for number, name in enumerate(names, start=1))
    return RunningPart(choices=choices, num_tokens=80, num_blocks=num_blocks)


@asynccontextmanager
async def balanced(*requests: RunningPart) -> AsyncIterator[tuple[Cluster, Balancer]]:
    broker, tasks = MemoryBroker(), TaskOwner(lambda name, error: pytest.fail(f"{name}: {error!r}"))
    cluster = Cluster(broker, requests)
    await cluster.start()
    bus = broker.connect("planner")
    balancer = Balancer(
        bus,
        Subjects(),
        balance(Migrates.TO_BALANCE),
        PATIENCE,
        pause_s=PAUSE_S,
        look=cluster.view,
        tasks=tasks,
        announce=cluster.hear,
    )
    tasks.start(balancer.run(), name="balancer")
    try:
        yield cluster, balancer
    finally:
        await tasks.close()


async def test_all_choices_of_a_request_go_to_one_worker_one_after_the_other() -> None:
    async with balanced(request("r", "r-1", "r-2")) as (cluster, balancer):
        await asyncio.sleep(0.4)
        assert [key for _, *key in cluster.asked] == [["r", 1], ["r-1", 2], ["r-2", 3]]
        assert balancer.outcomes == {FetchOutcome.MOVED: 3}
        usage = [
            f"{name} has {share} of its KV memory used or asked for"
            for name, share in (("full", "90%"), ("empty", "10%"))
        ]
        assert cluster.told[0] == ("request_moved", f"r goes from full to empty: {', '.join(usage)}")
        assert len(cluster.told) == 3


@pytest.mark.parametrize("outcome", [FetchOutcome.REFUSED, FetchOutcome.LOST, FetchOutcome.FULL])
async def test_if_one_cannot_come_the_others_stay_and_the_pair_rests_longer_and_longer(outcome: FetchOutcome) -> None:
    async with balanced(request("r", "r-1")) as (cluster, balancer):
        cluster.outcome = outcome
        await asyncio.sleep(50.0)
        assert {name for _, name, _ in cluster.asked} == {"r"}
        assert not cluster.told
        times = [at_s for at_s, _, _ in cluster.asked]
        pauses = [after - before for before, after in pairwise(times)]
        assert all(wanted <= pause < wanted + 2 * PAUSE_S for pause, wanted in zip(pauses, (2, 4, 8, 16), strict=False))
        assert len(pauses) >= 4
        cluster.outcome = FetchOutcome.MOVED
        await asyncio.sleep(20.0)
        assert balancer.outcomes[FetchOutcome.MOVED] > 4, "once it works it goes on as before"


async def test_one_that_has_ended_meanwhile_is_no_reason_to_rest() -> None:
    async with balanced(request("r")) as (cluster, _):
        cluster.outcome = FetchOutcome.GONE
        await asyncio.sleep(5.0)
        assert len(cluster.asked) > 3


async def test_nobody_is_asked_while_all_have_alike() -> None:
    async with balanced(request("r")) as (cluster, _):
        cluster.is_full = False
        await asyncio.sleep(5.0)
        assert not cluster.asked
