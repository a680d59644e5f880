"""Shares of a group that is about to dissolve: what is copied has a place of its own, and places are used again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.kv_shares import KvShares
from services.worker.kv_moves.placed_kv import PlacedKv


class Sequences:
    """As much of an engine as shares look at: sequences come, grow by full blocks, and end."""

    def __init__(self, rng: np.random.Generator, num_blocks: int) -> None:
        self.rng = rng
        self.config = SimpleNamespace(block_size=1)
        self.row_of: dict[Any, int] = {}
        self.held: dict[int, list[tuple[bytes, int]]] = {}
        self.free = list(range(num_blocks))
        self.pinned: set[int] = set()
        self.num_named = 0
        self.sharing = SimpleNamespace(computed=self.computed)
        self.blocks = SimpleNamespace(pin=self.pin, unpin=self.unpin)
        self.registry = SimpleNamespace(row_of=self.row_of)

    @property
    def table(self) -> Any:
        size = max(self.held, default=0) + 1
        counts = np.array([len(self.held.get(row, ())) for row in range(size)])
        order = np.arange(size)
        tier = np.ones(size)
        return SimpleNamespace(num_computed=counts, num_known=counts, arrival_s=order * 1.0, order=order, tier=tier)

    def computed(self, rows: Sequence[int]) -> KeptKv:
        found = [each for row in rows for each in self.held[row]]
        return KeptKv(tuple(name for name, _ in found), np.array([block for _, block in found], dtype=np.int32))

    def pin(self, ids: Any, _: str) -> None:
        self.pinned |= set(ids.tolist())

    def unpin(self, _: str) -> None:
        self.pinned.clear()

    def change(self) -> None:
        for row in [row for row in self.held if self.rng.random() < 0.2]:
            del self.row_of[f"s{row}"]
            self.free += [block for _, block in self.held.pop(row)]
        new = max(self.held, default=-1) + 1
        self.held[new], self.row_of[f"s{new}"] = [], new
        for blocks in self.held.values():
            for _ in range(int(self.rng.integers(1, 4))):
                usable = [block for block in self.free if block not in self.pinned]
                if usable and sum(map(len, self.held.values())) < 30:
                    block = usable[int(self.rng.integers(len(usable)))]
                    self.free.remove(block)
                    self.num_named += 1
                    blocks.append((self.num_named.to_bytes(16, "little"), block))


@pytest.mark.parametrize("seed", range(30))
def test_what_is_there_is_what_was_copied_last_to_a_place_that_nobody_else_has(seed: int) -> None:
    rng, now_s = np.random.default_rng(seed), [0.0]
    engine = Sequences(rng, 60)
    ahead, held = (20, 20), [dict[int, bytes](), dict[int, bytes]()]
    shares = KvShares(
        engine,  # type: ignore[arg-type]
        capacity=40,
        ahead_blocks=ahead,
        most_copied=1000,
        limit_s=1e9,
        now=lambda: now_s[0],
    )
    num_rounds = 0
    for _ in range(60):
        engine.change()
        round_ = shares.next_shares()
        num_rounds += bool(round_)
        broken = bool(round_) and rng.random() < 0.4
        for places, share, most in zip(held, round_, ahead, strict=False):
            assert set(share.ids.tolist()) <= engine.pinned, "nobody writes there while they are copied"
            assert all(0 <= place < most for place in share.places.tolist())
            for name, place in zip(share.names, share.places.tolist(), strict=True):
                places[place] = b"half" if broken else name
        if broken:
            shares.let_go()
            assert not engine.pinned
        elif round_ and rng.random() < 0.7:
            engine.change()
        for places, there, share in zip(held, shares.there, round_ or (PlacedKv(), PlacedKv()), strict=True):
            assert all(places[at] == name for name, at in zip(there.names, there.places.tolist(), strict=True))
            assert len(set(there.places.tolist())) == len(there)
            if not broken and len(share):
                assert not set(share.places.tolist()) & set(there.places.tolist()), "not there before it has arrived"
        now_s[0] += 0.1
    shares.let_go()
    assert num_rounds > 20, "places of what has ended are used again"
