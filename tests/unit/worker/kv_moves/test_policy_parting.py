"""Sequences of a group that dissolves: everybody gets a place, the old ones the best."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.kv_moves.parting import share_out


@pytest.mark.parametrize("seed", range(50))
def test_each_row_goes_to_one_member_and_no_member_is_fuller_than_need_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(60)[: int(rng.integers(0, 60))].tolist()
    sizes = rng.integers(1, 40, len(rows)).tolist()
    num_members, capacity = int(rng.integers(1, 6)), int(rng.integers(1, 400))
    shares = share_out(rows, sizes, num_members, capacity)
    assert sorted(row for share in shares for row in share) == sorted(rows)
    size_of = dict(zip(rows, sizes, strict=True))
    loads = [sum(size_of[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0), "the fullest got its last row when it was the emptiest"
    for share in shares:
        assert share == [row for row in rows if row in set(share)], "in the order of age"


def test_the_oldest_goes_on_at_the_leader() -> None:
    assert share_out([7, 3, 5], [1, 1, 1], 2, 10) == [[7, 5], [3]]


@pytest.mark.parametrize("seed", range(50))
def test_who_has_a_member_keeps_it_and_the_others_go_where_room_is_left(seed: int) -> None:
    """So a sequence whose KV was copied to a member goes on there, whoever comes and goes meanwhile."""
    rng = np.random.default_rng(seed)
    names = [f"s{i}" for i in range(int(rng.integers(1, 30)))]
    sizes = rng.integers(1, 9, len(names)).tolist()
    num_members = int(rng.integers(2, 5))
    first = share_out(names, sizes, num_members, 100)
    fixed = {name: member for member, share in enumerate(first) for name in share if rng.random() < 0.5}
    again = share_out(names, sizes, num_members, 100, fixed)
    assert sorted(name for share in again for name in share) == sorted(names)
    assert all(name in again[member] for name, member in fixed.items())
    assert all(share == sorted(share, key=names.index) for share in again)
    gone = {name: member for name, member in fixed.items() if rng.random() < 0.5}
    left = [(name, size) for name, size in zip(names, sizes, strict=True) if name not in gone]
    alone = share_out([name for name, _ in left], [size for _, size in left], num_members, 100, fixed)
    assert all(name in alone[member] for name, member in fixed.items() if name not in gone)
