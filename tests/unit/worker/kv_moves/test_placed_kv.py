"""Places of a worker's blocks: each has one, keeps its id where that is free, and none is given away twice."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.kv_moves.placed_kv import PlacedKv, Places


@pytest.mark.parametrize("seed", range(50))
def test_every_place_is_given_to_one_block_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 12))
    places, taken = Places(size), set[int]()
    for _ in range(60):
        if taken and rng.random() < 0.5:
            gone = rng.permutation(sorted(taken))[: int(rng.integers(1, 4))].tolist()
            places.give_back(gone)
            taken -= set(gone)
            continue
        ids = rng.choice(20, int(rng.integers(1, 6)), replace=False).tolist()
        found = places.take(ids)
        assert len(found) == min(len(ids), size - len(taken)), "as many as there are"
        assert len(set(found)) == len(found)
        assert not taken & set(found)
        assert set(found) <= set(range(size))
        could_stay = {block for block in ids[: len(found)] if block < size and block not in taken}
        assert could_stay == {block for block, place in zip(ids, found, strict=False) if block == place}
        taken |= set(found)


def test_blocks_are_told_by_their_places() -> None:
    share = PlacedKv((b"a", b"b", b"c"), np.array([7, 1, 5], np.int32), np.array([0, 1, 2], np.int32))
    some = share.only([2, 0])
    assert (some.kept.names, some.kept.ids.tolist(), some.ids.tolist()) == ((b"c", b"a"), [2, 0], [5, 7])
    assert len(PlacedKv().kept) == 0
