"""The planner on the virtual clock: epochs that nobody shares, one event per decision, silence once superseded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from services.planner.book import PlanBook, SupersededError
from services.planner.config import PlannerSettings
from services.planner.policy.levers.ladder import Lever
from services.planner.service import Planner
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.messages.base import MAX_EPOCH, MAX_EPOCH_STEP
from shared.messages.event import Event
from shared.messages.plan import Plan, PlannedWorker, PlanPhase, RestoreInstance, WantedInstances
from shared.messages.report import ClusterView, Liveness
from shared.subjects import Subjects
from shared.transport.bus import BusError, KeyValue, Message
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.wire import decode_json, encode_json
from tests.support.kinds import some
from tests.support.levers import FakeLever
from tests.support.staged import played_in
from tests.support.statuses import make_status, make_view

SUBJECTS = Subjects()


def view_of(used: int = 0, demanded: int = 0, *, liveness: Liveness = Liveness.ALIVE) -> ClusterView:
    return make_view(make_status(liveness=liveness, num_blocks=100, num_used_blocks=used, num_demanded_blocks=demanded))


class Room:
    """A broker, a bus to watch from, and planners that are started one by one."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.bus = broker.connect("test")
        self.events: list[tuple[str, str, str]] = []
        self._planners: list[tuple[Planner, MemoryBus]] = []

    async def start(self, name: str = "p", levers: tuple[Lever, ...] = ()) -> Planner:
        bus = self.broker.connect(f"bus-{name}-{len(self._planners)}")
        planner = Planner(PlannerSettings(instance_id=name), bus, levers=levers)
        self._planners.append((planner, bus))
        await planner.start()
        return planner

    async def plans(self) -> KeyValue:
        return await self.bus.key_value(SUBJECTS.plan_bucket())

    async def plan(self) -> Plan:
        entry = some(await (await self.plans()).get("plan"))
        assert entry.value is not None
        return decode_json(entry.value, Plan)

    async def show(self, view: ClusterView, for_s: float) -> None:
        """Be the monitor for a while."""
        views = await self.bus.key_value(SUBJECTS.view_bucket())
        for _ in range(round(for_s / 0.5)):
            await views.put("cluster", encode_json(view))
            await asyncio.sleep(0.5)

    def on_event(self, message: Message) -> None:
        event = decode_json(message.data, Event)
        self.events.append((event.instance_id, event.name, event.reason))

    def names(self) -> list[str]:
        return [name for _, name, _ in self.events]

    async def close(self) -> None:
        for planner, bus in self._planners:
            await planner.stop()
            await bus.close()
        await self.bus.close()


@asynccontextmanager
async def open_room() -> AsyncIterator[Room]:
    room = Room(MemoryBroker(latency_s=0.001))
    await room.bus.subscribe("sluice.*.event.>", room.on_event)
    yield room
    await room.close()


@played_in(open_room)
async def test_the_epoch_grows_with_every_restart(room: Room) -> None:
    epochs = []
    for _ in range(4):
        planner = await room.start()
        epochs.append(planner.epoch)
        await asyncio.sleep(1)
        await planner.stop()
    assert epochs == [1, 2, 3, 4]
    assert (await room.plan()).epoch == 4


@played_in(open_room)
async def test_planners_that_start_together_never_share_an_epoch(room: Room) -> None:
    planners = await asyncio.gather(*(room.start(f"p{index}") for index in range(8)))
    assert sorted(planner.epoch for planner in planners) == list(range(1, 9))
    await asyncio.sleep(2)
    newest = max(planners, key=lambda planner: planner.epoch)
    assert [planner for planner in planners if not planner.superseded] == [newest]
    assert room.names().count("planner_superseded") == 7


@played_in(open_room)
async def test_a_superseded_planner_decides_nothing_more(room: Room) -> None:
    await room.start("old")
    await asyncio.sleep(1)
    await room.start("new")
    await asyncio.sleep(1)
    room.events.clear()
    await room.show(view_of(), 2)
    await room.show(view_of(80, 80), 2)
    await asyncio.sleep(5)
    assert {instance for instance, _, _ in room.events} == {"new"}
    assert len(room.events) == 3


@played_in(open_room)
async def test_a_decision_is_told_once_with_its_reason(room: Room) -> None:
    planner = await room.start()
    await asyncio.sleep(1)
    await room.show(view_of(10), 3)
    await room.show(view_of(20), 3)
    await room.show(view_of(90, 30), 3)
    await room.show(view_of(90, liveness=Liveness.SUSPECT), 3)
    await asyncio.sleep(5)
    assert planner.epoch == 1, "an empty ladder changes no plan"
    reasons = [reason for _, name, reason in room.events if name == "plan_none"]
    assert [reason.removeprefix("epoch 1: ").split(":")[0] for reason in reasons] == [
        "blind",
        "calm",
        "pressure",
        "empty",
        "blind",
    ]
    assert reasons[2].startswith("epoch 1: pressure: 120 of 100 KV blocks wanted on 1 workers; the ladder has no lever")


