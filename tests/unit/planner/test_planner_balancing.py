"""What a planner does about requests that should change their worker: all choices together, and who fails rests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter

from services.planner.balancing import CLOSE_S, Balancer, BalancerParams
from services.planner.config import PlannerSettings
from services.planner.policy.load_balance import balance
from services.planner.policy.moves import Avoided, MoveRule, Wanted, WantedMove
from services.planner.policy.packing.adaptive import ALL_KINDS, TICK_S, MoveBudget, MoveKind
from services.planner.policy.patience import PatienceParams
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import (
    Close,
    Closed,
    Fetch,
    Fetched,
    FetchOutcome,
    FetchReason,
    ListRunning,
    RunningList,
    RunningPart,
)
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus
from shared.messages.report_parts import DecodeCost, MigrationPart
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.systems import Migrates
from shared.transport.bus import Endpoint, Message, ServiceInfo
from shared.transport.memory_bus import MemoryBroker
from shared.wire import decode_union, encode
from tests.support.statuses import make_report, make_status, make_view

pytestmark = pytest.mark.virtual_time
ASKED: TypeAdapter[Fetch | ListRunning | Close] = TypeAdapter(
    Annotated[Fetch | ListRunning | Close, Field(discriminator="kind")]
)
EVENLY, OTHER = balance(Migrates.TO_BALANCE), WorkerId("empty")
PAUSE_S = 0.5
PATIENCE = PatienceParams(retry_s=2.0, max_retry_s=16.0)


class Cluster:
    """Two workers of which one is full, and what is asked of them."""

    def __init__(self, broker: MemoryBroker, requests: Sequence[RunningPart]) -> None:
        self.asked: list[tuple[float, RequestId, int]] = []
        """When each was to be fetched, and its attempt."""
        self.as_tokens: list[bool] = []
        """Which of these come without KV."""
        self.facts: dict[str, Any] = {}
        """What both report besides."""
        self.told: list[tuple[str, str]] = []
        """Events."""
        self.outcome = FetchOutcome.MOVED
        self.is_full = True
        self.num_listed = {"full": 0, "empty": 0}
        """How often each was asked who runs there."""
        self.closed: list[Close] = []
        self.limits: set[int] = set()
        self.opens_after = 10**9
        """So often it says that it is closing."""
        self.fetch_s = 0.0
        """For which each fetch lasts."""
        self.holds = False
        """Whether fetches last until `is_held` is set."""
        self.is_held = asyncio.Event()
        self._bus = broker.connect("workers")
        self._requests = requests

    async def start(self) -> None:
        names = ("full", "empty")
        endpoints = [
            Endpoint(f"fetch-{name}", Subjects().fetch(WorkerId(name)), partial(self._answer, name)) for name in names
        ]
        await self._bus.serve(ServiceInfo("workers", "0.1.0", "two workers", {}, "both"), endpoints)

    async def hear(self, name: str, reason: str) -> None:
        self.told.append((name, reason))

    def view(self) -> ClusterView:
        used = {"full": 90 if self.is_full else 50, "empty": 10 if self.is_full else 50}
        common: dict[str, Any] = {"num_blocks": 100, "model_digest": "m", "stage_address": "a", **self.facts}
        return make_view(*(make_status(name, num_used_blocks=blocks, **common) for name, blocks in used.items()))

    async def _answer(self, name: str, message: Message) -> bytes:
        asked = decode_union(message.data, ASKED)
        if isinstance(asked, Close):
            self.closed.append(asked)
            return encode(Closed(is_closing=bool(asked.for_s) and len(self.closed) <= self.opens_after))
        if isinstance(asked, ListRunning):
            assert asked.most_blocks == 40
            self.limits.add(asked.limit)
            self.num_listed[name] += 1
            return encode(RunningList(requests=tuple(self._requests) if name == "full" else ()))
        assert (name, asked.source, asked.source_address) == ("empty", "full", "a")
        self.asked.append((asyncio.get_running_loop().time(), asked.request_id, asked.attempt))
        self.as_tokens.append(asked.as_tokens)
        await asyncio.sleep(self.fetch_s)
        if self.holds:
            await self.is_held.wait()
        return encode(Fetched(outcome=self.outcome))


def request(*names: str, num_blocks: int = 5) -> RunningPart:
    choices = tuple((RequestId(name), number) for number, name in enumerate(names, start=1))
    return RunningPart(choices=choices, num_tokens=80, num_blocks=num_blocks, num_held_blocks=num_blocks)


@asynccontextmanager
async def balanced(
    *requests: RunningPart, rule: MoveRule = EVENLY, kinds: frozenset[MoveKind] = ALL_KINDS
) -> AsyncIterator[tuple[Cluster, Balancer]]:
    broker, tasks = MemoryBroker(), TaskOwner(lambda name, error: pytest.fail(f"{name}: {error!r}"))
    cluster = Cluster(broker, requests)
    await cluster.start()
    bus = broker.connect("planner")
    balancer = Balancer(
        bus,
        Subjects(),
        rule,
        BalancerParams(PAUSE_S, 0.2, kinds, PATIENCE),
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


@dataclass
class Emptied:
    """All that a worker has is to leave."""

    source: WorkerReport
    target: WorkerReport
    num_requests: int = 3
    is_urgent: bool = False
    open_worker: WorkerId | None = OTHER
    reason: FetchReason = FetchReason.PACK
    most_blocks: int = 40
    most_requests: int = 7
    targets: Sequence[WorkerReport] = ()

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId]) -> Sequence[WantedMove]:
        assert self.source.worker_id in busy
        return [WantedMove(part, self.target, self.is_urgent) for part in running[: self.num_requests]]

    def tell(self, move: WantedMove) -> str:
        return f"{move.part.choices[0][0]} goes"


class Once:
    """A rule: what `wants` names of a view's two workers, each once."""

    def __init__(self, *wants: Callable[[WorkerReport, WorkerReport], Wanted]) -> None:
        self.wants = list(wants)

    def __call__(self, view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        full, empty = (status.report for status in view.workers)
        return [self.wants.pop(0)(full, empty)] if self.wants else []


async def test_a_worker_that_is_emptied_is_closing_until_all_have_left() -> None:
    async with balanced(*(request(f"r{number}") for number in range(3)), rule=Once(Emptied)) as (cluster, _):
        await asyncio.sleep(0.4)
        assert [key for _, *key in cluster.asked] == [["r0", 1], ["r1", 1], ["r2", 1]]
        told = [(close.begins, close.for_s, close.open_worker, close.why) for close in cluster.closed]
        assert [name for name, _ in cluster.told] == ["worker_closing", *["request_moved"] * 3]
        assert told == [
            *((number == 0, CLOSE_S, "empty", f"r{number} goes") for number in range(3)),
            (False, 0.0, "empty", ""),
        ]


async def test_who_is_opened_meanwhile_keeps_the_rest() -> None:
    async with balanced(*(request(f"r{number}") for number in range(3)), rule=Once(Emptied)) as (cluster, _):
        cluster.opens_after = 2
        await asyncio.sleep(0.4)
        assert [key for _, *key in cluster.asked] == [["r0", 1], ["r1", 1]]
        assert [close.for_s for close in cluster.closed] == [CLOSE_S] * 3
        assert cluster.limits == {7}


async def test_if_one_cannot_go_the_worker_is_opened_and_where_nobody_can_it_is_not_closed() -> None:
    nobody = partial(Emptied, num_requests=0)
    async with balanced(request("r"), request("s"), rule=Once(nobody, Emptied)) as (cluster, _):
        cluster.outcome = FetchOutcome.FULL
        await asyncio.sleep(0.4)
        assert not cluster.closed
        await asyncio.sleep(PAUSE_S)
        assert [key for _, *key in cluster.asked] == [["r", 1]]
        assert [close.for_s for close in cluster.closed] == [CLOSE_S, 0.0]


@pytest.mark.parametrize("is_urgent", [True, False])
async def test_who_takes_gives_only_what_is_urgent_and_takes_nothing_more(is_urgent: bool) -> None:
    """The second one would go from the worker to which the first one goes."""

    def back(full: WorkerReport, empty: WorkerReport) -> Wanted:
        return Emptied(empty, make_report("third"), is_urgent=is_urgent, open_worker=None)

    async with balanced(request("r"), rule=Once(Emptied, Emptied, back)) as (cluster, balancer):
        cluster.holds = True
        await asyncio.sleep(5.0)
        assert len(cluster.asked) == 1
        assert cluster.num_listed == {"full": 1, "empty": int(is_urgent)}
        cluster.is_held.set()
        await asyncio.sleep(5.0)
        assert balancer.outcomes == {FetchOutcome.MOVED: 1}


@pytest.mark.parametrize("is_urgent", [True, False])
@pytest.mark.parametrize("kinds", [ALL_KINDS, frozenset({MoveKind.KV}), frozenset({MoveKind.TOKENS})])
async def test_moves_take_their_share_of_links_then_of_computing_and_wait_unless_they_are_urgent(
    is_urgent: bool, kinds: frozenset[MoveKind]
) -> None:
    """In each tick links carry two requests of 80 tokens, and a worker computes one beside its decodes."""

    def always(view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        full, empty = (status.report for status in view.workers)
        return [Emptied(full, empty, num_requests=1, is_urgent=is_urgent, open_worker=None)]

    async with balanced(request("r"), rule=always, kinds=kinds) as (cluster, _):
        cluster.facts = {
            "block_size": 16,
            "kv_bytes": 16_000,
            "token_s": 0.005,
            "decode_cost": DecodeCost(step_s=0.1),
            "migration": MigrationPart(bytes_per_s=850.0),
        }
        num_ticks = 30
        await asyncio.sleep(num_ticks * TICK_S)
        num_asked = len(cluster.asked) / num_ticks
        as_kv, as_tokens = (cluster.as_tokens.count(kind) / num_ticks for kind in (False, True))
        if is_urgent:
            assert num_asked > 8
            assert as_kv or MoveKind.KV not in kinds
            assert as_tokens or MoveKind.TOKENS not in kinds
        else:
            assert as_kv == pytest.approx(2.0 * (MoveKind.KV in kinds), abs=0.1)
            assert as_tokens == pytest.approx(1.0 * (MoveKind.TOKENS in kinds), abs=0.1)
        told = [reason for name, reason in cluster.told if name == "request_moved"]
        assert sum(" as tokens: " in reason for reason in told) == sum(cluster.as_tokens)
        assert cluster.num_listed["full"] > 8 * num_ticks, "a rule that keeps books hears who is there all the same"


async def test_as_long_as_nobody_knows_how_fast_links_are_all_go_with_their_kv() -> None:
    async with balanced(request("r")) as (cluster, _):
        await asyncio.sleep(5.0)
        assert len(cluster.asked) > 3
        assert not any(cluster.as_tokens)


def test_the_first_rate_that_is_heard_of_begins_a_tick() -> None:
    """What is known of links does not wait until a tick is over in which all went as KV."""
    facts: dict[str, Any] = {"num_blocks": 100, "block_size": 16, "kv_bytes": 16_000, "model_digest": "m"}
    before = [make_status(name, **facts) for name in ("full", "empty")]
    after = [make_status(name, **facts, migration=MigrationPart(bytes_per_s=850.0)) for name in ("full", "empty")]
    budget = MoveBudget(0.2, frozenset({MoveKind.KV}))

    def num_kv(statuses: list[WorkerStatus], now_s: float) -> int:
        budget.refill(make_view(*statuses), now_s)
        moves = [WantedMove(request(f"r{number}"), statuses[1].report) for number in range(50)]
        return [kind for _, kind in budget.divide(WorkerId("full"), moves)].count(MoveKind.KV)

    assert num_kv(before, 0.0) == num_kv(before, 1.0) == 50
    assert num_kv(after, 2.0) == 2
    assert num_kv(after, 3.0) == 0
    assert num_kv(after, 2.0 + TICK_S) == 2


def test_who_comes_in_the_middle_of_a_tick_takes_part_at_once_and_nobody_gets_more_for_that() -> None:
    facts: dict[str, Any] = {
        "num_blocks": 100,
        "block_size": 16,
        "kv_bytes": 16_000,
        "model_digest": "m",
        "migration": MigrationPart(bytes_per_s=850.0),
    }
    old, new, newer = (make_status(name, **facts) for name in ("old", "new", "newer"))
    budget = MoveBudget(0.2, frozenset({MoveKind.KV}))

    def kinds(source: str, target: WorkerStatus, count: int) -> list[MoveKind]:
        moves = [WantedMove(request(f"r{number}"), target.report) for number in range(count)]
        return [kind for _, kind in budget.divide(WorkerId(source), moves)]

    budget.refill(make_view(old), 0.0)
    assert kinds("old", new, 1) == [MoveKind.LATER]
    budget.refill(make_view(old, new), 1.0)
    assert kinds("old", new, 3) == [MoveKind.KV, MoveKind.KV, MoveKind.LATER]
    budget.refill(make_view(old, new, newer), 2.0)
    assert kinds("old", newer, 1) == kinds("new", newer, 1) == [MoveKind.LATER]
    budget.refill(make_view(old, new, newer), TICK_S)
    assert kinds("old", newer, 1) == [MoveKind.KV]


@pytest.mark.parametrize(
    ("system", "given", "kinds"),
    [
        ("pack", {}, ALL_KINDS),
        ("mell-printed", {}, ALL_KINDS),
        ("load-balance", {}, {MoveKind.KV}),
        ("migrate", {"moves_as": "adaptive"}, ALL_KINDS),
        ("pack", {"moves_as": "tokens"}, {MoveKind.TOKENS}),
    ],
)
def test_packing_moves_by_both_ways_and_balancing_with_kv_unless_it_is_said(
    system: str, given: dict[str, Any], kinds: Set[MoveKind]
) -> None:
    assert PlannerSettings(instance_id="planner", system=system, **given).balancer().kinds == kinds
