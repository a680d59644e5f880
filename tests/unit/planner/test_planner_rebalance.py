"""Re-balancing: only what overflows moves, urgent requests first, and nobody takes more than it can."""

from __future__ import annotations

import numpy as np
import pytest

from services.planner.policy.rebalance import GroupLoad, QueuedRequest, Requeue, rebalance
from shared.ids import RequestId


def queue(*names: str, priority: int = 0, tokens: int = 1) -> tuple[QueuedRequest, ...]:
    """The first is the oldest."""
    return tuple(QueuedRequest(RequestId(name), priority, 9.0 - age, tokens) for age, name in enumerate(names))


def as_text(moves: tuple[Requeue, ...]) -> list[str]:
    return [f"{move.request_id}: {move.source} > {move.target}" for move in moves]


def test_the_example_of_the_module() -> None:
    groups = [
        GroupLoad("A", 4, 3, 99, queue("a", "b", "c")),
        GroupLoad("B", 8, 5, 99, queue("d")),
        GroupLoad("C", 4, 4, 99, queue("e")),
    ]
    assert as_text(rebalance(groups)) == ["e: C > B", "b: A > B"]  # e is as old as a, and older than b


def test_urgent_requests_stay_and_are_placed_first() -> None:
    crowded = GroupLoad("A", 4, 3, 99, (*queue("old", "older"), *queue("urgent", "second", priority=1)))
    spare = GroupLoad("B", 4, 2, 99, ())
    assert as_text(rebalance([crowded, spare])) == ["second: A > B", "old: A > B"]


def test_requests_go_to_the_least_full_group() -> None:
    """Full to 2/8, 2/4 and 5/10: B takes two before it is as full as A and C, whose names decide."""
    groups = [
        GroupLoad("X", 4, 4, 99, queue("a", "b", "c", "d", "e")),
        GroupLoad("A", 4, 2, 99, ()),
        GroupLoad("B", 8, 2, 99, ()),
        GroupLoad("C", 10, 5, 99, ()),
    ]
    targets = [move.target for move in rebalance(groups)]
    assert targets == ["B", "B", "A", "B", "C"]


def test_a_request_that_needs_too_much_kv_waits_and_lets_others_pass() -> None:
    groups = [
        GroupLoad("A", 4, 4, 99, (*queue("large", tokens=50), *queue("small", priority=-1, tokens=5))),
        GroupLoad("B", 4, 0, 20, ()),
    ]
    assert as_text(rebalance(groups)) == ["small: A > B"]
    full = GroupLoad("A", 8, 0, 10, (*queue("large", tokens=50), *queue("small", priority=-1, tokens=5)))
    assert as_text(rebalance([full, groups[1]])) == ["small: A > B"]


@pytest.mark.parametrize("seed", range(60))
def test_laws_of_every_rebalancing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(int(rng.integers(1, 7))):
        requests = tuple(
            QueuedRequest(
                RequestId(f"{number}-{i}"), int(rng.integers(3)), float(rng.integers(5)), int(rng.integers(1, 9))
            )
            for i in range(int(rng.integers(0, 12)))
        )
        groups.append(
            GroupLoad(
                f"g{number}", int(rng.choice([4, 8, 10])), int(rng.integers(0, 9)), int(rng.integers(5, 60)), requests
            )
        )
    moves = rebalance(groups)
    assert moves == rebalance(groups[::-1])
    by_id = {request.request_id: request for group in groups for request in group.queued}
    moved = [move.request_id for move in moves]
    assert len(moved) == len(set(moved))
    room: dict[str, list[int]] = {}
    placed: list[QueuedRequest] = []
    stuck: list[QueuedRequest] = []
    for group in groups:
        taken, free = group.num_running, group.free_tokens
        urgent = sorted(group.queued, key=lambda each: (-each.priority, -each.age_s, each.request_id))
        is_open = True
        for request in urgent:
            is_open = is_open and taken < group.max_batch and request.num_tokens <= free
            if is_open:
                taken, free = taken + 1, free - request.num_tokens
                assert request.request_id not in moved  # what fits stays
            elif request.request_id not in moved:
                stuck.append(request)
        for move in moves:
            if move.target == group.group_id:
                assert move.source != group.group_id
                assert is_open  # who cannot take its own takes no other's
                taken, free = taken + 1, free - by_id[move.request_id].num_tokens
                placed.append(by_id[move.request_id])
                assert taken <= group.max_batch
                assert free >= 0
        room[group.group_id] = [group.max_batch - taken if is_open else 0, free]
    for request in stuck:
        assert not any(places > 0 and free >= request.num_tokens for places, free in room.values())
    order = [(-by_id[name].priority, -by_id[name].age_s) for name in moved]
    assert order == sorted(order)
    for request in stuck:  # nobody of less urgency has a place that this one could have had
        assert not any(
            other.num_tokens >= request.num_tokens and (other.priority, other.age_s) < (request.priority, request.age_s)
            for other in placed
        )
