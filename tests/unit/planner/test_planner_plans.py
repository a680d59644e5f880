"""Plans that workers carry out, on the virtual clock: a real planner and monitor, workers that keep the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from services.planner.book import PlanBook
from services.planner.service import Planner
from shared.ids import WorkerId
from shared.messages.plan import FormGroup, Plan, PlanPhase
from shared.transport.bus import BusError
from sim.virtual_time import run
from tests.support.kinds import some
from tests.support.levers import FakeLever
from tests.support.plan_cluster import clustered, open_cluster
from tests.support.plan_workers import Load, PlanCluster
from tests.support.seeds import first_of
from tests.support.staged import played_in

# --- the life of a drop ----------------------------------------------------------------------------------------------


@clustered()
async def test_a_worker_that_runs_short_has_a_group_within_milliseconds_and_a_whole_copy_after_the_burst(
    cluster: PlanCluster,
) -> None:
    await cluster.burst("w1", after_s=1.3)
    began_s = asyncio.get_running_loop().time()
    await asyncio.sleep(2)
    assert cluster.groups() == [("w0", "w1")]
    # 1 ms a message: report, view, begin (2), prepare (2, 2 to stop), commit (2), change (2, 5), done (2), event
    assert cluster.times("plan_done")[0] - began_s < 0.03
    cluster.relax()
    await asyncio.sleep(30)
    assert cluster.groups() == []
    carried_out = ["plan_preparing", "plan_committed", "plan_done"]
    assert cluster.names() == ["plan_none", "plan_none", *carried_out, "plan_none", *carried_out]
    done = cluster.reasons("plan_done")
    assert "carried out by 2 of 2 workers in 0.0" in done[0]
    assert "readers wait" in done[0], "the price"
    assert cluster.reasons("worker_throttled")[0].endswith("3 requests are queued for lack of them")


@pytest.mark.parametrize("lacks", [0, 3])
@clustered(2)
async def test_what_a_plan_claims_is_told_beside_what_the_workers_have(cluster: PlanCluster, lacks: int) -> None:
    """Two stages of 4 layers: (224 - 32) / 8 = 24 blocks each."""
    cluster.workers[WorkerId("w1")].lacks_blocks = lacks
    await cluster.burst("w0")
    await asyncio.sleep(2)
    (plan,) = cluster.committed
    assert [step.num_blocks for step in plan.steps if isinstance(step, FormGroup)] == [24]
    expected = "w0+w1 have 21 KV blocks, 24 were claimed" if lacks else "w0+w1 have 24 KV blocks, as claimed"
    assert expected in cluster.reasons("plan_done")[0]


@clustered()
async def test_a_worker_that_was_about_to_run_short_has_a_group_within_milliseconds_once_requests_wait(
    cluster: PlanCluster,
) -> None:
    """The forecast alone asks for nothing; that somebody waits does, and it does not wait for the planner's tick."""
    await cluster.burst()
    cluster.relax(3, "w1")
    await asyncio.sleep(1)
    cluster.relax(9, "w1")
    await cluster.workers[WorkerId("w1")].report()
    await asyncio.sleep(0.27)
    assert cluster.groups() == []
    queued_s = asyncio.get_running_loop().time()
    await cluster.strain("w1")
    await asyncio.sleep(2)
    assert cluster.times("plan_done")[0] - queued_s < 0.03
    assert cluster.reasons("plan_refused", "there is room for all that is asked for")


@pytest.mark.slow
@pytest.mark.parametrize("used", [1, 3, 4, 5, 6, 7, 9, 10])
@clustered()
async def test_a_steady_load_makes_no_flapping(cluster: PlanCluster, used: int) -> None:
    """A burst, then whatever steady load for five minutes: one drop, and at most one restore."""
    cluster.relax(used)
    await asyncio.sleep(10)
    await cluster.burst("w0", "w1")
    await asyncio.sleep(3)
    cluster.relax(used)
    await asyncio.sleep(300)
    assert cluster.levers == (["drop", "restore"] if used < 5 else ["drop"])


