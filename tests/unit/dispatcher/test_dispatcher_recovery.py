"""Requests whose worker is lost, hangs or is about to stop go on elsewhere; on the virtual clock, with fake workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from services.dispatcher.session.leases import Loss
from services.dispatcher.session.recovery import WorkerLosses
from services.dispatcher.session.request import FailureCode
from services.dispatcher.session.session import Session
from shared.api_keys import Tier
from shared.ids import Incarnation, WorkerId
from shared.messages.fetch import FetchOutcome
from shared.messages.report import Liveness, WorkerPhase
from shared.messages.request import RefusalReason, Submit
from shared.types import FinishReason, LatencyLimits
from tests.support.fake_worker import FakeWorker, make_status
from tests.support.session_cluster import ANSWER, Cluster, Taker, cluster, with_cluster


async def run_on(
    made: Cluster, name: str, request: str = "r", num_tokens: int = 3, **fields: Any
) -> tuple[Session, Taker]:
    """Return a request that runs on a worker and has some tokens."""
    session = await made.admit(request, **fields)
    taker = Taker()
    session.attach(taker, 0.0)
    assert session.worker_id == name
    await asyncio.sleep(0.01 * num_tokens + 0.005)
    return session, taker


async def finish(made: Cluster, session: Session, limit_s: float = 20.0) -> FailureCode | None:
    """Wait for the end, release, and return why there is no whole answer."""
    async with asyncio.timeout(limit_s):
        await session.ended.wait()
    outcome = made.sessions.outcome(session)
    made.sessions.release(session)
    await asyncio.sleep(0.01)
    return outcome


async def finish_whole(made: Cluster, session: Session, reader: Taker | None = None) -> None:
    """Wait for the end: the answer is whole, and the reader has all of it."""
    assert await finish(made, session) is None
    assert session.tokens == ANSWER
    assert reader is None or reader.tokens == ANSWER


@with_cluster()
async def test_a_request_whose_worker_vanishes_goes_on_elsewhere_after_the_tokens_it_has(made: Cluster) -> None:
    first, second = await made.add("a"), await made.add("b")
    session, taker = await run_on(made, "a")
    await first.stop()
    died_s = made.now_s
    await finish_whole(made, session, taker)
    (submit,) = second.submits
    assert submit.attempt == 2
    assert submit.generated_ids().tolist() == ANSWER[: len(submit.generated) // 4]
    assert len(submit.generated) > 0
    assert session.history.num_recoveries == 1
    assert made.sessions.recovery.by_worker == {WorkerId("a"): WorkerLosses(num_lost=1, num_recovered=1)}
    assert made.now_s - died_s < 1.5


@with_cluster()
async def test_a_request_that_goes_on_elsewhere_keeps_its_tier_its_limits_and_its_preemptions(made: Cluster) -> None:
    """The first worker preempts it twice and says so between its tokens; the second one ran an older attempt of it."""
    first, second = await made.add("a", script=None), await made.add("b")
    limits = LatencyLimits(ttft_s=0.5, tpot_s=0.25)
    session, _ = await run_on(made, "a", num_tokens=0, tier=Tier.PRIORITY, slo=limits)
    running = first.running["r", 1]
    await first.emit(running, ANSWER[:2])
    for count in (1, 2):
        await first.emit(running, [], num_preemptions=count)
    await asyncio.sleep(0.005)
    assert (session.tokens, session.is_over, session.history.num_preemptions) == (ANSWER[:2], False, 2)
    second.num_preemptions = 3
    await first.stop()
    await finish_whole(made, session)
    (submit,) = second.submits
    assert (submit.attempt, submit.tier, submit.slo, submit.num_preemptions) == (2, Tier.PRIORITY, limits, 2)
    assert submit.token_age_s is not None
    assert submit.token_age_s > 0
    assert session.history.num_preemptions == 3


@with_cluster(lost_after_s=3.0)
async def test_a_worker_that_hangs_is_left_after_the_limit_and_told_what_it_lost_when_it_is_back(made: Cluster) -> None:
    first = await made.add("a", script=None)
    await made.add("b")
    session, taker = await run_on(made, "a", num_tokens=0)
    running = first.running["r", 1]
    await first.emit(running, ANSWER[:2])
    await asyncio.sleep(0.6)
    first.answers = False
    hung_s = made.now_s
    await finish_whole(made, session, taker)
    assert 2.0 < made.now_s - hung_s < 5.5
    await first.emit(running, [7, 7], FinishReason.STOP)
    first.answers = True
    await asyncio.sleep(2.5)
    assert ("r", 1) not in first.running
    assert made.sessions.num_drops == 0


@with_cluster()
async def test_a_worker_that_was_lost_is_used_again_once_it_answers(made: Cluster) -> None:
    first, second = await made.add("a", script=None), await made.add("b")
    session = await made.admit()
    first.answers = False
    await asyncio.sleep(5)
    assert session.worker_id is None or session.ended.is_set()
    await finish(made, session)
    first.script = lambda _: ANSWER
    second.refuse = RefusalReason.FULL
    first.answers = True
    await asyncio.sleep(2)
    _, taker = await made.serve("later")
    assert taker.tokens == ANSWER
    assert first.submits[-1].request_id == "later"


@with_cluster(silence_s=3600.0)
async def test_another_process_of_a_workers_name_has_none_of_its_requests(made: Cluster) -> None:
    first, second = await made.add("a", script=None), await made.add("b")
    first.incarnation = Incarnation(1)
    session = await made.admit()
    await asyncio.sleep(0.6)
    first.incarnation = Incarnation(2)
    first.running.clear()
    assert await finish(made, session, limit_s=2.0) is None
    assert second.submits[0].attempt == 2


@pytest.mark.parametrize("status", [{"phase": WorkerPhase.STOPPED}, {"phase": WorkerPhase.LOADING, "incarnation": 7}])
@with_cluster()
async def test_a_worker_that_says_that_it_stopped_is_left_at_once(made: Cluster, status: dict[str, Any]) -> None:
    first = await made.add("a")
    await made.add("b")
    session, taker = await run_on(made, "a")
    await first.stop()
    await made.view(make_status("a", **status), make_status("b"))
    await asyncio.sleep(0.001)
    assert session.worker_id == "b"
    await finish_whole(made, session, taker)


@with_cluster()
async def test_a_worker_that_only_the_monitor_cannot_hear_keeps_its_requests(made: Cluster) -> None:
    first, second = await made.add("a", script=None), await made.add("b")
    session = await made.admit()
    await asyncio.sleep(0.6)
    await made.view(make_status("a", liveness=Liveness.DEAD), make_status("b"))
    await asyncio.sleep(0.1)
    assert session.worker_id == "a"
    assert session.attempt == 1
    assert not second.submits
    await first.emit(first.running["r", 1], ANSWER, FinishReason.STOP)
    assert await finish(made, session) is None


@with_cluster()
async def test_requests_leave_a_draining_worker_only_if_another_one_takes_them(made: Cluster) -> None:
    first, second = await made.add("a", script=None), await made.add("b")
    session, taker = await run_on(made, "a", num_tokens=0)
    await first.emit(first.running["r", 1], ANSWER[:2])
    second.refuse = RefusalReason.FULL
    await made.view(make_status("a", phase=WorkerPhase.DRAINING), make_status("b"))
    await asyncio.sleep(0.1)
    assert session.worker_id == "a"
    await first.emit(first.running["r", 1], ANSWER[2:4])
    await asyncio.sleep(1.0)
    assert taker.tokens == ANSWER[:4]
    second.refuse = None
    await made.view(make_status("a", phase=WorkerPhase.DRAINING, num_steps=2), make_status("b"))
    await finish_whole(made, session, taker)
    assert [cancel.attempt for cancel in first.cancels] == [1]
    assert second.submits[-1].generated_ids().tolist() == ANSWER[:4]


@pytest.mark.parametrize(
    ("outcome", "num_asked"),
    [(FetchOutcome.LOST, 2), (FetchOutcome.FULL, 2), (FetchOutcome.REFUSED, 2), (FetchOutcome.GONE, 1)],
)
@with_cluster()
async def test_whoever_could_not_fetch_a_request_is_not_the_last_one_asked(
    made: Cluster, outcome: FetchOutcome, num_asked: int
) -> None:
    """Only one that has left has no KV to fetch; a link that was lost was perhaps that worker's own."""
    first, *others = [await made.add(name, script=None) for name in ("a", "b", "c")]
    session, taker = await run_on(made, "a", num_tokens=0)
    await first.emit(first.running["r", 1], ANSWER[:2])
    for each in others:
        each.fetch_outcome = outcome
    status = partial(make_status, model_digest="0" * 64, stage_address="10.0.0.1:1")
    await made.view(status("a", phase=WorkerPhase.DRAINING), status("b"), status("c"))
    await asyncio.sleep(2.0)
    assert [len(each.fetches) for each in others].count(1) == num_asked
    (taken,) = [each for each in others if each.submits]
    await taken.emit(taken.running["r", 2], ANSWER[2:], FinishReason.STOP)
    await finish_whole(made, session, taker)


