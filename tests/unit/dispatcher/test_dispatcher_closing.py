"""Workers that are to be emptied: a dispatcher that knows it asks them last, one that does not loses a round trip."""

from __future__ import annotations

import asyncio

import pytest

from shared.ids import WorkerId
from shared.messages.report import WorkerPhase
from shared.messages.report_parts import MigrationPart
from shared.messages.request import RefusalReason, Submit
from tests.support.fake_worker import FakeWorker, make_status
from tests.support.session_cluster import ANSWER, Cluster, with_cluster

CLOSING = MigrationPart(closing="it is emptied")


def close(worker: FakeWorker, named: str) -> None:
    """Have a worker refuse what does not say that nobody else has room."""

    def judge(submit: Submit) -> RefusalReason | None:
        if submit.reopens:
            worker.judge = None
        return None if submit.reopens else RefusalReason.CLOSING

    worker.judge, worker.open_worker = judge, WorkerId(named)


@with_cluster()
async def test_by_an_old_view_it_costs_one_round_trip_and_whom_it_names_comes_next(made: Cluster) -> None:
    """By load `b` would be next."""
    workers = {name: await made.add(name) for name in "abc"}
    await made.view(*(make_status(name, num_used_blocks=used) for name, used in (("a", 0), ("b", 10), ("c", 20))))
    close(workers["a"], "c")
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert (session.worker_id, session.attempt) == ("c", 2)
    assert [submit.reopens for submit in (*workers["a"].submits, *workers["c"].submits)] == [False, False]
    await asyncio.gather(*(made.serve(f"r{number}") for number in range(4)))
    assert len(workers["a"].submits) == 1, "now it is known"


@with_cluster()
async def test_by_a_new_view_it_is_not_asked_while_others_have_room(made: Cluster) -> None:
    closing, other = await made.add("a"), await made.add("b")
    close(closing, "b")
    await made.view(make_status("a", migration=CLOSING), make_status("b", num_used_blocks=50))
    await asyncio.gather(*(made.serve(f"r{number}") for number in range(3)))
    assert not closing.submits
    await made.view(make_status("a"), make_status("b", num_used_blocks=50))
    closing.judge = None
    await made.serve("later")
    assert len(other.submits) == 3
    assert len(closing.submits) == 1, "it is open again"


@pytest.mark.parametrize("is_known", [True, False])
@with_cluster()
async def test_if_nobody_else_takes_it_the_closing_one_is_opened(made: Cluster, is_known: bool) -> None:
    closing, full = await made.add("a"), await made.add("b")
    close(closing, "b")
    full.refuse = RefusalReason.FULL
    if is_known:
        await made.view(make_status("a", migration=CLOSING), make_status("b"))
    session, taker = await made.serve()
    assert taker.tokens == ANSWER
    assert session.worker_id == "a"
    assert [submit.reopens for submit in closing.submits] == ([True] if is_known else [False, True])
    assert len(full.submits) in {1, 2}


@with_cluster()
async def test_who_names_nobody_that_takes_requests_is_passed_over(made: Cluster) -> None:
    closing, leaving, other = [await made.add(name) for name in "abc"]
    draining = make_status("b", phase=WorkerPhase.DRAINING)
    await made.view(make_status("a"), draining, make_status("c", num_used_blocks=20))
    close(closing, "b")
    session, _ = await made.serve()
    assert session.worker_id == "c"
    assert not leaving.submits
    assert len(other.submits) == 1
