"""Requests between admission and end, on the virtual clock, with workers that are full, deaf, lossy or gone."""

from __future__ import annotations

import asyncio

import pytest

from services.dispatcher.session.leases import Loss
from services.dispatcher.session.request import FailureCode, RequestFailedError
from shared.ids import WorkerId
from shared.messages.report import WorkerPhase
from shared.messages.request import RefusalReason
from shared.types import FinishReason
from tests.support.fake_worker import Running, make_status
from tests.support.session_cluster import ANSWER, Cluster, Taker, with_cluster


@with_cluster()
async def test_tokens_reach_the_reader_in_order_and_the_worker_keeps_nothing_to_cancel(made: Cluster) -> None:
    worker = await made.add()
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert session.finish is FinishReason.STOP
    assert made.sessions.outcome(session) is None
    assert worker.cancels == []
    submit = worker.submits[0]
    assert (submit.attempt, submit.prompt_ids().tolist(), submit.generated) == (1, [0, 1, 2, 3, 4], b"")


@with_cluster()
async def test_two_workers_share_the_requests_before_the_next_report(made: Cluster) -> None:
    await made.add("a")
    await made.add("b")
    await asyncio.gather(*(made.serve(f"r{index}") for index in range(6)))
    assert [len(worker.submits) for worker in made.workers.values()] == [3, 3]


@pytest.mark.parametrize("reason", [RefusalReason.FULL, RefusalReason.DRAINING])
@with_cluster()
async def test_a_worker_that_refuses_is_passed_over(made: Cluster, reason: RefusalReason) -> None:
    refusing, willing = await made.add("a"), await made.add("b")
    refusing.refuse = reason
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert (session.worker_id, session.attempt) == ("b", 2)
    assert refusing.cancels == []
    assert willing.submits[0].attempt == 2


@with_cluster()
async def test_workers_that_do_not_answer_are_cancelled_and_passed_over_and_nobody_is_blamed(made: Cluster) -> None:
    first, second, third = [await made.add(name) for name in "abc"]
    first.answers = second.answers = False
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert session.worker_id == "c"
    assert [[cancel.attempt for cancel in worker.cancels] for worker in (first, second, third)] == [[1], [2], []]
    assert [submit.attempt for submit in third.submits] == [3]
    assert made.sessions.recovery.num_poison == 0


@with_cluster()
async def test_what_is_released_before_it_goes_on_elsewhere_goes_on_nowhere(made: Cluster) -> None:
    one, other = await made.add("a", None), await made.add("b", None)
    session = await made.admit()
    here, there = (one, other) if one.submits else (other, one)
    made.sessions.recovery.lost(session, Loss.RELEASED, WorkerId(there.worker_id))
    made.sessions.release(session)
    await asyncio.sleep(1.0)
    assert (len(here.submits), there.submits) == (1, [])
    assert session.worker_id is None
    assert made.sessions.recovery.num_recovered == 0


@with_cluster()
async def test_a_worker_that_vanished_is_passed_over_at_once(made: Cluster) -> None:
    gone = await made.add("a")
    await made.add("b")
    await gone.stop()
    start_s = made.now_s
    session = await made.admit()
    assert made.now_s - start_s < 0.1
    assert session.worker_id == "b"


@pytest.mark.parametrize(
    ("reason", "code"),
    [(RefusalReason.TOO_LONG, FailureCode.TOO_LONG), (RefusalReason.INVALID, FailureCode.INTERNAL)],
)
@with_cluster()
async def test_a_refusal_that_no_worker_can_mend_ends_the_request(
    made: Cluster, reason: RefusalReason, code: FailureCode
) -> None:
    (await made.add()).refuse = reason
    assert await made.refusal() is code


@with_cluster()
async def test_without_a_worker_a_request_is_refused_at_once_and_says_whether_one_is_loading(made: Cluster) -> None:
    assert await made.refusal() is FailureCode.NO_CAPACITY
    await made.view(make_status(phase=WorkerPhase.LOADING, model=""))
    assert await made.refusal() is FailureCode.MODEL_LOADING


@with_cluster(max_queued=2, queue_limit_s=5.0)
async def test_full_workers_make_requests_wait_in_order_and_the_queue_is_bounded(made: Cluster) -> None:
    worker = await made.add()
    worker.refuse = RefusalReason.FULL
    tasks = [asyncio.create_task(made.serve(f"r{index}")) for index in range(2)]
    await asyncio.sleep(0.1)
    assert await made.refusal("late") is FailureCode.QUEUE_FULL
    worker.refuse = None
    await made.view(make_status())  # the sign that there may be room
    results = await asyncio.gather(*tasks)
    assert [taker.tokens for _, taker in results] == [ANSWER, ANSWER]
    accepted = [submit.request_id for submit in worker.submits][-2:]
    assert accepted == ["r0", "r1"]


