"""Plans that workers carry out, on the virtual clock: a real planner and monitor, workers that keep the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from services.planner.book import PlanBook
from services.planner.policy.levers.ladder import ClusterSnapshot, Offer
from services.planner.service import build_planner
from shared.ids import WorkerId
from shared.messages.plan import FormGroup, Plan, PlanPhase
from shared.transport.bus import BusError
from shared.transport.memory_bus import Delivery
from sim.faults.nodes import PlannerNode
from tests.support.plan_workers import SUBJECTS, Load, PlanCluster, in_cluster, settings


async def ask(cluster: PlanCluster, verb: str, fields: Any = None, timeout_s: float = 30) -> dict[str, Any]:
    data = b"" if fields is None else json.dumps(fields).encode()
    answer: dict[str, Any] = json.loads(
        await cluster.bus.request(SUBJECTS.admin("planner", "p", verb), data, timeout_s=timeout_s)
    )
    return answer


def reasons(cluster: PlanCluster, name: str) -> list[str]:
    return [reason for _, event, reason in cluster.events if event == name]


# --- the life of a drop ----------------------------------------------------------------------------------------------


def test_a_worker_that_runs_short_has_a_group_within_milliseconds_and_a_whole_copy_after_the_burst() -> None:
    times: dict[str, float] = {}

    async def burst(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.3)
        began_s = asyncio.get_running_loop().time()
        await cluster.strain("w1")
        await asyncio.sleep(2)
        assert cluster.groups() == [("w0", "w1")]
        times["drop"] = next(at_s for at_s, name, _ in cluster.events if name == "plan_done") - began_s
        cluster.relax()
        await asyncio.sleep(30)
        assert cluster.groups() == []

    cluster = in_cluster(burst)
    cluster.check()
    # 1 ms a message: report, view, begin (2), prepare (2, 2 to stop), commit (2), change (2, 5), done (2), event
    assert times["drop"] < 0.03
    carried_out = ["plan_preparing", "plan_committed", "plan_done"]
    assert cluster.names() == ["plan_none", "plan_none", *carried_out, "plan_none", *carried_out]
    done = reasons(cluster, "plan_done")
    assert "carried out by 2 of 2 workers in 0.0" in done[0]
    assert "readers wait" in done[0], "the price"
    assert reasons(cluster, "worker_throttled")[0].endswith("3 requests are queued for lack of them")


@pytest.mark.parametrize("lacks", [0, 3])
def test_what_a_plan_claims_is_told_beside_what_the_workers_have(lacks: int) -> None:
    """Two stages of 4 layers: (224 - 32) / 8 = 24 blocks each."""

    async def burst(cluster: PlanCluster) -> None:
        cluster.workers[WorkerId("w1")].lacks_blocks = lacks
        cluster.start_planner()
        await asyncio.sleep(1.3)
        await cluster.strain("w0")
        await asyncio.sleep(2)

    cluster = in_cluster(burst, num_workers=2)
    (plan,) = [plan for plan in cluster.plans if plan.phase is PlanPhase.COMMITTING]
    assert [step.num_blocks for step in plan.steps if isinstance(step, FormGroup)] == [24]
    expected = "w0+w1 have 21 KV blocks, 24 were claimed" if lacks else "w0+w1 have 24 KV blocks, as claimed"
    assert expected in reasons(cluster, "plan_done")[0]


def test_a_worker_that_was_about_to_run_short_has_a_group_within_milliseconds_once_requests_wait() -> None:
    """The forecast alone asks for nothing; that somebody waits does, and it does not wait for the planner's tick."""
    times: dict[str, float] = {}

    async def ramp(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        cluster.relax(3, "w1")
        await asyncio.sleep(1)
        cluster.relax(9, "w1")
        await cluster.workers[WorkerId("w1")].report()
        await asyncio.sleep(0.27)
        assert cluster.groups() == []
        times["queued"] = asyncio.get_running_loop().time()
        await cluster.strain("w1")
        await asyncio.sleep(2)
        times["done"] = next(at_s for at_s, name, _ in cluster.events if name == "plan_done")

    cluster = in_cluster(ramp)
    cluster.check()
    assert any("there is room for all that is asked for" in reason for reason in reasons(cluster, "plan_refused"))
    assert times["done"] - times["queued"] < 0.03


@pytest.mark.parametrize("used", [1, 3, 4, 5, 6, 7, 9, 10])
def test_a_steady_load_makes_no_flapping(used: int) -> None:
    """A burst, then whatever steady load for five minutes: one drop, and at most one restore."""

    async def steady(cluster: PlanCluster) -> None:
        cluster.relax(used)
        await asyncio.sleep(10)
        cluster.start_planner()
        await asyncio.sleep(1)
        for name in ("w0", "w1"):
            await cluster.strain(name)
        await asyncio.sleep(3)
        cluster.relax(used)
        await asyncio.sleep(300)

    cluster = in_cluster(steady)
    cluster.check()
    levers = [plan.lever for plan in cluster.plans if plan.phase is PlanPhase.COMMITTING]
    assert levers == (["drop", "restore"] if used < 5 else ["drop"])


def test_a_burst_that_goes_on_drops_once_and_a_worse_one_drops_more() -> None:
    async def burst(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0", queued=2, demanded=3)
        await asyncio.sleep(60)
        assert [len(group) for group in cluster.groups()] == [2]
        for name in cluster.workers:
            await cluster.strain(name, queued=5, demanded=9)
        await asyncio.sleep(60)
        assert sum(len(group) for group in cluster.groups()) == 4

    cluster = in_cluster(burst)
    cluster.check()
    assert "plan_aborted" not in cluster.names(), "no plan is made from reports of before the last one"


def test_a_restore_waits_for_its_hold_without_a_break() -> None:
    async def waves(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(2)
        for _ in range(6):
            cluster.relax(2, "w0", "w1")
            await asyncio.sleep(8)
            cluster.relax(8, "w0", "w1")
            await asyncio.sleep(2)
        assert len(cluster.groups()) == 1
        cluster.relax(2)
        await asyncio.sleep(12)
        assert cluster.groups() == []

    in_cluster(waves).check()


def test_after_a_restore_only_what_was_calm_since_is_a_reason_to_drop() -> None:
    async def rush(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(2)
        for name in cluster.workers:  # whole again by hand, in the middle of the burst
            await cluster.strain(name)
        answer = await ask(cluster, "restore")
        assert answer["done"], answer
        await asyncio.sleep(9)
        assert cluster.groups() == []
        await asyncio.sleep(3)
        assert cluster.groups() != []

    cluster = in_cluster(rush)
    cluster.check()
    assert any("groups were restored a moment ago" in reason for reason in reasons(cluster, "plan_refused"))


def test_a_system_that_drops_nothing_has_an_empty_ladder() -> None:
    async def burst(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(5)

    cluster = in_cluster(burst, planner=settings(system="fcfs-chunked"))
    assert cluster.heard == []
    assert "the ladder has no lever yet" in reasons(cluster, "plan_none")[-1]


def test_a_drop_that_costs_more_than_it_saves_is_refused_with_its_price() -> None:
    async def burst(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(5)

    cluster = in_cluster(burst, planner=settings(drop_wait_s=0.001))
    assert cluster.heard == []
    (reason,) = reasons(cluster, "plan_refused")
    assert "readers wait" in reason
    assert "the room would save 0.0" in reason


# --- what goes wrong at workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["w0", "w1"])
def test_a_refusal_aborts_everywhere_and_tries_get_rarer(who: str) -> None:
    async def refuse(cluster: PlanCluster) -> None:
        cluster.workers[WorkerId(who)].refuses = "not today"
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await cluster.strain("w1")
        await asyncio.sleep(100)
        assert cluster.groups() == []

    cluster = in_cluster(refuse, num_workers=2)
    cluster.check()
    begun = [at_s for at_s, name, _ in cluster.events if name == "plan_preparing"]
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    assert all(pause <= gap <= pause + 0.51 for pause, gap in zip([2, 4, 8, 16, 32], pauses, strict=True)), pauses
    assert all("not today" in reason for reason in reasons(cluster, "plan_aborted"))
    assert "plan_committed" not in cluster.names()


def test_a_worker_that_does_not_answer_costs_two_seconds_and_no_more() -> None:
    async def silence(cluster: PlanCluster) -> None:
        cluster.workers[WorkerId("w1")].is_deaf = True
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(20)
        assert cluster.groups() == []

    cluster = in_cluster(silence, num_workers=2)
    first = cluster.heard[0]
    abort = next(each for each in cluster.heard if each.kind == "abort_plan")
    assert abort.at_s - first.at_s == pytest.approx(2.0, abs=0.01)
    cluster.check()


@pytest.mark.parametrize("after_ms", [1, 4, 7, 10, 13, 16, 500])
def test_a_worker_that_dies_on_the_way_leaves_whole_instances(after_ms: float) -> None:
    """At 7 ms it is prepared, at 13 ms it is carrying out, at 500 ms it is in the group."""

    async def death(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.2)
        await cluster.strain("w0")
        await asyncio.sleep(after_ms / 1000)
        cluster.workers[WorkerId("w1")].die()
        cluster.workers[WorkerId("w0")].load = Load(2)
        await asyncio.sleep(6)
        assert cluster.plan.phase is PlanPhase.DONE, "3 s of silence are death, and nobody waits for the dead"
        await cluster.restart(WorkerId("w1"))
        await asyncio.sleep(5)
        assert cluster.groups() == []

    in_cluster(death, num_workers=2).check(is_lossless=after_ms == 500)


def test_a_worker_that_hangs_in_the_middle_counts_as_failed_after_a_limit() -> None:
    async def hang(cluster: PlanCluster) -> None:
        cluster.workers[WorkerId("w1")].change_s = 20
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(8)
        assert "for 5 s" in reasons(cluster, "plan_failed")[0]
        await asyncio.sleep(15)
        cluster.relax()
        await asyncio.sleep(60)

    in_cluster(hang, num_workers=2, planner=settings(commit_limit_s=5)).check()


def test_a_worker_that_has_heard_a_newer_epoch_ends_this_planner() -> None:
    async def fence(cluster: PlanCluster) -> None:
        cluster.workers[WorkerId("w1")].newest_epoch = 1000
        node = cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await asyncio.sleep(10)
        assert node.planner is not None
        assert node.planner.superseded

    cluster = in_cluster(fence, num_workers=2)
    assert "plan_committed" not in cluster.names()
    assert len(reasons(cluster, "planner_superseded")) == 1


def test_a_worker_of_another_model_is_left_out_by_name() -> None:
    async def odd(cluster: PlanCluster) -> None:
        worker = cluster.workers[WorkerId("w1")]
        worker.model = type(worker.model)(**{**_fields(worker.model), "block_bytes": 32})
        cluster.start_planner()
        await asyncio.sleep(1)
        for name in cluster.workers:
            await cluster.strain(name, queued=5, demanded=9)
        await asyncio.sleep(5)

    cluster = in_cluster(odd)
    cluster.check()
    assert len(reasons(cluster, "worker_left_out")) == 1
    assert "w1 takes part in no plan: the sizes of its model" in reasons(cluster, "worker_left_out")[0]
    assert "w1" not in {each.worker_id for each in cluster.heard}


def _fields(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in type(model).__dataclass_fields__}


# --- what goes wrong at planners -------------------------------------------------------------------------------------

STEPS_MS = [step / 2 for step in range(2, 60)]
"""From the report of a worker that runs short: a message takes 1 ms, the whole of it 22 ms."""


@pytest.mark.parametrize("at_ms", STEPS_MS)
def test_a_planner_that_is_killed_anywhere_is_followed_by_one_that_ends_what_was_begun(at_ms: float) -> None:
    async def kill(cluster: PlanCluster) -> None:
        node = cluster.start_planner()
        await asyncio.sleep(1.2)
        for name in ("w0", "w1"):
            await cluster.strain(name)
        await asyncio.sleep(at_ms / 1000)
        node.kill(0.5)
        cluster.relax(5, "w0", "w1")  # half of their own memory: a group stays, and none is called for
        await asyncio.sleep(20)
        assert node.num_starts == 2

    cluster = in_cluster(kill)
    cluster.check()
    phases = [plan.phase for plan in cluster.plans if plan.plan_id]
    if PlanPhase.COMMITTING in phases:
        assert len(cluster.groups()) == 1
    elif phases:
        assert reasons(cluster, "plan_aborted"), "begun, and never abandoned"


@pytest.mark.parametrize("at_ms", STEPS_MS[::3])
def test_of_two_planners_one_goes_on_whenever_the_other_comes(at_ms: float) -> None:
    async def race(cluster: PlanCluster) -> None:
        first = cluster.start_planner("p")
        await asyncio.sleep(1.2)
        for name in ("w0", "w1"):
            await cluster.strain(name)
        await asyncio.sleep(at_ms / 1000)
        second = cluster.start_planner("q")
        await asyncio.sleep(20)
        assert first.planner is not None
        assert second.planner is not None
        assert first.planner.superseded
        assert not second.planner.superseded
        assert len(cluster.groups()) == 1

    cluster = in_cluster(race)
    cluster.check()
    assert len(reasons(cluster, "planner_superseded")) == 1


@pytest.mark.parametrize("at_ms", range(0, 30, 2))
def test_a_person_and_a_tick_that_write_at_once_do_not_supersede_each_other(at_ms: int) -> None:
    """A lever with nothing for workers to do is pulled and released, each a write of the key by the tick."""

    class Relief:
        name = "relief"
        is_standing = False

        def offer(self, snapshot: ClusterSnapshot) -> Offer | None:
            return Offer(0.1, f"helps {len(snapshot.workers)}")

    async def both(cluster: PlanCluster) -> None:
        planner = build_planner(cluster.settings, cluster.broker.connect("p"), levers=(Relief(),))
        await planner.start()
        await asyncio.sleep(1.2)
        await cluster.strain("w0")
        await asyncio.sleep(at_ms / 1000)
        answer = await ask(cluster, "drop", {"workers": ["w2", "w3"]})
        await asyncio.sleep(2)
        assert answer["done"], answer
        assert not planner.superseded
        await planner.stop()

    in_cluster(both).check()


@pytest.mark.parametrize("number", range(5))
def test_a_write_whose_answer_is_lost_is_settled_by_a_new_claim(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of a drop: begin, commit, done. Each arrives, and the planner does not hear of it."""
    written = 0
    write = PlanBook._next

    async def lose_answer(book: PlanBook, succeed: Callable[[Plan], Plan]) -> Plan:
        nonlocal written
        before = book.plan, book.revision
        new = await write(book, succeed)
        written += 1
        if written == number + 1:
            book.plan, book.revision = before
            raise BusError("no answer")
        return new

    monkeypatch.setattr(PlanBook, "_next", lose_answer)

    async def unlucky(cluster: PlanCluster) -> None:
        node = cluster.start_planner()
        await asyncio.sleep(1.2)
        await cluster.strain("w0")
        await asyncio.sleep(10)
        assert node.planner is not None
        assert not node.planner.superseded
        assert len(cluster.groups()) == 1

    in_cluster(unlucky).check()


async def misfortune(cluster: PlanCluster, node: PlannerNode, rng: np.random.Generator) -> None:
    """Let something happen to a worker, or to the planner."""
    worker = list(cluster.workers.values())[int(rng.integers(len(cluster.workers)))]
    match int(rng.integers(7)):
        case 0 if worker.is_alive:
            worker.die()
        case 1 | 2 if not worker.is_alive:
            await cluster.restart(worker.worker_id)
        case 3:
            node.kill(float(rng.random()))
        case 4:
            worker.refuses = "" if worker.refuses else "not now"
        case 5:
            cluster.relax(int(rng.integers(0, 8)))
        case _:
            await cluster.strain(worker.worker_id)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_doubled_late_or_dead_all_ends_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    faulty = True

    def deliver(delivery: Delivery) -> tuple[float, ...]:
        if not faulty or (".plan" not in delivery.subject and "_INBOX" not in delivery.subject):
            return (0.0,)
        draw = rng.random()
        if draw < 0.08:
            return ()
        if draw < 0.16:
            return (0.0, float(rng.random()))
        return (float(rng.random()) * 0.05,) if draw < 0.4 else (0.0,)

    async def chaos(cluster: PlanCluster) -> None:
        nonlocal faulty
        names = list(cluster.workers)
        node = cluster.start_planner()
        for _ in range(25):
            await asyncio.sleep(float(rng.random()) * 3)
            await misfortune(cluster, node, rng)
        faulty = False
        for name in names:
            cluster.workers[name].refuses = ""
            if not cluster.workers[name].is_alive:
                await cluster.restart(name)
        cluster.relax()
        await asyncio.sleep(150)
        cluster.check(is_lossless=False)
        assert cluster.groups() == [], "when all is calm, all are whole"

    in_cluster(chaos, num_workers=int(rng.integers(2, 7)), deliver=deliver)


def test_the_same_seed_gives_the_same_story() -> None:
    async def story(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1)
        await cluster.strain("w0")
        await cluster.strain("w3")
        await asyncio.sleep(40)

    stories = {repr([(e.at_s, e.worker_id, e.kind, e.epoch) for e in in_cluster(story).heard]) for _ in range(3)}
    assert len(stories) == 1


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_person_forms_groups_and_dissolves_them() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.5)
        first = await ask(cluster, "drop", {"workers": ["w2", "w0", "w3"]})
        assert first["done"], first
        assert sorted(first["groups"][0]) == ["w0", "w2", "w3"]
        assert 0 < first["latency_s"] < 0.1
        assert [sorted(group) for group in cluster.groups()] == [["w0", "w2", "w3"]]
        leader = cluster.groups()[0][0]
        refused = await ask(cluster, "drop", {"workers": ["w1", "w0"]})
        assert not refused["done"]
        assert "is in a group with some of them" in refused["reason"]
        done = await ask(cluster, "restore", {"groups": [leader]})
        assert done["done"], done
        assert cluster.groups() == []

    cluster = in_cluster(by_hand, planner=settings(system="fcfs-chunked"))
    cluster.check()


def test_without_names_the_best_pair_is_dropped_and_all_groups_are_restored() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.5)
        for _ in range(2):
            assert (await ask(cluster, "drop"))["done"], "the second one sees what the first one did"
        assert sorted(len(group) for group in cluster.groups()) == [2, 2]
        answer = await ask(cluster, "restore", {})
        assert answer["done"], answer
        assert len(answer["groups"]) == 4
        assert cluster.groups() == []

    in_cluster(by_hand).check()


@pytest.mark.parametrize(
    ("verb", "fields", "reason"),
    [
        ("drop", {"workers": ["w0"]}, "a group takes two workers at least"),
        ("drop", {"workers": ["w0", "nobody"]}, "'nobody' is no worker that is ready and can drop parameters"),
        ("drop", {"workers": "w0"}, 'the question must be {"workers": [names]}, or empty'),
        ("drop", {"groups": []}, 'the question must be {"workers": [names]}, or empty'),
        ("drop", [1], 'the question must be {"workers": [names]}, or empty'),
        ("restore", None, "no group has dropped anything"),
        ("restore", {"groups": ["w9"]}, "there is no group 'w9'"),
    ],
)
def test_what_cannot_be_is_answered_with_the_reason(verb: str, fields: Any, reason: str) -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.5)
        answer = await ask(cluster, verb, fields)
        assert (answer["done"], answer["plan_id"]) == (False, 0)
        assert answer["reason"] == reason

    assert in_cluster(by_hand).heard == []


def test_workers_that_cannot_drop_and_a_missing_monitor_are_reasons_too() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        for worker in cluster.workers.values():
            worker.is_elastic = False
        cluster.start_planner()
        await asyncio.sleep(1.5)
        assert "no worker that is ready can drop parameters" in (await ask(cluster, "drop"))["reason"]
        cluster.monitor.kill(None)
        await asyncio.sleep(3)
        assert "is the monitor there?" in (await ask(cluster, "drop"))["reason"]

    in_cluster(by_hand)


def test_one_plan_at_a_time() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        for worker in cluster.workers.values():
            worker.change_s = 0.5
        cluster.start_planner()
        await asyncio.sleep(1.5)
        both = await asyncio.gather(ask(cluster, "drop"), ask(cluster, "drop", {"workers": ["w2", "w3"]}))
        assert [answer["done"] for answer in both] == [True, False]
        assert both[1]["reason"] == "a plan is being carried out"

    in_cluster(by_hand).check()


def test_who_gave_up_asking_does_not_stop_the_plan() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        for worker in cluster.workers.values():
            worker.change_s = 0.5
        cluster.start_planner()
        await asyncio.sleep(1.5)
        with pytest.raises(BusError):
            await ask(cluster, "drop", timeout_s=0.1)
        await asyncio.sleep(2)
        assert len(cluster.groups()) == 1

    in_cluster(by_hand).check()