@with_cluster(queue_limit_s=5.0)
async def test_without_any_worker_a_running_request_waits_and_then_fails_as_no_capacity(made: Cluster) -> None:
    worker = await made.add("a", script=None)
    session = await made.admit()
    await worker.stop()
    await made.view(make_status("a", phase=WorkerPhase.STOPPED))
    began_s = made.now_s
    assert await finish(made, session) is FailureCode.NO_CAPACITY
    assert made.now_s - began_s == pytest.approx(5.0, abs=0.1)


@with_cluster()
async def test_a_running_request_waits_before_the_new_ones_and_goes_on_at_a_worker_that_comes(made: Cluster) -> None:
    first = await made.add("a")
    session, taker = await run_on(made, "a")
    first.refuse = RefusalReason.FULL
    newcomers = [asyncio.create_task(made.serve(f"new-{i}")) for i in range(3)]
    await asyncio.sleep(0.001)
    await first.stop()
    await asyncio.sleep(2)
    second = await made.add("b")
    await finish_whole(made, session, taker)
    assert second.submits[0].request_id == "r"
    assert [taker.tokens for _, taker in await asyncio.gather(*newcomers)] == [ANSWER] * len(newcomers)


@pytest.mark.parametrize("wait_s", [0.0, 0.4, 1.2, 2.0])
@with_cluster()
async def test_a_client_that_leaves_during_a_recovery_leaves_nothing_behind(made: Cluster, wait_s: float) -> None:
    first, second = await made.add("a"), await made.add("b")
    second.answers = False
    session, _ = await run_on(made, "a")
    await first.stop()
    await asyncio.sleep(wait_s)
    made.sessions.release(session)
    second.answers = True
    await asyncio.sleep(6)
    assert not len(made.sessions.table)
    assert not made.sessions.num_queued
    assert not second.running


