"""Requests that are placed where they fit, by a view that is older than what has come to the worker since."""

from __future__ import annotations

import asyncio

from shared.messages.request import RefusalReason, Submit
from tests.support.fake_worker import FakeWorker, make_status
from tests.support.session_cluster import ANSWER, Cluster, with_cluster


def fill(worker: FakeWorker, num_free_blocks: int = 0) -> None:
    """Have a worker refuse what needs room at once."""
    worker.judge = lambda submit: RefusalReason.NO_ROOM if submit.needs_room else None
    worker.num_free_blocks = num_free_blocks


def asked(worker: FakeWorker) -> list[bool]:
    return [submit.needs_room for submit in worker.submits]


@with_cluster(system="pack")
async def test_who_has_no_room_after_all_costs_one_round_trip_until_the_next_view(made: Cluster) -> None:
    """Nothing is in use: `a` comes first, and what it has free is enough for a short prompt."""
    first, second = await made.add("a"), await made.add("b")
    fill(first, num_free_blocks=2)
    session, taker = await made.serve(num_prompt=40)
    assert taker.tokens == ANSWER
    assert (session.worker_id, asked(first), asked(second)) == ("b", [True], [True])
    await asyncio.gather(*(made.serve(f"r{number}", num_prompt=40) for number in range(3)))
    assert len(first.submits) == 1, "now it is known"
    first.judge = None
    await made.serve("short", num_prompt=20)
    assert len(first.submits) == 2, "what fits there goes there"
    await made.view(make_status("a"), make_status("b"))
    await made.serve("later", num_prompt=40)
    assert len(first.submits) == 3


@with_cluster(system="pack")
async def test_if_nobody_has_room_it_waits_at_the_least_loaded_one(made: Cluster) -> None:
    workers = [await made.add(name) for name in "abc"]
    for worker, num_free_blocks in zip(workers, (0, 1, 0), strict=True):
        fill(worker, num_free_blocks)
    session, taker = await made.serve(num_prompt=40)
    assert taker.tokens == ANSWER
    assert session.worker_id == "b"
    assert [asked(worker) for worker in workers] == [[True], [True, False], [True]]


@with_cluster(system="pack")
async def test_who_is_full_besides_is_asked_no_third_time(made: Cluster) -> None:
    full, other = await made.add("a"), await made.add("b")
    await made.view(make_status("a"), make_status("b", num_used_blocks=999, num_running=1))

    def judge(submit: Submit) -> RefusalReason:
        return RefusalReason.NO_ROOM if submit.needs_room else RefusalReason.FULL

    full.judge, full.num_free_blocks = judge, 900  # by what it says it has room
    session, _ = await made.serve(num_prompt=16 * 28)
    assert session.worker_id == "b"
    assert (asked(full), asked(other)) == ([True, False], [False])


@with_cluster()
async def test_by_load_nobody_needs_room_at_once(made: Cluster) -> None:
    worker = await made.add("a")
    fill(worker)
    await made.serve()
    assert asked(worker) == [False]
