"""Who moves first, in what pieces, and what may be admitted: against literal models and exhaustive small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.exchange import (
    Ongoing,
    StageRoom,
    Waiting,
    choose_victim,
    chunk_blocks,
    exchange_order,
    grants,
    max_chunk_blocks,
    may_admit,
)
from shared.ids import RequestId

SLACKS = st.floats(-100, 100)


def ongoing(name: int, slack_s: float, num_bytes: int = 10) -> Ongoing:
    return Ongoing(RequestId(f"r{name}"), slack_s, num_bytes)


@given(st.lists(st.tuples(SLACKS, st.integers(0, 3)), max_size=20), st.randoms(use_true_random=False))
def test_the_thinnest_slack_moves_first_whatever_the_order_of_the_input(
    facts: list[tuple[float, int]],
    random: np.random.Generator,
) -> None:
    requests = [ongoing(i, *fact) for i, fact in enumerate(facts)]
    order = exchange_order(requests)
    assert sorted(order, key=id) == sorted(requests, key=id)
    assert all(
        (a.slack_s, a.num_bytes, a.request_id) < (b.slack_s, b.num_bytes, b.request_id)
        for a, b in itertools.pairwise(order)
    )
    shuffled = list(requests)
    random.shuffle(shuffled)
    assert exchange_order(shuffled) == order


def test_order_by_slack_stalls_the_fewest_readers() -> None:
    """Of all orders of 5 transfers with equal times, earliest slack first has the least largest lateness (Jackson)."""
    random = np.random.default_rng(0)
    for _ in range(30):
        requests = [ongoing(i, float(slack), 1) for i, slack in enumerate(random.integers(0, 7, 5))]

        def worst(order: tuple[Ongoing, ...] | list[Ongoing]) -> float:
            return max(i + 1 - request.slack_s for i, request in enumerate(order))

        assert worst(exchange_order(requests)) == min(map(worst, itertools.permutations(requests)))


@given(st.floats(1e-4, 1.0), st.floats(1e6, 1e11), st.integers(1, 2**24), st.integers(1, 32))
def test_a_chunk_fits_the_interval_unless_a_piece_does_not(
    interval_s: float, rate: float, block_bytes: int, multiple: int
) -> None:
    count = chunk_blocks(interval_s, rate, block_bytes, multiple=multiple)
    assert count % multiple == 0
    assert count >= multiple
    time_s = count * block_bytes / rate
    assert time_s <= interval_s or count == multiple
    assert (count + multiple) * block_bytes / rate > interval_s * (1 - 1e-9)


def test_papers_chunk() -> None:
    """Qwen2.5-14B: 192 MB per 1 K tokens (v1, section 4.2), half the layers, blocks of 16 tokens; 25 GB/s; 60 ms."""
    block_bytes = 192 * 2**20 // 64 // 2
    assert chunk_blocks(0.060, 25e9, block_bytes) == 953


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 10))
def test_with_the_largest_chunk_some_stage_can_always_take_one(num_stages: int, total: int, seed: int) -> None:
    size = max_chunk_blocks(total, num_stages)
    for _ in range(20):
        cuts = np.sort(np.random.default_rng(seed).integers(0, total + 1, num_stages - 1))
        free = np.diff(np.concatenate([[0], cuts, [total]]))
        assert free.max() >= min(size, total)
    even = [total // num_stages + (i < total % num_stages) for i in range(num_stages)]
    assert max(even) < size + 1, "a larger one would not always fit"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4), st.integers(0, 20))
def test_admission_leaves_every_stage_the_room_of_what_arrives(facts: list[tuple[int, int]], num_blocks: int) -> None:
    rooms = [StageRoom(*fact) for fact in facts]
    if may_admit(rooms, num_blocks):
        after = [StageRoom(room.free_blocks - num_blocks, room.arriving_blocks) for room in rooms]
        assert may_admit(after, 0)
    else:
        assert any(room.free_blocks - room.arriving_blocks < num_blocks for room in rooms)


@given(
    st.integers(0, 60),
    st.lists(st.tuples(SLACKS, st.integers(1, 20), st.integers(0, 3)), max_size=8),
    st.integers(1, 6),
)
def test_grants_are_whole_chunks_within_what_is_free_and_waste_no_chunk(
    free: int, facts: list[tuple[float, int, int]], size: int
) -> None:
    waiting = [Waiting(slack_s, wanted, chunks * size, size) for slack_s, wanted, chunks in facts]
    shares = grants(free, waiting)
    left = free - sum(shares)
    assert left >= 0
    for share, move in zip(shares, waiting, strict=True):
        assert share == move.num_wanted or (share % size == 0 and share < move.num_wanted)
        missing = min(move.num_wanted - share, size)
        assert not missing or left < missing, "a chunk would have fitted"


def test_a_grant_first_fills_a_chunk_that_is_held_in_part() -> None:
    assert grants(10, [Waiting(0.0, 9, 5, 4)]) == [9]
    assert grants(8, [Waiting(0.0, 9, 5, 4)]) == [7]
    assert grants(2, [Waiting(0.0, 9, 5, 4)]) == [0]


def test_the_victim_can_wait_the_longest() -> None:
    requests = [ongoing(0, 1.0), ongoing(1, 9.0, 20), ongoing(2, 9.0, 10), ongoing(3, -4.0)]
    assert choose_victim(requests) == requests[2]
    assert choose_victim([]) is None


def test_facts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="without slack"):
        exchange_order([ongoing(0, float("nan"))])
    with pytest.raises(ValueError, match="counts"):
        StageRoom(-1, 0)
    with pytest.raises(ValueError, match="a chunk needs"):
        chunk_blocks(0.0, 1e9, 1)
    with pytest.raises(ValueError, match="of 0 stages"):
        max_chunk_blocks(3, 0)