@with_cluster()
async def test_a_request_that_kills_two_workers_ends_and_the_others_go_on(made: Cluster) -> None:
    """Whoever works on the poison dies before it gives a token; the healthy requests beside it must not be blamed."""
    deaths: list[asyncio.Task[None]] = []

    async def die(worker: FakeWorker) -> None:
        await asyncio.sleep(0.001)
        await worker.emit(next(item for name, item in worker.running.items() if name[0] == "poison"), [])
        await asyncio.sleep(0.001)
        await worker.stop()

    def judge(worker: FakeWorker, submit: Submit) -> None:
        if submit.request_id == "poison":
            deaths.append(asyncio.create_task(die(worker)))

    for name in "abcd":
        worker = await made.add(name)
        worker.judge = partial(judge, worker)
    healthy = [asyncio.create_task(made.serve(f"ok-{i}")) for i in range(8)]
    await asyncio.sleep(0.03)
    session = await made.admit("poison")
    assert await finish(made, session, limit_s=30) is FailureCode.REQUEST_FAILED
    assert len(deaths) == 2
    assert made.sessions.recovery.num_poison == 1
    losses = made.sessions.recovery.by_worker.values()
    assert sum(each.num_failed for each in losses) == 1
    assert all(each.num_lost == each.num_recovered + each.num_failed + each.num_under_way for each in losses)
    assert [taker.tokens for _, taker in await asyncio.gather(*healthy)] == [ANSWER] * len(healthy)


@with_cluster()
async def test_a_request_that_kills_whom_it_is_offered_to_ends_after_two(made: Cluster) -> None:
    """They die before they have answered the submission."""
    workers = [await made.add(name) for name in "abcd"]
    for worker in workers:
        worker.deadly = {"poison"}
    healthy = [asyncio.create_task(made.serve(f"ok-{i}")) for i in range(8)]
    await asyncio.sleep(0.03)
    assert await made.refusal("poison") is FailureCode.REQUEST_FAILED
    assert sum(worker.death is not None for worker in workers) == 2
    assert made.sessions.recovery.num_poison == 1
    assert [taker.tokens for _, taker in await asyncio.gather(*healthy)] == [ANSWER] * len(healthy)


@pytest.mark.parametrize(("incarnation", "loss"), [(1, Loss.UNKNOWN), (2, Loss.RESTARTED)])
@with_cluster()
async def test_a_worker_that_does_not_know_a_request_says_whether_it_is_the_process_that_had_it(
    made: Cluster, incarnation: int, loss: Loss
) -> None:
    """Else a poison request whose worker comes back before anybody misses it would never be blamed."""
    worker = await made.add(script=None)
    worker.incarnation = Incarnation(1)
    session = await made.admit()
    await worker.emit(worker.running["r", 1], [])
    await asyncio.sleep(0.001)
    worker.incarnation = Incarnation(incarnation)
    worker.running.clear()
    made.sessions.replays.ask(session)
    await asyncio.sleep(0.01)
    assert made.sessions.recovery.num_lost == {loss: 1}
    assert session.history.num_blames == (loss is Loss.RESTARTED)