@with_cluster(max_queued=2, queue_limit_s=5.0)
async def test_a_burst_does_not_exceed_the_queue(made: Cluster) -> None:
    """All fifty ask before the first one has been refused by the worker; two may wait."""
    worker = await made.add(script=None)
    worker.refuse = RefusalReason.FULL
    tasks = [asyncio.create_task(made.admit(f"r{index}")) for index in range(50)]
    await asyncio.sleep(1.0)
    assert made.sessions.num_queued == 2
    refused = [task.exception() for task in tasks if task.done()]
    assert len(refused) == 48
    assert all(isinstance(error, RequestFailedError) and error.code is FailureCode.QUEUE_FULL for error in refused)
    await asyncio.gather(*tasks, return_exceptions=True)


@with_cluster()
async def test_when_one_waiting_request_finds_room_the_next_one_tries_at_once(made: Cluster) -> None:
    worker = await made.add(script=None)
    worker.refuse = RefusalReason.FULL
    tasks = [asyncio.create_task(made.admit(f"r{index}")) for index in range(3)]
    await asyncio.sleep(0.1)
    worker.refuse = None
    await made.view(make_status())
    await asyncio.sleep(0.01)
    assert all(task.done() for task in tasks)


@with_cluster(queue_limit_s=5.0)
async def test_a_request_waits_for_room_no_longer_than_its_limit_and_than_it_may_take(made: Cluster) -> None:
    (await made.add()).refuse = RefusalReason.FULL
    for limit_s, waited_s in ((600.0, 5.0), (0.5, 0.5)):
        start_s = made.now_s
        assert await made.refusal(limit_s=limit_s) is FailureCode.QUEUE_FULL
        assert made.now_s - start_s == pytest.approx(waited_s, abs=0.01)
        assert not len(made.sessions.table)


@with_cluster()
async def test_a_cancelled_admission_leaves_nothing_at_the_worker(made: Cluster) -> None:
    worker = await made.add()
    worker.answers = False
    task = asyncio.create_task(made.admit())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert [(cancel.request_id, cancel.attempt) for cancel in worker.cancels] == [("r", 1)]


@with_cluster()
async def test_releasing_a_running_request_cancels_it_at_once(made: Cluster) -> None:
    worker = await made.add(script=None)
    session = await made.admit()
    made.sessions.release(session)
    await asyncio.sleep(0.001)
    assert worker.running == {}
    made.sessions.release(session)
    await asyncio.sleep(0.01)
    assert len(worker.cancels) == 1


@with_cluster()
async def test_a_reader_that_has_enough_ends_the_request_and_cancels_it(made: Cluster) -> None:
    worker = await made.add()
    session, taker = await made.serve(reader=Taker(enough=3))
    assert taker.tokens == ANSWER[:3]
    assert session.finish is FinishReason.STOP
    await asyncio.sleep(0.01)
    assert len(worker.cancels) == 1


@with_cluster()
async def test_a_lost_message_in_the_middle_is_asked_for_and_nothing_is_missing_or_doubled(made: Cluster) -> None:
    worker = await made.add()
    worker.lose = {3, 4, 11}
    _, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert [replay.first_index for replay in worker.replays] == [3, 11]


@with_cluster(silence_s=2.0)
async def test_a_lost_last_message_is_noticed_by_the_silence(made: Cluster) -> None:
    worker = await made.add()
    worker.lose = {len(ANSWER) - 1}
    start_s = made.now_s
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert session.finish is FinishReason.STOP
    assert made.now_s - start_s < 3.5


@with_cluster(silence_s=60.0)
async def test_a_gap_in_the_workers_numbers_makes_every_silent_request_there_ask(made: Cluster) -> None:
    worker = await made.add(script=None)
    sessions = [await made.admit(f"r{index}") for index in range(2)]
    quiet, lively = (worker.running[f"r{index}", 1] for index in range(2))
    worker.lose = {1}
    await worker.emit(lively, [1])
    await worker.emit(quiet, [7], FinishReason.STOP)
    await worker.emit(lively, [2])
    async with asyncio.timeout(2):
        await sessions[0].ended.wait()
    assert sessions[0].tokens == [7]
    assert made.sessions.table.counters.num_lost_messages == 1


@with_cluster(silence_s=1.0)
async def test_a_request_that_waits_at_its_worker_is_asked_about_ever_more_rarely(made: Cluster) -> None:
    worker = await made.add(script=None)
    session = await made.admit()
    await asyncio.sleep(60.0)
    assert session.is_running
    assert 6 <= len(worker.replays) <= 12