@clustered()
async def test_a_burst_that_goes_on_drops_once_and_a_worse_one_drops_more(cluster: PlanCluster) -> None:
    await cluster.burst("w0", queued=2, demanded=3)
    await asyncio.sleep(60)
    assert [len(group) for group in cluster.groups()] == [2]
    for name in cluster.workers:
        await cluster.strain(name, queued=5, demanded=9)
    await asyncio.sleep(60)
    assert sum(len(group) for group in cluster.groups()) == 4
    assert "plan_aborted" not in cluster.names(), "no plan is made from reports of before the last one"


@clustered()
async def test_a_restore_waits_for_its_hold_without_a_break(cluster: PlanCluster) -> None:
    await cluster.burst("w0")
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


@clustered()
async def test_after_a_restore_only_what_was_calm_since_is_a_reason_to_drop(cluster: PlanCluster) -> None:
    await cluster.burst("w0")
    await asyncio.sleep(2)
    for name in cluster.workers:  # whole again by hand, in the middle of the burst
        await cluster.strain(name)
    answer = await cluster.ask("restore")
    assert answer["done"], answer
    await asyncio.sleep(9)
    assert cluster.groups() == []
    await asyncio.sleep(3)
    assert cluster.groups() != []
    assert cluster.reasons("plan_refused", "groups were restored a moment ago")


@clustered(system="fcfs-chunked")
async def test_a_system_that_drops_nothing_has_an_empty_ladder(cluster: PlanCluster) -> None:
    await cluster.burst("w0")
    await asyncio.sleep(5)
    assert cluster.heard == []
    assert "the ladder has no lever yet" in cluster.reasons("plan_none")[-1]


@clustered(drop_wait_s=0.001)
async def test_a_drop_that_costs_more_than_it_saves_is_refused_with_its_price(cluster: PlanCluster) -> None:
    await cluster.burst("w0")
    await asyncio.sleep(5)
    assert cluster.heard == []
    (reason,) = cluster.reasons("plan_refused")
    assert "readers wait" in reason
    assert "the room would save 0.0" in reason


# --- what goes wrong at workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["w0", "w1"])
@clustered(2)
async def test_a_refusal_aborts_everywhere_and_tries_get_rarer(cluster: PlanCluster, who: str) -> None:
    cluster.workers[WorkerId(who)].refuses = "not today"
    await cluster.burst("w0", "w1")
    await asyncio.sleep(100)
    assert cluster.groups() == []
    pauses = [later - earlier for earlier, later in pairwise(cluster.times("plan_preparing"))]
    assert all(pause <= gap <= pause + 0.51 for pause, gap in zip([2, 4, 8, 16, 32], pauses, strict=True)), pauses
    assert cluster.reasons("plan_aborted", "not today") == cluster.reasons("plan_aborted")
    assert "plan_committed" not in cluster.names()


@clustered(2)
async def test_a_worker_that_does_not_answer_costs_two_seconds_and_no_more(cluster: PlanCluster) -> None:
    cluster.workers[WorkerId("w1")].is_deaf = True
    await cluster.burst("w0")
    await asyncio.sleep(20)
    assert cluster.groups() == []
    abort = next(each for each in cluster.heard if each.kind == "abort_plan")
    assert abort.at_s - cluster.heard[0].at_s == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("after_ms", [1, 4, 7, 10, 13, 16, 500])
@clustered(2)
async def test_a_worker_that_dies_on_the_way_leaves_whole_instances(cluster: PlanCluster, after_ms: float) -> None:
    """At 7 ms it is prepared, at 13 ms it is carrying out, at 500 ms it is in the group."""
    cluster.is_lossless = after_ms == 500
    await cluster.burst("w0", after_s=1.2)
    await asyncio.sleep(after_ms / 1000)
    cluster.workers[WorkerId("w1")].die()
    cluster.workers[WorkerId("w0")].load = Load(2)
    await asyncio.sleep(6)
    assert cluster.plan.phase is PlanPhase.DONE, "3 s of silence are death, and nobody waits for the dead"
    await cluster.restart(WorkerId("w1"))
    await asyncio.sleep(5)
    assert cluster.groups() == []