@with_cluster(silence_s=3600.0)
async def test_a_lost_last_message_is_noticed_by_the_numbers_of_the_renewals(made: Cluster) -> None:
    worker = await made.add(script=None)
    session = await made.admit()
    await worker.emit(worker.running["r", 1], [1])
    worker.lose = {1}
    await worker.emit(worker.running["r", 1], [2], FinishReason.STOP)
    assert await finish(made, session, limit_s=2.5) is None
    assert session.tokens == [1, 2]


@with_cluster()
async def test_a_second_dispatcher_takes_a_resumable_request_over(made: Cluster) -> None:
    async with cluster(made.broker, "d1") as other:
        worker = await made.add(script=None)
        await other.view(make_status("w0"))
        mine = await made.admit("same", resumable=True)
        await asyncio.sleep(0.1)
        theirs = await other.sessions.admit(made.request("same", resumable=True))
        assert [submit.attempt for submit in worker.submits] == [1, 2]
        assert worker.submits[1].dispatcher_id == "d1"
        for session, sessions in ((mine, made.sessions), (theirs, other.sessions)):
            sessions.release(session)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("reason", [RefusalReason.CANCELLED, RefusalReason.DUPLICATE])
@with_cluster()
async def test_a_name_that_a_worker_knows_from_before_gets_the_next_number_at_once(
    made: Cluster, reason: RefusalReason
) -> None:
    """The request is sent again by way of a dispatcher that knows nothing of it, and the worker remembers its end."""
    worker = await made.add()
    worker.judge = lambda submit: reason if submit.attempt == 1 else None
    session, taker = await made.serve(resumable=True)
    assert taker.tokens == ANSWER
    assert [submit.attempt for submit in worker.submits] == [1, 2]
    assert session.admitted_s is not None
    assert session.admitted_s - session.request.arrival_s < 0.1


@with_cluster()
async def test_what_a_worker_ended_as_an_orphan_goes_on(made: Cluster) -> None:
    """The dispatcher's process was frozen for so long that the worker gave its request up."""
    worker = await made.add(script=None)
    session = await made.admit()
    await worker.emit(worker.running["r", 1], ANSWER[:4])
    worker.script = lambda _: ANSWER
    await worker.emit(worker.running.pop(("r", 1)), [], FinishReason.CANCELLED)
    await finish_whole(made, session)
    assert [submit.attempt for submit in worker.submits] == [1, 2]


@with_cluster()
async def test_a_request_that_is_asked_again_goes_on_after_the_tokens_that_it_has(made: Cluster) -> None:
    worker = await made.add()
    session, taker = await made.serve(generated=tuple(ANSWER[:7]), num_attempts=3, resumable=True)
    assert taker.tokens == session.tokens == ANSWER
    (submit,) = worker.submits
    assert (submit.attempt, submit.generated_ids().tolist()) == (4, ANSWER[:7])


@with_cluster()
async def test_a_request_whose_time_is_over_at_its_worker_has_timed_out(made: Cluster) -> None:
    worker = await made.add(script=None)
    session = await made.admit(limit_s=10.0)
    await asyncio.sleep(9.99)
    await worker.emit(worker.running["r", 1], [], FinishReason.CANCELLED)
    assert await finish(made, session) is FailureCode.TIMED_OUT


@with_cluster()
async def test_late_tokens_of_an_attempt_that_was_given_up_do_not_count_though_the_same_worker_has_the_next(
    made: Cluster,
) -> None:
    worker = await made.add(script=None)
    session = await made.admit()
    first = worker.running["r", 1]
    await worker.emit(first, ANSWER[:2])
    await worker.emit(first, [], FinishReason.CANCELLED)  # given up: the same worker takes it again
    await asyncio.sleep(0.1)
    assert (session.worker_id, session.attempt) == ("w0", 2)
    await worker.emit(first, [9, 9], FinishReason.STOP, first=2)
    await asyncio.sleep(0.1)
    assert session.tokens == ANSWER[:2]
    await worker.emit(worker.running["r", 2], ANSWER[2:], FinishReason.STOP)
    await finish_whole(made, session)


@with_cluster()
async def test_a_worker_that_a_new_monitor_has_not_heard_yet_is_still_there(made: Cluster) -> None:
    """Its first view names only whom it has heard; if it dies too, that was the last view."""
    first, second = await made.add("a"), await made.add("b")
    await made.view(make_status("a"))
    session, taker = await run_on(made, "a")
    await first.stop()
    await finish_whole(made, session, taker)
    assert [submit.request_id for submit in second.submits] == ["r"]