@with_cluster()
async def test_a_worker_that_is_only_missing_from_the_view_keeps_its_requests(made: Cluster) -> None:
    await made.add()
    task = asyncio.create_task(made.serve())
    await asyncio.sleep(0.05)
    await made.view()
    _, taker = await task
    assert taker.tokens == ANSWER


@with_cluster(silence_s=1.0)
async def test_a_broker_that_is_down_for_a_minute_only_pauses_the_stream(made: Cluster) -> None:
    worker = await made.add(script=None)
    session = await made.admit()
    running = worker.running["r", 1]
    await worker.emit(running, [1])
    await asyncio.sleep(0.01)
    made.broker.available = False
    running.tokens += [2, 3]
    running.finish = FinishReason.STOP
    await asyncio.sleep(60)
    assert session.is_running
    made.broker.available = True
    async with asyncio.timeout(3):
        await session.ended.wait()
    assert session.tokens == [1, 2, 3]


@with_cluster()
async def test_late_tokens_of_an_older_attempt_and_of_strangers_are_ignored(made: Cluster) -> None:
    late = await made.add("a", script=None)
    late.answers = False
    await made.add("b")
    task = asyncio.create_task(made.serve())
    await asyncio.sleep(2.05)
    assert late.submits[0].attempt == 1
    from_late = late.running["r", 1] = Running(late.submits[0])
    await late.emit(from_late, [9, 9, 9])
    _, taker = await task
    assert taker.tokens == ANSWER
    assert made.sessions.table.counters.num_ignored >= 1


@with_cluster()
async def test_tokens_from_a_worker_that_does_not_run_the_request_are_ignored(made: Cluster) -> None:
    """As when a worker goes on for the dispatcher's process before, whose handles were the same."""
    await made.add("a", script=None)
    stranger = await made.add("b", script=None)
    await made.view(make_status("a"))
    session = await made.admit()
    assert session.worker_id == "a"
    await stranger.emit(Running(made.workers["a"].submits[0]), [9, 9, 9], FinishReason.STOP)
    await asyncio.sleep(0.01)
    assert session.tokens == []
    assert session.is_running
    assert made.sessions.table.counters.num_ignored == 1


@with_cluster()
async def test_tokens_that_overtake_the_workers_answer_are_not_lost(made: Cluster) -> None:
    worker = await made.add(script=None)
    worker.answers = False
    task = asyncio.create_task(made.admit())
    await asyncio.sleep(0.01)
    running = worker.running["r", 1] = Running(worker.submits[0])
    await worker.emit(running, [5, 6], FinishReason.STOP)
    session = await task
    taker = Taker()
    session.attach(taker, 0.0)
    assert (taker.tokens, taker.finish) == ([5, 6], FinishReason.STOP)


@with_cluster()
async def test_a_reader_with_a_bug_ends_its_own_request_and_no_other(made: Cluster) -> None:
    await made.add()
    (broken, _), (_, taker) = await asyncio.gather(made.serve("bad", Taker(fails_at=0)), made.serve("good"))
    assert made.sessions.outcome(broken) is FailureCode.INTERNAL
    assert taker.tokens == ANSWER


@with_cluster()
async def test_an_end_without_an_answer_is_a_failure(made: Cluster) -> None:
    await made.add(finish=FinishReason.ERROR)
    session, _ = await made.serve()
    assert made.sessions.outcome(session) is FailureCode.REQUEST_FAILED


@with_cluster()
async def test_a_request_past_its_time_limit_ends(made: Cluster) -> None:
    await made.add(script=None)
    session, _ = await made.serve(limit_s=3.0)
    assert made.sessions.outcome(session) is FailureCode.TIMED_OUT
    assert made.now_s == pytest.approx(3.0, abs=0.6)


@with_cluster()
async def test_draining_refuses_new_requests_lets_old_ones_end_and_fails_the_rest_at_the_limit(made: Cluster) -> None:
    worker = await made.add()
    finishing = asyncio.create_task(made.serve("short"))
    await asyncio.sleep(0.05)
    worker.script = None
    stuck = asyncio.create_task(made.serve("stuck"))
    await asyncio.sleep(0.01)
    draining = asyncio.create_task(made.service.drain(10.0))
    await asyncio.sleep(0.01)
    assert await made.refusal("new") is FailureCode.DRAINING
    await draining
    assert made.now_s == pytest.approx(10.06, abs=0.1)
    assert (await finishing)[1].tokens == ANSWER
    assert made.sessions.outcome((await stuck)[0]) is FailureCode.DRAINING