@played_in(open_room)
async def test_a_view_of_unknown_age_is_not_acted_upon(room: Room) -> None:
    await (await room.bus.key_value(SUBJECTS.view_bucket())).put("cluster", encode_json(view_of(90, 90)))
    await room.start()
    await asyncio.sleep(1)
    assert [reason.split(":")[1] for _, name, reason in room.events if name == "plan_none"] == [" blind"]


@played_in(open_room)
async def test_a_pulled_lever_is_written_under_the_next_epoch_and_taken_back_under_another(room: Room) -> None:
    planner = await room.start(levers=(FakeLever(),))
    await room.show(view_of(90, 30), 2)
    plan = await room.plan()
    assert (plan.epoch, plan.lever) == (2, "preempt")
    await room.show(view_of(10), 2)
    plan = await room.plan()
    assert (plan.epoch, plan.lever) == (3, "none")
    assert planner.epoch == 3


@played_in(open_room)
async def test_the_old_planner_cannot_write_after_the_new_one_claimed(room: Room) -> None:
    old, new = PlanBook(await room.plans()), PlanBook(await room.plans())
    assert (await old.claim("old")).epoch == 1
    assert (await new.claim("new")).epoch == 2
    with pytest.raises(SupersededError):
        await old.write("preempt", "too late")
    assert await room.plan() == new.plan
    assert (await new.write("preempt", "in time")).epoch == 3
    wanted = WantedInstances(num_instances=3, lacking_tokens=5, reason="more", num_before=2)
    await new.want(wanted)
    assert (await new.write("preempt", "later")).wanted == wanted, "until somebody wants something else"


STEP = RestoreInstance(worker=PlannedWorker(worker_id=WorkerId("w"), held=(0, 4)))


@pytest.mark.parametrize("num_claims", [1, 3])
@pytest.mark.parametrize("phase", list(PlanPhase))
@played_in(open_room)
async def test_whoever_claims_carries_on_what_is_not_done(room: Room, phase: PlanPhase, num_claims: int) -> None:
    old = PlanBook(await room.plans())
    await old.claim("old")
    begun = await old.begin("drop", "short", (STEP,))
    assert (begun.plan_id, begun.epoch, begun.phase) == (2, 2, PlanPhase.PREPARING)
    last = begun if phase is PlanPhase.PREPARING else await old.advance(phase, "further")
    for number in range(1, num_claims + 1):
        plan = await PlanBook(await room.plans()).claim("new")
        assert plan.epoch == last.epoch + number
        if phase is PlanPhase.DONE:
            assert (plan.plan_id, plan.steps, plan.reason) == (0, (), "new")
        else:
            assert plan == last.model_copy(update={"epoch": plan.epoch})
        assert await room.plan() == plan
    with pytest.raises(SupersededError):
        await old.begin("drop", "too late", (STEP,))


@played_in(open_room)
async def test_what_was_begun_keeps_its_name_under_every_epoch(room: Room) -> None:
    book = PlanBook(await room.plans())
    await book.claim("start")
    await book.begin("drop", "short", (STEP,))
    for epoch, phase in ((3, PlanPhase.COMMITTING), (4, PlanPhase.DONE)):
        plan = await book.advance(phase, "on")
        assert (plan.epoch, plan.plan_id, plan.phase, plan.lever) == (epoch, 2, phase, "drop")
        assert plan.steps == (STEP,)
        assert await room.plan() == plan
    with pytest.raises(AssertionError, match="something was begun"):
        await book.advance(PlanPhase.DONE, "again")


@played_in(open_room)
async def test_a_system_that_nobody_knows_is_refused_by_name(room: Room) -> None:
    with pytest.raises(StartupError, match=r"unknown system 'kunsrve'; did you mean 'kunserve'.*--system"):
        Planner(PlannerSettings(system="kunsrve"), room.broker.connect("p"))


