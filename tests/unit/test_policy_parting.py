"""Sequences of a group that dissolves: everybody gets a place, the old ones the best."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.policy.parting import share_out


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
