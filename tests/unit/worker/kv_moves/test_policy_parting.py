"""Sequences of a group that dissolves: everybody gets a place, the old ones the best."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.kv_moves.parting import share_out


@pytest.mark.parametrize("seed", range(50))
def test_each_goes_to_one_member_and_no_member_is_fuller_than_need_be(seed: int) -> None:
    """Who has a member keeps it, whoever comes and goes meanwhile: its KV was copied there."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(60)[: int(rng.integers(0, 60))].tolist()
    sizes = rng.integers(1, 40, len(names)).tolist()
    num_members, capacity = int(rng.integers(1, 6)), int(rng.integers(1, 400))
    shares = share_out(names, sizes, num_members, capacity)
    size_of = dict(zip(names, sizes, strict=True))
    loads = [sum(size_of[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0), "the fullest got its last row when it was the emptiest"
    assert names[:1] == shares[0][:1], "the oldest goes on at the leader"
    fixed = {name: member for member, share in enumerate(shares) for name in share if rng.random() < 0.5}
    left = [name for name in names if rng.random() < 0.7]
    again = share_out(left, [size_of[name] for name in left], num_members, capacity, fixed)
    assert all(name in again[member] for name, member in fixed.items() if name in left)
    for told, among in ((shares, names), (again, left)):
        assert sorted(name for share in told for name in share) == sorted(among)
        assert all(share == [name for name in among if name in share] for share in told), "in the order of age"
