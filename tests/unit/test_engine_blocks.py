"""Block bookkeeping: what is handed out, counted, pinned, grown and shrunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.blocks import BlockManager
from services.worker.engine.types import I32


def manager(num_blocks: int = 8, num_rows: int = 4, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, np.zeros(num_rows, dtype=np.int32), max_blocks_per_row=16)


def extend(blocks: BlockManager, row: int, end: int) -> list[int]:
    return [int(block) for block in blocks.extend(np.array([row]), np.array([end], dtype=np.int32)).block_id]


def ids(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def test_the_first_blocks_come_in_order_and_a_row_gets_only_what_it_lacks() -> None:
    blocks = manager()
    assert extend(blocks, 0, 9) == [0, 1, 2]
    assert extend(blocks, 0, 12) == []
    assert extend(blocks, 0, 13) == [3]
    assert blocks.block_table[0, :4].tolist() == [0, 1, 2, 3]
    assert blocks.num_free == 4


def test_one_call_serves_rows_that_lack_different_numbers_of_blocks() -> None:
    blocks = manager()
    extend(blocks, 2, 4)
    delta = blocks.extend(np.array([0, 1, 2]), ids(9, 4, 8))
    assert delta.row.tolist() == [0, 0, 0, 1, 2]
    assert delta.index.tolist() == [0, 1, 2, 0, 1]
    assert delta.block_id.tolist() == [1, 2, 3, 4, 5]
    blocks.check_invariants(ids(0, 1, 2))


def test_blocks_freed_last_are_handed_out_first_and_in_order() -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    extend(blocks, 1, 8)
    blocks.release(0)
    assert extend(blocks, 2, 12) == [0, 1, 4]


def test_a_pinned_block_outlives_its_row_until_it_is_unpinned() -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    blocks.pin(ids(0, 1), "transfer")
    blocks.pin(ids(1), "copy")
    assert blocks.freeable(ids(0)).tolist() == [0, 0, 0, 0]
    blocks.release(0)
    assert blocks.num_free == 6
    blocks.unpin("transfer")
    assert blocks.num_free == 7
    blocks.unpin("copy")
    blocks.unpin("copy")
    assert blocks.num_free == 8
    blocks.check_invariants(ids())


def test_freed_blocks_are_announced_once_they_are_really_free() -> None:
    blocks, freed = manager(), []  # type: tuple[BlockManager, list[int]]
    blocks.on_free = lambda gone: freed.extend(gone.tolist())
    extend(blocks, 0, 8)
    blocks.pin(ids(1), "owner")
    blocks.release(0)
    assert freed == [0]
    blocks.unpin("owner")
    assert freed == [0, 1]


def test_growing_and_shrinking_change_what_can_be_handed_out() -> None:
    blocks = manager(num_blocks=4)
    blocks.set_usable(ids(0, 1), usable=False)
    assert (blocks.num_usable, blocks.num_free) == (2, 2)
    assert extend(blocks, 0, 8) == [2, 3]
    blocks.grow(6)
    assert (blocks.num_usable, blocks.num_free) == (4, 2)
    blocks.set_usable(ids(0, 0, 2), usable=True)
    assert (blocks.num_usable, blocks.num_free) == (5, 3)
    assert extend(blocks, 1, 12) == [0, 4, 5]
    blocks.check_invariants(ids(0, 1))


def test_a_block_in_use_cannot_lose_its_memory() -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    blocks.pin(ids(1), "owner")
    with pytest.raises(AssertionError, match="a row holds"):
        blocks.set_usable(ids(0), usable=False)
    blocks.release(0)
    with pytest.raises(AssertionError, match="pinned"):
        blocks.set_usable(ids(1), usable=False)


def test_nobody_can_pin_a_free_block_or_take_more_than_there_is() -> None:
    blocks = manager()
    with pytest.raises(AssertionError, match="free block"):
        blocks.pin(ids(3), "owner")
    with pytest.raises(AssertionError, match="need 9 blocks of 8"):
        extend(blocks, 0, 36)


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (lambda b: b.refcount.__setitem__(0, 2), "refcounts"),
        (lambda b: b.refcount.__setitem__(5, 1), "refcounts"),
        (lambda b: b.pins.__setitem__(5, 1), "pins"),
        (lambda b: b._stack.__setitem__(0, 0), "free xor in use"),
        (lambda b: setattr(b, "_num_free", 4), "free xor in use"),
        (lambda b: b.usable.__setitem__(7, False), "free xor in use"),
        (lambda b: b.held.__setitem__(3, 1), "a free row holds"),
        (lambda b: setattr(b, "_num_usable", 7), "number of usable"),
    ],
)
def test_every_broken_law_is_named(spoil: object, law: str) -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    blocks.check_invariants(ids(0))
    spoil(blocks)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=law):
        blocks.check_invariants(ids(0))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_blocks_are_never_lost_or_doubled(seed: int) -> None:
    random, blocks = np.random.default_rng(seed), manager(num_blocks=24, num_rows=6)
    ends = np.zeros(6, dtype=np.int32)
    for step in range(60):
        row = int(random.integers(6))
        if random.random() < 0.3:
            blocks.release(row)
            ends[row] = 0
        elif random.random() < 0.2 and blocks.held[row]:
            blocks.pin(blocks.block_table[row, : blocks.held[row]], step)
        elif random.random() < 0.2:
            blocks.unpin(int(random.integers(step + 1)))
        else:
            more = int(random.integers(1, 12))
            if -(-(ends[row] + more) // 4) - blocks.held[row] <= min(blocks.num_free, 16 - blocks.held[row]):
                ends[row] += more
                blocks.extend(np.array([row]), ends[[row]])
        blocks.check_invariants(np.arange(6, dtype=np.int32))
    for row in range(6):
        blocks.release(row)
    for owner in range(60):
        blocks.unpin(owner)
    assert sorted(blocks.free_ids.tolist()) == list(range(24))
