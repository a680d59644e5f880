"""Sessions that belong together, and what comes with their tokens: placed beside the first, kept through any loss."""

from __future__ import annotations

import asyncio

import pytest

from services.dispatcher.session.request import FailureCode, RequestFailedError
from shared.messages.request import RefusalReason
from shared.types import SamplingParams
from tests.support.fake_worker import make_status, played_logprob
from tests.support.session_cluster import ANSWER, Cluster, with_cluster

WITH_LOGPROBS = SamplingParams(max_tokens=50, logprobs=1)


@with_cluster()
async def test_a_sibling_goes_to_its_parents_worker_and_not_to_the_least_loaded_one(made: Cluster) -> None:
    first = await made.add("a", script=None)
    await made.add("b", script=None)
    parent, child = await made.siblings(made.request("r"), made.request("r-1", cache_salt="s"))
    await made.view(make_status("a", num_used_blocks=900), make_status("b"))
    await made.sessions.place(child, parent)
    assert parent.worker_id == child.worker_id == "a"
    assert [(submit.fork_of, submit.cache_salt) for submit in first.submits] == [(None, ""), ("r", "s")]


@pytest.mark.parametrize("reason", [RefusalReason.FULL, RefusalReason.DRAINING])
@with_cluster()
async def test_a_sibling_that_is_refused_there_goes_elsewhere_as_a_request_of_its_own(
    made: Cluster, reason: RefusalReason
) -> None:
    first = await made.add("a", script=None)
    second = await made.add("b", script=None)
    parent, child = await made.siblings(made.request("r"), made.request("r-1"))
    first.refuse = reason
    await made.sessions.place(child, parent)
    assert child.worker_id == "b"
    assert [(submit.request_id, submit.attempt) for submit in second.submits] == [("r-1", 2)]
    assert len(first.submits) == 2


@with_cluster()
async def test_a_sibling_whose_parent_was_lost_goes_where_there_is_room(made: Cluster) -> None:
    await made.add("a", script=None)
    second = await made.add("b", script=None)
    parent, child = await made.siblings(made.request("r"), made.request("r-1"))
    parent.fail(FailureCode.NO_CAPACITY)
    made.workers["a"].refuse = RefusalReason.FULL
    await made.sessions.place(child, parent)
    assert [submit.request_id for submit in second.submits] == ["r-1"]


@with_cluster(queue_limit_s=1.0)
async def test_a_sibling_that_cannot_be_placed_leaves_nothing_and_its_parent_runs_on(made: Cluster) -> None:
    worker = await made.add(script=None)
    parent, child = await made.siblings(made.request("r"), made.request("r-1"))
    worker.refuse = RefusalReason.FULL
    with pytest.raises(RequestFailedError) as refused:
        await made.sessions.place(child, parent)
    assert refused.value.code is FailureCode.QUEUE_FULL
    assert list(made.sessions.table) == [parent]
    assert parent.is_running


@with_cluster()
async def test_a_session_that_failed_before_its_turn_reaches_no_worker(made: Cluster) -> None:
    worker = await made.add(script=None)
    (session,) = made.sessions.open([made.request()])
    made.sessions.fail_all(FailureCode.DRAINING)
    with pytest.raises(RequestFailedError) as failed:
        await made.sessions.place(session)
    assert failed.value.code is FailureCode.DRAINING
    assert worker.submits == []


@with_cluster(max_requests=4)
async def test_sessions_are_opened_all_together_or_not_at_all(made: Cluster) -> None:
    await made.add(script=None)
    requests = [made.request(f"r-{index}") for index in range(5)]
    with pytest.raises(RequestFailedError):
        made.sessions.open(requests)
    assert len(made.sessions.table) == 0
    sessions = made.sessions.open(requests[:4])
    with pytest.raises(RequestFailedError):
        made.sessions.check_admission()
    for session in sessions:
        made.sessions.release(session)


@with_cluster()
async def test_a_sibling_does_not_count_the_prompt_again_at_its_worker(made: Cluster) -> None:
    """Prompts of 160 tokens are 10 blocks; two choices that share one ask for 10, and none once both have left."""
    await made.add(script=None)
    await asyncio.sleep(0.01)
    parent, child = await made.siblings(made.request("r", 160), made.request("r-1", 160))
    await made.sessions.place(child, parent)
    (load,) = made.sessions.cluster.loads()
    assert (load.num_demanded_blocks, load.num_sequences) == (10, 2)
    for session in (parent, child):
        made.sessions.release(session)
    (load,) = made.sessions.cluster.loads()
    assert (load.num_demanded_blocks, load.num_sequences) == (0, 0)


@with_cluster()
async def test_log_probabilities_and_cached_tokens_come_with_the_tokens(made: Cluster) -> None:
    worker = await made.add()
    worker.cached_tokens = 4
    session, _ = await made.serve(sampling=WITH_LOGPROBS)
    assert session.cached_tokens == 4
    assert session.logprobs == [played_logprob(index, token, 1) for index, token in enumerate(ANSWER)]
    session, _ = await made.serve("plain")
    assert session.logprobs is None
    assert session.cached_tokens == 4


@with_cluster()
async def test_tokens_that_come_by_replay_without_their_numbers_are_kept_all_the_same(made: Cluster) -> None:
    """The message with token 3 is lost; a replay brings tokens 3 and 4, and has no numbers for them."""
    worker = await made.add()
    worker.lose = {3}
    session, taker = await made.serve(sampling=WITH_LOGPROBS)
    assert taker.tokens == ANSWER
    assert session.logprobs is not None
    known = [played_logprob(index, token, 1) for index, token in enumerate(ANSWER)]
    assert [index for index, found in enumerate(session.logprobs) if found != known[index]] == [3, 4]
    assert session.logprobs[3:5] == [None, None]