@clustered(2, commit_limit_s=5)
async def test_a_worker_that_hangs_in_the_middle_counts_as_failed_after_a_limit(cluster: PlanCluster) -> None:
    cluster.workers[WorkerId("w1")].change_s = 20
    await cluster.burst("w0")
    await asyncio.sleep(8)
    assert "for 5 s" in cluster.reasons("plan_failed")[0]
    await asyncio.sleep(15)
    cluster.relax()
    await asyncio.sleep(60)


@played_in(partial(open_cluster, 2))
async def test_a_planner_claims_above_the_epoch_that_a_worker_knows_and_goes_on(cluster: PlanCluster) -> None:
    """Whoever made that epoch up has not written the plan key."""
    cluster.workers[WorkerId("w1")].newest_epoch = 1000
    node = await cluster.burst("w0")
    await asyncio.sleep(10)
    assert not some(node.planner).superseded
    assert some(node.planner).epoch > 1000
    assert "plan_done" in cluster.names()


@clustered()
async def test_a_worker_of_another_model_is_left_out_by_name(cluster: PlanCluster) -> None:
    worker = cluster.workers[WorkerId("w1")]
    worker.model = replace(worker.model, block_bytes=32)
    await cluster.burst(*cluster.workers, queued=5, demanded=9)
    await asyncio.sleep(5)
    (reason,) = cluster.reasons("worker_left_out")
    assert "w1 takes part in no plan: the sizes of its model" in reason
    assert "w1" not in {each.worker_id for each in cluster.heard}
    asked = await cluster.ask("drop", {"workers": ["w0", "w1"]})
    assert asked["reason"].endswith(reason.removeprefix("epoch 1: "))


# --- what goes wrong at planners -------------------------------------------------------------------------------------

STEPS_MS = [step / 2 for step in range(2, 60)]
"""From the report of a worker that runs short: a message takes 1 ms, the whole of it 22 ms."""


@pytest.mark.parametrize("at_ms", first_of(sorted(STEPS_MS, key=lambda ms: 2 * ms % 3), 20))
@clustered()
async def test_a_planner_that_is_killed_anywhere_is_followed_by_one_that_ends_what_was_begun(
    cluster: PlanCluster, at_ms: float
) -> None:
    node = await cluster.burst("w0", "w1", after_s=1.2)
    await asyncio.sleep(at_ms / 1000)
    node.kill(0.5)
    cluster.relax(5, "w0", "w1")  # half of their own memory: a group stays, and none is called for
    await asyncio.sleep(20)
    assert node.num_starts == 2
    phases = [plan.phase for plan in cluster.plans if plan.plan_id]
    if PlanPhase.COMMITTING in phases:
        assert len(cluster.groups()) == 1
    elif phases:
        assert cluster.reasons("plan_aborted"), "begun, and never abandoned"


@pytest.mark.parametrize("at_ms", STEPS_MS[::3])
@clustered()
async def test_of_two_planners_one_goes_on_whenever_the_other_comes(cluster: PlanCluster, at_ms: float) -> None:
    first = await cluster.burst("w0", "w1", after_s=1.2)
    await asyncio.sleep(at_ms / 1000)
    second = cluster.start_planner("q")
    await asyncio.sleep(20)
    assert [some(node.planner).superseded for node in (first, second)] == [True, False]
    assert len(cluster.groups()) == 1
    assert len(cluster.reasons("planner_superseded")) == 1


@pytest.mark.parametrize("at_ms", range(0, 30, 2))
@clustered()
async def test_a_person_and_a_tick_that_write_at_once_do_not_supersede_each_other(
    cluster: PlanCluster, at_ms: int
) -> None:
    """A lever with nothing for workers to do is pulled and released, each a write of the key by the tick."""
    planner = Planner(cluster.settings, cluster.broker.connect("p"), levers=(FakeLever(),))
    await planner.start()
    await asyncio.sleep(1.2)
    await cluster.strain("w0")
    await asyncio.sleep(at_ms / 1000)
    answer = await cluster.ask("drop", {"workers": ["w2", "w3"]})
    await asyncio.sleep(2)
    assert answer["done"], answer
    assert not planner.superseded
    await planner.stop()


