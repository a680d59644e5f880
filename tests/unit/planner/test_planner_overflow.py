"""Who is asked about waiting requests, and what goes where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.planner.policy.overflow import MAX_SOURCES, find_overflow, plan_moves
from shared.api_keys import Tier
from shared.ids import RequestId, WorkerId
from shared.messages.queue import QueuedPart
from shared.messages.report import BestEffortPart, ClusterView, Liveness, WorkerPhase, WorkerStatus
from tests.support.drop_builders import make_elastic
from tests.support.kinds import some
from tests.support.statuses import make_status, make_view


def worker(name: str, *, used: int = 0, waits: int = 0, **fields: Any) -> WorkerStatus:
    """100 blocks of 16 tokens; who waits needs 5 each."""
    common: dict[str, Any] = {
        "num_blocks": 100,
        "num_used_blocks": used,
        "num_demanded_blocks": 5 * waits,
        "num_queued_for_memory": waits,
        "num_waiting": waits,
        "block_size": 16,
        "elastic": make_elastic(),
        "model": "m",
    }
    return make_status(name, **(common | fields))


def queue(name: str, count: int, num_blocks: int = 5) -> tuple[QueuedPart, ...]:
    return tuple(
        QueuedPart(
            request_id=RequestId(f"{name}-{i}"),
            attempt=1,
            age_s=9.0 - i,
            num_blocks=num_blocks,
        )
        for i in range(count)
    )


def moves_of(found: ClusterView, queues: dict[str, tuple[QueuedPart, ...]], batch: int = 64) -> list[tuple[str, str]]:
    overflow = some(find_overflow(found))
    by_name = {WorkerId(name): parts for name, parts in queues.items()}
    return [(str(move.request_id), move.target) for move in plan_moves(overflow, by_name, batch)]


def test_what_waits_for_memory_goes_to_who_has_some_and_no_further_than_that() -> None:
    crowd = make_view(worker("a", used=98, waits=4), worker("b", used=88, num_running=2))
    assert moves_of(crowd, {"a": queue("a", 4)}) == [("a-0", "b"), ("a-1", "b")], "10 blocks beside one for each"


def test_who_keeps_a_queue_of_its_own_is_offered_what_is_left() -> None:
    crowd = make_view(
        worker("a", used=100, waits=3), worker("b", used=50, waits=0, num_demanded_blocks=45, num_waiting=9)
    )
    assert moves_of(crowd, {"a": queue("a", 3)}) == [("a-0", "b")]


def test_a_group_takes_as_many_as_its_workers_together() -> None:
    crowd = make_view(
        worker("a", used=100, waits=9),
        worker("b", group="b", num_stages=2, num_running=7),
        worker("c", group="b", stage=1, num_stages=2, num_blocks=0),
    )
    assert len(moves_of(crowd, {"a": queue("a", 9)}, batch=5)) == 3


@pytest.mark.parametrize(
    "other",
    [
        worker("b", used=100),
        worker("b", used=60, num_running=40),
        worker("b", phase=WorkerPhase.DRAINING),
        worker("b", liveness=Liveness.SUSPECT),
        worker("b", group="x", stage=1, num_stages=2),
        worker("b", model="another"),
    ],
    ids=["full", "busy", "draining", "suspect", "member", "model"],
)
def test_nobody_is_asked_for_the_sake_of_who_takes_nothing(other: WorkerStatus) -> None:
    assert find_overflow(make_view(worker("a", used=100, waits=4), other)) is None


def test_nobody_is_asked_who_is_not_short_or_could_not_let_go() -> None:
    assert find_overflow(make_view(worker("a", used=50, num_waiting=4), worker("b"))) is None
    assert find_overflow(make_view(worker("a", used=100, waits=4, elastic=None), worker("b"))) is None


def test_best_effort_that_gives_way_is_brought_nowhere_and_its_memory_is_room() -> None:
    """The second worker is full of it: 8 sequences, 80 blocks. Where it would stay there is none."""
    part = BestEffortPart(num_running=8, num_used_blocks=80, num_demanded_blocks=9, gives_way=True)
    ours = BestEffortPart(num_waiting=1, max_parked=4, gives_way=True)
    full: dict[str, Any] = {"used": 100, "num_running": 9, "num_demanded_blocks": 9, "num_waiting": 3}
    flex, *others = queue("a", 3)
    line = (flex.model_copy(update={"tier": Tier.FLEX}), *others)
    crowd = make_view(worker("a", used=100, waits=3, best_effort=ours), worker("b", best_effort=part, **full))
    assert moves_of(crowd, {"a": line}) == [("a-1", "b"), ("a-2", "b")]
    stays = part.model_copy(update={"gives_way": False})
    assert find_overflow(make_view(crowd.workers[0], worker("b", best_effort=stays, **full))) is None
    by_arrival = make_view(worker("a", used=100, waits=3), worker("b"))
    assert ("a-0", "b") in moves_of(by_arrival, {"a": line}), "it is in the way there"


def test_the_longest_queues_are_asked_first() -> None:
    crowd = [worker(f"w{i:03}", used=100, waits=i) for i in range(1, MAX_SOURCES + 9)]
    overflow = some(find_overflow(make_view(*crowd, worker("free"))))
    waits = [report.num_queued_for_memory for report in overflow.short]
    assert waits == sorted(waits, reverse=True)
    assert (len(waits), waits[0]) == (MAX_SOURCES, MAX_SOURCES + 8)


def test_who_does_not_answer_loses_nothing() -> None:
    crowd = make_view(worker("a", used=100, waits=4), worker("b", used=100, waits=2), worker("c"))
    assert {name[0] for name, _ in moves_of(crowd, {"b": queue("b", 2)})} == {"b"}


@pytest.mark.parametrize("seed", range(30))
def test_nobody_gets_more_than_it_has_room_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    statuses, queues = [], {}
    for i in range(int(random.integers(2, 9))):
        waits, running = int(random.integers(0, 9)), int(random.integers(0, 20))
        used = int(random.integers(running, 100))
        name = f"w{i}"
        statuses.append(worker(name, used=used, waits=waits if used > 80 else 0, num_running=running))
        if used > 80 and waits:
            queues[name] = queue(name, waits, int(random.integers(1, 12)))
    found = make_view(*statuses)
    if find_overflow(found) is None:
        return
    moves = moves_of(found, queues, batch=24)
    assert len({name for name, _ in moves}) == len(moves), "each once"
    sizes = {str(part.request_id): part.num_blocks for parts in queues.values() for part in parts}
    for status in found.workers:
        report = status.report
        taken = [sizes[name] for name, target in moves if target == report.worker_id]
        free = report.num_blocks - report.num_used_blocks - report.num_running - report.num_demanded_blocks
        assert sum(taken) <= max(free, 0)
        assert len(taken) <= max(24 - report.num_running, 0)
