"""Blocks of host memory against sets of ids: none is given out twice, and what is found is what was named."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.blocks.host_blocks import HostBlocks
from services.worker.contract.arrays import I32


class Model:
    """Host blocks as sets of ids: what rows refer to, what copies pin, and what is known to be where."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.pool = HostBlocks(12)
        self.pool.on_lost = self.lose
        self.contents: dict[int, bytes] = {}
        self.kept: dict[int, set[int]] = {}
        self.copies: dict[int, tuple[set[int], dict[bytes, int]]] = {}

    @property
    def in_use(self) -> set[int]:
        return {block for ids in (*self.kept.values(), *(ids for ids, _ in self.copies.values())) for block in ids}

    def lose(self, ids: I32) -> None:
        for block in ids.tolist():
            self.contents.pop(block, None)

    def keep(self, row: int) -> None:
        count = int(self.random.integers(1, 5))
        if count > self.pool.num_free:
            return
        chosen = self.random.choice(8, size=count - row % 2, replace=False)
        names = [b"%d" % name for name in sorted(chosen.tolist())]
        in_use, known = self.in_use, set(self.contents.values())
        ids, is_new = self.pool.keep(row, names, count)
        self.kept[row], new = set(ids.tolist()), ids[is_new].tolist()
        assert len(self.kept[row]) == count
        assert not in_use & set(new), "a block is given out twice"
        assert [name in known for name in names] == (~is_new)[: len(names)].tolist()
        assert [self.contents[block] for block in ids[~is_new].tolist()] == [name for name in names if name in known]
        if new:
            self.pool.pin(ids[is_new], row)
            self.copies[row] = set(new), dict(zip((name for name in names if name not in known), new, strict=False))

    def end_copy(self) -> None:
        ended = int(self.random.choice(sorted(self.copies)))
        _, filled = self.copies.pop(ended)
        for name, block in filled.items() if self.random.random() < 0.8 else ():
            self.pool.index.add(name, block)
            if self.pool.index.get(name) == block:
                self.contents[block] = name
        self.pool.unpin(ended)

    def forget(self) -> None:
        gone = int(self.random.choice(sorted(self.kept)))
        self.pool.forget(gone)
        del self.kept[gone]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_host_blocks_equal_sets_of_ids(seed: int) -> None:
    """A block is free when no row and no copy needs it; what is named lies there once, and is found."""
    model = Model(seed)
    for row in range(120):
        kind = model.random.random()
        if kind < 0.5:
            model.keep(row)
        elif kind < 0.75 and model.kept:
            model.forget()
        elif model.copies:
            model.end_copy()
        assert model.pool.num_free == 12 - len(model.in_use)
        model.pool.check_invariants()
    model.pool.forget(999)  # who keeps nothing has nothing to forget
