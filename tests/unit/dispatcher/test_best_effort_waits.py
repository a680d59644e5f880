"""Best effort in a dispatcher: where it waits and for how long, what it is refused for, and whose place it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.limits.lines import WorkerLines
from services.dispatcher.limits.waiting_room import Claimant
from services.dispatcher.policy.placement import Placed, place_least_loaded
from services.dispatcher.session.request import FailureCode
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.report import BestEffortPart
from shared.messages.request import RefusalReason, pack_token_ids
from shared.types import LatencyLimits
from tests.support.fake_worker import make_status
from tests.support.kinds import some
from tests.support.session_cluster import ANSWER, Cluster, with_cluster
from tests.support.statuses import make_view

pytestmark = pytest.mark.virtual_time

W0 = WorkerId("w0")


def state_of(*statuses: Any) -> ClusterState:
    state = ClusterState("tiny", step_limit_s=10.0)
    state.apply(make_view(*statuses), 0.0)
    return state


# --- what placement sees ---------------------------------------------------------------------------------------------

SIZES = st.tuples(*[st.integers(0, 20)] * 6)


@given(SIZES, SIZES)
def test_real_time_work_sees_what_it_would_without_best_effort_that_gives_way(
    others: tuple[int, ...], flex: tuple[int, ...]
) -> None:
    """And best effort sees all that is there; of those that wait each sees its own."""
    names = ("num_used_blocks", "num_demanded_blocks", "num_uncomputed_blocks")
    counts = ("num_running", "num_waiting", "num_preempted")
    # asked for and to be computed are of the same sequences, so the larger of the two is of the same kind for both
    more = max(others[1] - others[2], 0), max(others[2] - others[1], 0)
    flex = (flex[0], flex[1] + more[0] * 20, flex[1] + more[1] * 20, *flex[3:])
    said: dict[str, Any] = {name: a + b for name, a, b in zip((*names, *counts), others, flex, strict=True)}
    part = BestEffortPart(**dict(zip((*names, *counts), flex, strict=True)), max_parked=9, gives_way=True)
    common: dict[str, Any] = {"token_s": 0.01, "max_waiting": 40}
    mixed = state_of(make_status(best_effort=part, **said, **common))
    fields: dict[str, Any] = dict(zip((*names, *counts), others, strict=True))
    alone = state_of(make_status(**fields, **common))
    (seen,), (expected,) = mixed.loads(), alone.loads()
    assert seen == expected
    (every,) = mixed.loads(Tier.FLEX)
    assert every.num_sequences == sum(said[name] for name in counts)
    assert (every.num_waiting, every.max_waiting) == (flex[4] + flex[5], 9)
    assert every.num_demanded_blocks == said["num_used_blocks"] + max(said[name] for name in names[1:])


def test_a_chat_goes_where_other_chats_are_fewer_and_a_document_where_all_is_less() -> None:
    """The first worker is full of documents, the second half full of chats."""
    flex = BestEffortPart(num_running=9, num_used_blocks=900, max_parked=9, gives_way=True)
    documents = make_status("a", num_running=10, num_used_blocks=950, best_effort=flex)
    chats = make_status("b", num_running=20, num_used_blocks=500)
    state = state_of(documents, chats)
    assert some(place_least_loaded(state.loads(), 10)).worker_id == "a"
    assert some(place_least_loaded(state.loads(Tier.FLEX), 10)).worker_id == "b"
    stays = flex.model_copy(update={"gives_way": False})
    state = state_of(
        documents.model_copy(update={"report": documents.report.model_copy(update={"best_effort": stays})}), chats
    )
    assert some(place_least_loaded(state.loads(), 10)).worker_id == "b", "where they do not give way they count"


def test_own_submissions_count_for_those_who_mind_them() -> None:
    """48 tokens are 3 blocks; a real-time request does not mind best effort, which gives way."""
    state = state_of(make_status(max_waiting=5, best_effort=BestEffortPart(max_parked=7, gives_way=True)))
    sent = state.submitted(Placed(W0, ""), 48, 0, 1.0, tier=Tier.FLEX)
    state.submitted(Placed(W0, ""), 16, 0, 1.0)
    (real_time,), (flex,) = state.loads(), state.loads(Tier.FLEX)
    assert (real_time.num_sequences, real_time.num_waiting, real_time.num_demanded_blocks) == (1, 1, 1)
    assert (flex.num_sequences, flex.num_waiting, flex.num_demanded_blocks) == (2, 1, 4)
    state.began(W0, 1.5, Tier.FLEX)
    assert [load.num_waiting for load in (*state.loads(), *state.loads(Tier.FLEX))] == [1, 0]
    state.ended(sent, 0, 2.0)
    assert state.loads(Tier.FLEX)[0].num_sequences == 1


@pytest.mark.parametrize("gives_way", [True, False])
def test_where_it_would_not_give_way_none_comes_while_somebody_else_waits(gives_way: bool) -> None:
    """It would be served before the next of the others."""
    part = BestEffortPart(num_running=3, max_parked=7, gives_way=gives_way)
    waiting, others = state_of(make_status(num_waiting=1, best_effort=part)), state_of(make_status(best_effort=part))
    assert WorkerLines(others).crowded(Claimant(Tier.FLEX)) == set()
    sent = others.submitted(Placed(W0, ""), 99, 0, 0.5, tier=Tier.FLEX)
    others.ended(sent, 9, 0.9)
    others.submitted(Placed(W0, ""), 16, 0, 1.0)
    for state in (waiting, others):
        crowded = set() if gives_way else {W0}
        assert WorkerLines(state).crowded(Claimant(Tier.FLEX)) == crowded
        assert WorkerLines(state).crowded(Claimant(Tier.FLEX, has_output=True)) == crowded
        assert WorkerLines(state).crowded(Claimant()) == set()
    others.began(W0, 2.0)
    assert WorkerLines(others).crowded(Claimant(Tier.FLEX)) == set()


# --- the queue -------------------------------------------------------------------------------------------------------


async def refuse_all(made: Cluster, **fields: Any) -> None:
    worker = await made.add()
    worker.judge = lambda _submit: RefusalReason.FULL
    await made.view(make_status(**fields))


@with_cluster(max_requests=4, max_queued=2, max_queued_flex=5, queue_limit_s=3.0)
async def test_a_full_queue_of_best_effort_refuses_best_effort_alone(made: Cluster) -> None:
    """Five wait, longer than three seconds, and are more than `max_requests`; a tenant may have two waiting besides."""
    await refuse_all(made)
    documents = [asyncio.create_task(made.refusal(f"d{i}", tier=Tier.FLEX, limit_s=60.0)) for i in range(5)]
    await asyncio.sleep(10.0)
    assert made.sessions.num_queued == 5
    assert await made.refusal("d5", tier=Tier.FLEX) is FailureCode.RESOURCE_UNAVAILABLE
    chats = [asyncio.create_task(made.refusal(f"c{i}", max_tenant_queued=2)) for i in range(2)]
    await asyncio.sleep(1.0)
    assert made.sessions.num_queued == 7
    begin_s = made.now_s
    assert {await chat for chat in chats} == {FailureCode.QUEUE_FULL}
    assert made.now_s - begin_s == pytest.approx(2.0, abs=0.01), "its own time limit of 3 s"
    assert {await document for document in documents} == {FailureCode.RESOURCE_UNAVAILABLE}
    assert made.now_s == pytest.approx(60.0, abs=0.1), "as long as the request may take"


@with_cluster(max_queued_flex=5, flex_memory=1024 * 1024)
async def test_prompts_of_best_effort_that_waits_have_a_limit(made: Cluster) -> None:
    await refuse_all(made, max_model_len=0)
    large = pack_token_ids([7] * 262_144)
    first = asyncio.create_task(made.refusal("d0", tier=Tier.FLEX, limit_s=9.0, prompt=large))
    await asyncio.sleep(1.0)
    assert made.sessions.num_queued == 1
    assert await made.refusal("d1", tier=Tier.FLEX) is FailureCode.RESOURCE_UNAVAILABLE
    assert await first is FailureCode.RESOURCE_UNAVAILABLE


@with_cluster()
async def test_while_a_chat_waits_no_document_is_sent_and_then_as_many_as_may_be(made: Cluster) -> None:
    worker = await made.add(script=None)
    part = BestEffortPart(max_parked=8, gives_way=True)
    worker.judge = lambda submit: None if submit.tier is Tier.FLEX else RefusalReason.FULL
    await made.view(make_status(best_effort=part))
    chat = asyncio.create_task(made.admit("c"))
    await asyncio.sleep(0.1)
    documents = [asyncio.create_task(made.admit(f"d{i}", tier=Tier.FLEX)) for i in range(20)]
    await asyncio.sleep(0.1)
    assert [submit.tier for submit in worker.submits if submit.tier is Tier.FLEX] == []
    worker.judge = lambda _submit: None
    await made.view(make_status(best_effort=part))
    await asyncio.sleep(0.1)
    assert chat.done()
    sent = [submit for submit in worker.submits if submit.tier is Tier.FLEX]
    assert len(sent) == 4, "one tenant's share of the places, so that another one finds some"
    for task in documents:
        task.cancel()
    await asyncio.gather(*documents, return_exceptions=True)


@with_cluster()
async def test_a_document_whose_worker_dies_waits_behind_chats_and_goes_on_as_one(made: Cluster) -> None:
    """With the tokens that it has; the other worker has no place for best effort, but for chats."""
    first, limits = await made.add("a", script=None), LatencyLimits(ttft_s=500.0)
    session = await made.admit("d", tier=Tier.FLEX, slo=limits, qoe=None)
    await first.emit(first.running["d", 1], ANSWER[:2])
    second = await made.add("b")
    full = BestEffortPart(num_waiting=3, max_parked=3, gives_way=True)
    await made.view(make_status("a", num_running=1), make_status("b", best_effort=full))
    await first.stop()
    await asyncio.sleep(5.0)
    assert (session.tokens, made.sessions.num_queued) == (ANSWER[:2], 1)
    await made.admit("c")
    assert made.sessions.num_queued == 1
    await made.view(make_status("b", best_effort=BestEffortPart(max_parked=3, gives_way=True)))
    await session.ended.wait()
    assert session.tokens == ANSWER
    chat, document = second.submits
    assert (chat.request_id, chat.tier) == ("c", Tier.DEFAULT)
    assert (document.attempt, document.tier, document.slo) == (2, Tier.FLEX, limits)
    assert document.generated_ids().tolist() == ANSWER[:2]