@pytest.mark.parametrize(
    "fields",
    [
        {"prepare_limit_s": 5.0},
        {"prepared_limit_s": 5.1},
        {"move_limit_s": 5.1},
        {"retry_s": 61.0},
        {"restore_ratio": 1.5},
        {"restore_max_ratio": 0.0},
        *({name: 0.0} for name in ("load_stall_s", "scale_window_s", "retry_s", "commit_limit_s", "move_limit_s")),
        *({name: -1.0} for name in ("restore_hold_s", "restore_horizon_s", "restore_again_s", "cooldown_s")),
        *({name: -1} for name in ("ahead_wait_s", "drop_hold_s", "max_instances", "scale_wait_s", "scale_hold_s")),
        {"max_group_size": 0},
        {"group_throughput": "1,-1"},
        {"max_group_size": 20, "stage_loss_ratio": 0.06},
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PlannerSettings(instance_id="p", **fields)


def test_a_profile_is_measured_or_linear() -> None:
    """Of s instances a group does s · (1 - 6 % · (s - 1)) times what one does."""
    assert PlannerSettings(max_group_size=3).observation().throughput == pytest.approx((1.0, 1.88, 2.64))
    measured = PlannerSettings.model_validate({"group_throughput": "100, 180,250"})
    assert measured.observation().throughput == (100.0, 180.0, 250.0)


@played_in(open_room)
async def test_a_key_that_holds_no_plan_is_left_alone(room: Room) -> None:
    await (await room.plans()).put("plan", b"not a plan")
    with pytest.raises(StartupError, match="does not hold a plan"):
        await room.start()
    entry = some(await (await room.plans()).get("plan"))
    assert entry.value == b"not a plan"


@played_in(open_room)
async def test_an_uncertain_write_is_settled_by_a_new_claim(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of epoch 2 arrives but its answer is lost: the planner takes 3, and is not superseded by itself."""
    planner = await room.start(levers=(FakeLever(),))
    write = PlanBook.write

    async def lose_answer(book: PlanBook, lever: str, reason: str) -> Plan:
        plan, revision = book.plan, book.revision
        await write(book, lever, reason)
        book.plan, book.revision = plan, revision
        raise BusError("no answer")

    monkeypatch.setattr(PlanBook, "write", lose_answer)
    await room.show(view_of(90, 30), 1)
    assert (await room.plan()).epoch == 2
    monkeypatch.undo()
    await room.show(view_of(90, 30), 2)
    assert not planner.superseded
    plan = await room.plan()
    assert (plan.epoch, plan.lever) == (4, "preempt"), "3 is the claim"


@pytest.mark.virtual_time
async def test_after_a_write_without_an_answer_nothing_is_written_before_a_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write arrives; by its revision the next one would look like another planner's."""
    bucket = await MemoryBroker().connect("p").key_value(SUBJECTS.plan_bucket())
    book, epochs = PlanBook(bucket), []
    epochs.append((await book.claim("test")).epoch)
    update = type(bucket).update

    async def lose_answer(*values: Any) -> int:
        await update(*values)
        raise BusError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "update", lose_answer)
        with pytest.raises(BusError, match="no answer"):
            await book.write("none", "lost")
    with pytest.raises(BusError, match="nobody knows what the plan key holds"):
        await book.write("none", "too early")
    epochs.append((await book.claim("test")).epoch)
    epochs.append((await book.write("none", "again")).epoch)
    assert epochs == [1, 3, 4]


@played_in(open_room)
async def test_it_answers_the_service_protocol_and_says_its_decision(room: Room) -> None:
    await room.start()
    await asyncio.sleep(1)
    info = json.loads(await room.bus.request("$SRV.INFO.sluice-planner", b"", timeout_s=1))
    assert info["description"]
    assert [endpoint["name"] for endpoint in info["endpoints"]] == ["plan", "drop", "restore", "metrics"]
    assert all(isinstance(value, str) for value in info["metadata"].values())
    assert json.loads(await room.bus.request(SUBJECTS.admin("planner", "p", "plan"), b"", timeout_s=1)) == {
        "epoch": 1,
        "superseded": False,
        "levers": [],
        "lever": "none",
        "situation": "blind",
        "reason": "no view of the cluster has come yet",
        "instances_wanted": None,
        "instances_reason": "",
    }


@pytest.mark.virtual_time
async def test_workers_that_tell_of_the_same_epoch_at_once_make_epochs_grow_all_the_same() -> None:
    """And whoever tells of a giant one is believed by steps."""
    bucket = await MemoryBroker().connect("p").key_value(SUBJECTS.plan_bucket())
    book, told = PlanBook(bucket), [7, 7, 3, MAX_EPOCH]
    await book.claim("test")
    epochs = [plan.epoch for plan in await asyncio.gather(*map(book.rise, told))]
    assert epochs == sorted(set(epochs))
    assert epochs[:2] == [8, 9]
    assert epochs[3] == epochs[2] + MAX_EPOCH_STEP