@pytest.mark.parametrize("number", range(5))
@clustered()
async def test_a_write_whose_answer_is_lost_is_settled_by_a_new_claim(
    cluster: PlanCluster, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    node = await cluster.burst("w0", after_s=1.2)
    await asyncio.sleep(10)
    assert not some(node.planner).superseded
    assert len(cluster.groups()) == 1


def test_the_same_seed_gives_the_same_story() -> None:
    async def story() -> str:
        async with open_cluster() as cluster:
            await cluster.burst("w0", "w3")
            await asyncio.sleep(40)
        return repr([(each.at_s, each.worker_id, each.kind, each.epoch) for each in cluster.heard])

    stories = {run(story()) for _ in range(3)}
    assert len(stories) == 1


# --- by hand ---------------------------------------------------------------------------------------------------------


@clustered(system="fcfs-chunked")
async def test_a_person_forms_groups_and_dissolves_them(cluster: PlanCluster) -> None:
    await cluster.burst(after_s=1.5)
    first = await cluster.ask("drop", {"workers": ["w2", "w0", "w3"]})
    assert first["done"], first
    assert sorted(first["groups"][0]) == ["w0", "w2", "w3"]
    assert 0 < first["latency_s"] < 0.1
    assert [sorted(group) for group in cluster.groups()] == [["w0", "w2", "w3"]]
    leader = cluster.groups()[0][0]
    refused = await cluster.ask("drop", {"workers": ["w1", "w0"]})
    assert not refused["done"]
    assert "is in a group with some of them" in refused["reason"]
    done = await cluster.ask("restore", {"groups": [leader]})
    assert done["done"], done
    assert cluster.groups() == []


@clustered()
async def test_without_names_the_best_pair_is_dropped_and_all_groups_are_restored(cluster: PlanCluster) -> None:
    await cluster.burst(after_s=1.5)
    for _ in range(2):
        assert (await cluster.ask("drop"))["done"], "the second one sees what the first one did"
    assert sorted(len(group) for group in cluster.groups()) == [2, 2]
    answer = await cluster.ask("restore", {})
    assert answer["done"], answer
    assert len(answer["groups"]) == 4
    assert cluster.groups() == []


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
@clustered()
async def test_what_cannot_be_is_answered_with_the_reason(
    cluster: PlanCluster, verb: str, fields: Any, reason: str
) -> None:
    await cluster.burst(after_s=1.5)
    answer = await cluster.ask(verb, fields)
    assert (answer["done"], answer["plan_id"]) == (False, 0)
    assert answer["reason"] == reason
    assert cluster.heard == []


@clustered()
async def test_workers_that_cannot_drop_and_a_missing_monitor_are_reasons_too(cluster: PlanCluster) -> None:
    for worker in cluster.workers.values():
        worker.is_elastic = False
    await cluster.burst(after_s=1.5)
    assert "no worker that is ready can drop parameters" in (await cluster.ask("drop"))["reason"]
    cluster.monitor.kill(None)
    await asyncio.sleep(3)
    assert "is the monitor there?" in (await cluster.ask("drop"))["reason"]


@clustered()
async def test_one_plan_at_a_time_and_who_gave_up_asking_does_not_stop_it(cluster: PlanCluster) -> None:
    for worker in cluster.workers.values():
        worker.change_s = 0.5
    await cluster.burst(after_s=1.5)
    first = asyncio.create_task(cluster.ask("drop", timeout_s=0.1))
    refused = await asyncio.create_task(cluster.ask("drop", {"workers": ["w2", "w3"]}))
    assert (refused["done"], refused["reason"]) == (False, "a plan is being carried out")
    with pytest.raises(BusError):
        await first
    await asyncio.sleep(2)
    assert len(cluster.groups()) == 1
