"""Plans that must not be, over a real broker: each refusal is an event that says why, in words.

Planner and monitor are the real ones. Where the planner refuses, the workers are reports; where workers do, they are
real agents over modelled devices.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from services.planner.service import Planner
from shared.cost import load_profile
from shared.ids import Incarnation
from shared.messages.event import Event
from shared.messages.plan import AbortPlan, CommitPlan, PlanState
from shared.messages.report import ClusterView, ElasticFacts, WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Message
from shared.transport.nats_bus import NatsBus
from shared.wire import decode_json, encode_json
from sim.worker import SimWorker, SimWorkerParams
from tests.support.drop_builders import make_elastic
from tests.support.hand_planner import HandPlanner
from tests.support.statuses import make_report
from tests.support.waiting import until

LIMIT_S = 15.0
SYSTEM = "kunserve"


@dataclass
class Room:
    """A cluster on the broker, and what was told there."""

    bus: NatsBus
    subjects: Subjects
    events: list[Event] = field(default_factory=list)
    num_viewed: int = 0
    """Workers in the newest view."""

    def on_view(self, message: Message) -> None:
        self.num_viewed = len(decode_json(message.data, ClusterView).workers)

    def on_event(self, message: Message) -> None:
        self.events.append(decode_json(message.data, Event))

    async def told(self, service: str, *words: str, name: str = "plan_refused") -> Event:
        """Return the first refusal, or other event, of a service that says these words."""

        def found() -> list[Event]:
            events = [each for each in self.events if (each.name, each.service) == (name, service)]
            return [each for each in events if all(word in each.reason for word in words)]

        try:
            await until(found, LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"nobody told {words}: {self.events}") from None
        return found()[0]

    async def ask(self, verb: str, question: object) -> dict[str, Any]:
        subject = self.subjects.admin("planner", "planner", verb)
        data = await self.bus.request(subject, json.dumps(question).encode(), timeout_s=LIMIT_S)
        answer: dict[str, Any] = json.loads(data)
        return answer


@asynccontextmanager
async def room(nats_url: str, cluster: str) -> AsyncIterator[Room]:
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        here = Room(bus, Subjects(cluster))
        await bus.subscribe(f"sluice.{cluster}.event.>", here.on_event)
        await bus.subscribe(here.subjects.view(), here.on_view)
        await bus.flush()
        yield here
    finally:
        await bus.close()


@asynccontextmanager
async def planning(
    nats_url: str, cluster: str, reports: Sequence[WorkerReport], **settings: object
) -> AsyncIterator[Room]:
    """A monitor and a planner that are told of these workers, again and again.

    The planner begins when all are in view: it tells once what it finds, and would judge by those that are there.
    """
    buses = [await NatsBus.connect(nats_url, name=name) for name in ("monitor", "planner")]
    monitor = Monitor(MonitorSettings(instance_id="monitor", cluster=cluster), buses[0], _fail)
    fields = {"instance_id": "planner", "cluster": cluster, "system": SYSTEM, "tick_period_s": 0.1, **settings}
    planner = Planner(PlannerSettings.model_validate(fields), buses[1], on_failure=_fail)
    await monitor.start()
    async with room(nats_url, cluster) as here:
        telling = asyncio.create_task(_tell(here, reports))
        try:
            await until(lambda: here.num_viewed >= len(reports), LIMIT_S)
            await planner.start()
            await until(
                lambda: planner.fresh_view is not None and len(planner.fresh_view.workers) >= len(reports), LIMIT_S
            )
            yield here
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await planner.stop()
            await monitor.stop()
            for bus in buses:
                await bus.close()


def _fail(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


async def _tell(here: Room, reports: Sequence[WorkerReport]) -> None:
    number = 0
    while True:
        for report in reports:
            told = report.model_copy(update={"sequence_number": number})
            await here.bus.publish(here.subjects.report(report.worker_id), encode_json(told))
        number += 1
        await asyncio.sleep(0.1)


def report(index: int, elastic: ElasticFacts, *, is_short: bool = False, **changes: object) -> WorkerReport:
    """A whole instance, which is full and has requests that wait for memory if it is short."""
    return make_report(
        f"w{index}",
        incarnation=Incarnation(index + 1),
        host=f"host-{index}",
        model="m",
        block_size=16,
        num_layers=8,
        layers=(0, 8),
        elastic=elastic,
        num_blocks=10,
        num_used_blocks=10 if is_short else 1,
        num_demanded_blocks=2 if is_short else 0,
        num_head_blocks=1 if is_short else 0,
        num_queued_for_memory=3 if is_short else 0,
        num_running=5,
        token_s=0.0001,
    ).model_copy(update=changes)


NO_GAIN = make_elastic(max_blocks=12)
"""There are addresses for 12 blocks, so that two have less together than each alone."""
NO_COPY = make_elastic(has_host_copy=False)


@pytest.mark.parametrize(
    ("name", "elastic", "words"),
    [
        ("gains", NO_GAIN, "nothing would be gained: the stage with most layers has less room than before"),
        ("copies", NO_COPY, "a layer would be left without a second copy"),
    ],
)
@pytest.mark.parametrize("is_asked", [True, False])
async def test_a_drop_that_must_not_be_is_refused_with_an_event(
    name: str, elastic: ElasticFacts, words: str, is_asked: bool, nats_url: str
) -> None:
    """By hand, and by the planner itself when a worker runs short."""
    reports = [report(index, elastic, is_short=not is_asked) for index in range(2)]
    async with planning(nats_url, f"{name}-{int(is_asked)}", reports) as here:
        if is_asked:
            answer = await here.ask("drop", {"workers": ["w0", "w1"]})
            assert not answer["done"]
            assert answer["reason"] == words
            await here.told("planner", "drop w0+w1, asked by hand", words)
        else:
            await here.told("planner", "pressure", "tokens is required", words)
        assert not [event for event in here.events if event.name == "plan_preparing"]


async def test_a_drop_that_costs_more_than_it_saves_is_refused_with_an_event(nats_url: str) -> None:
    reports = [report(index, make_elastic(), is_short=True) for index in range(2)]
    async with planning(nats_url, "price", reports, drop_wait_s=0.0001) as here:
        event = await here.told("planner", "the room would save 0.00 s")
        assert "readers wait" in event.reason


async def test_a_restore_for_which_there_is_no_room_is_refused_with_an_event(nats_url: str) -> None:
    """20 of 24 blocks are in use, and two whole instances have room for 16."""
    half: dict[str, Any] = {"group": "w0", "num_stages": 2}
    sizes = make_elastic(num_pages=192)  # 8 blocks for a whole instance
    reports = [
        report(0, sizes, layers=(0, 4), stage=0, num_blocks=20, num_used_blocks=20, **half),
        report(1, sizes, layers=(4, 8), stage=1, num_used_blocks=0, num_running=0, **half),
    ]
    async with planning(nats_url, "restore", reports, restore_ratio=0) as here:
        answer = await here.ask("restore", {})
        assert not answer["done"]
        await here.told("planner", "restore, asked by hand", "w0: its requests hold 320 tokens", "room for 256")
        await here.ask("restore", {"groups": ["w7"]})
        await here.told("planner", "restore w7, asked by hand: there is no group 'w7'")


# Workers refuse


async def test_a_word_of_an_epoch_that_is_over_is_refused_by_the_worker_with_an_event(nats_url: str) -> None:
    """A real agent, and a planner by hand. What else a worker refuses: `test_plan_agent`, `test_group_role`."""
    bus = await NatsBus.connect(nats_url, name="w0")
    cost = load_profile("llama-3-8b-tp1-a100").cost
    worker = SimWorker(
        SimWorkerParams("w0", cost, 0, system=SYSTEM, max_model_len=64, elastic=make_elastic(num_pages=500)), bus
    )
    async with room(nats_url, "default") as here:
        driver = HandPlanner(here.bus)
        await driver.start()
        await worker.start()
        try:
            await until(lambda: "w0" in driver.reports and driver.reports["w0"].phase is WorkerPhase.READY, LIMIT_S)
            await driver.answer("w0", AbortPlan(epoch=9, plan_id=7))
            newer = await driver.answer("w0", CommitPlan(epoch=11, plan_id=8))
            stale = await driver.answer("w0", CommitPlan(epoch=4, plan_id=4))
            assert newer.state is stale.state is PlanState.REFUSED, "nothing is prepared, and that is over"
            assert stale.newest_epoch == 9, "what is refused leaves no epoch behind"
            for answer in (newer, stale):
                event = await here.told("worker", f"plan {answer.plan_id}: {answer.reason}")
                assert event.instance_id == "w0"
            assert stale.reason == "epoch 4 is over: a planner of epoch 9 has spoken"
            assert newer.reason.startswith("plan 8 is not prepared here")
        finally:
            await worker.stop()
            await bus.close()
