"""Block bookkeeping: what is handed out, counted, pinned, grown and shrunk."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.blocks.free_blocks import FreeBlocks
from services.worker.blocks.manager import BlockManager
from services.worker.contract.arrays import I32


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, 4, np.zeros(4, dtype=np.int32), max_blocks_per_row=16)


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
    assert blocks.freeable(ids(0)).tolist() == [0]
    blocks.release(0)
    assert blocks.num_free == 6
    blocks.unpin("transfer")
    assert blocks.num_free == 7
    blocks.unpin("copy")
    blocks.unpin("copy")
    assert blocks.num_free == 8
    blocks.check_invariants(ids())


def test_lost_blocks_are_announced_once_they_are_really_free_or_without_memory() -> None:
    blocks, freed = manager(), []  # type: tuple[BlockManager, list[int]]
    blocks.on_lost = lambda gone: freed.extend(gone.tolist())
    extend(blocks, 0, 8)
    blocks.pin(ids(1), "owner")
    blocks.release(0)
    assert freed == [0]
    blocks.unpin("owner")
    assert freed == [0, 1]
    blocks.set_usable(ids(6, 7), usable=False)
    assert freed == [0, 1, 6, 7], "what has no memory has lost its contents too"


def test_growing_and_shrinking_change_what_can_be_handed_out() -> None:
    blocks = manager(num_blocks=4)
    blocks.set_usable(ids(0, 1), usable=False)
    assert (blocks.num_usable, blocks.num_free) == (2, 2)
    assert extend(blocks, 0, 8) == [2, 3]
    blocks.grow(4, 6)
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
        (lambda b: b._free_blocks.put_blank(ids(0)), "free xor in use"),
        (lambda b: b._free_blocks.take(1), "free xor in use"),
        (lambda b: b._free_blocks.put_kept(ids(b._free_blocks.take(1)[0][0])), "without a name"),
        (lambda b: b.index.add(b"name", 7), "with a name"),
        (lambda b: b.index.is_named.__setitem__(0, True), "marks of named"),
        (lambda b: b.share(3, ids(0), None, "owner"), "was not told what"),
        (lambda b: b._ahead.append((0, 0, ids(0, 1, 2))), "blocks that a row had"),
        (lambda b: b._ahead.append((0, 0, ids(0, 5))), "other blocks"),
        (lambda b: b.usable.__setitem__(7, False), "free xor in use"),
        (lambda b: b.held.__setitem__(2, 1), "a free row holds"),
        (lambda b: setattr(b, "num_usable", 7), "number of usable"),
    ],
)
def test_every_broken_law_is_named(spoil: object, law: str) -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    blocks.check_invariants(ids(0))
    spoil(blocks)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=law):
        blocks.check_invariants(ids(0, 3))


def test_a_named_block_keeps_its_contents_until_the_blank_ones_are_used_up() -> None:
    """Rows 0 and 1 hold blocks 0 to 3; 0, 1 and 2 get names. Freed, they are handed out after 3 and 4 to 7."""
    blocks, lost = manager(), []  # type: tuple[BlockManager, list[int]]
    blocks.on_lost = lambda gone: lost.extend(gone.tolist())
    extend(blocks, 0, 8)
    extend(blocks, 1, 8)
    for block in (0, 1, 2):
        blocks.index.add(bytes([block]), block)
    blocks.release(1)
    blocks.release(0)
    assert (blocks.num_free, lost) == (8, [3])
    assert extend(blocks, 2, 24) == [3, 4, 5, 6, 7, 2], "the one freed first is lost first"
    assert lost == [3, 2]
    assert extend(blocks, 3, 4) == [1], "of one row the last block is lost first"
    assert blocks.index.find([bytes([0])]) == [0]
    assert blocks.index.find([bytes([1]), bytes([0])]) == []
    blocks.check_invariants(ids(2, 3))


def test_what_nobody_shares_may_stand_before_what_is_shared() -> None:
    """Row 2 finds row 1's blocks 1 and 0, the first of which row 1 gives up."""
    blocks = manager()
    extend(blocks, 1, 8)
    for block in (0, 1):
        blocks.index.add(bytes([block]), block)
    blocks.release(1, 1)
    blocks.share(2, ids(1, 0), None, "step")
    assert blocks.freeable(ids(2)).tolist() == [1]
    assert blocks.freeable(ids(1, 2)).tolist() == [1, 1]
    blocks.pin(ids(1), "copy")
    assert blocks.freeable(ids(2)).tolist() == [0]
    assert blocks.freeable(ids(1, 2)).tolist() == [1, 0]


def test_a_shared_block_is_free_when_the_last_row_gives_it_up() -> None:
    """Row 1 shares row 0's block 0 and copies block 1; row 2 brings block 0 back from among the free ones."""
    blocks = manager()
    extend(blocks, 0, 7)
    blocks.index.add(b"0", 0)
    blocks.share(1, ids(0), 1, "step")
    assert blocks.freeable(ids(0, 1)).tolist() == [1, 0], "block 0 needs both; block 1 is the source of a copy"
    assert blocks.freeable(ids(1)).tolist() == [0]
    delta = blocks.extend(np.array([1]), ids(7))
    assert [column.tolist() for column in (delta.row, delta.index, delta.block_id)] == [[1, 1], [0, 1], [0, 2]]
    copies = blocks.take_copies()
    assert (copies.source.tolist(), copies.target.tolist()) == ([1], [2])
    blocks.unpin("step")
    assert blocks.freeable(ids(0, 1)).tolist() == [2, 1]
    assert blocks.freeable(ids(1, 0)).tolist() == [2, 1]
    blocks.check_invariants(ids(0, 1))
    blocks.release(0)
    assert blocks.num_free == 6
    blocks.release(1)
    assert (blocks.num_free, blocks.in_use(ids(0))) == (8, 0)
    blocks.share(2, ids(0), None, "step")
    assert (blocks.num_free, blocks.in_use(ids(0))) == (7, 1)
    blocks.extend(np.array([2]), ids(5))
    blocks.check_invariants(ids(2))


def test_a_row_that_would_write_what_others_read_is_a_bug() -> None:
    blocks = manager()
    extend(blocks, 0, 8)
    blocks.check_writable(0, 3)
    blocks.share(1, ids(0), None, "step")
    blocks.extend(np.array([1]), ids(5))
    with pytest.raises(AssertionError, match="others refer to"):
        blocks.check_writable(0, 3)
    blocks.check_writable(0, 4)
    blocks.index.add(b"1", 1)
    with pytest.raises(AssertionError, match="has a name"):
        blocks.check_writable(0, 4)


def test_a_block_without_memory_is_found_no_more() -> None:
    blocks = manager(num_blocks=4)
    extend(blocks, 0, 12)
    for block in (0, 1, 2):
        blocks.index.add(bytes([block]), block)
    blocks.release(0)
    blocks.set_usable(ids(1, 3), usable=False)
    assert blocks.index.find([bytes([0]), bytes([1])]) == [0]
    assert extend(blocks, 1, 8) == [2, 0]
    blocks.check_invariants(ids(1))


def test_blocks_are_in_use_while_a_row_holds_them_or_somebody_pins_them() -> None:
    blocks = manager()
    held = extend(blocks, 0, 12)
    blocks.pin(ids(held[0]), "owner")
    assert blocks.in_use(ids(0, 1, 2, 3)) == 3
    blocks.release(0)
    assert blocks.in_use(ids(0, 1, 2, 3)) == 1
    blocks.unpin("owner")
    assert blocks.in_use(ids(0, 1, 2, 3)) == 0


def test_a_block_that_one_owner_pins_twice_is_free_once() -> None:
    blocks = manager()
    held = extend(blocks, 0, 8)
    for block in (*held, held[0]):
        blocks.pin(ids(block), "owner")
    blocks.release(0)
    blocks.unpin("owner")
    assert blocks.num_free == 8
    blocks.check_invariants(ids())


@pytest.mark.parametrize("seed", range(8))
def test_free_blocks_equal_two_lists(seed: int) -> None:
    """Blank ids are a stack, kept ones a queue behind it; the arrays' ends are met several times."""
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 9))
    free = FreeBlocks(size)
    blank, kept, out = list(range(size - 1, -1, -1)), list[int](), list[int]()
    for _ in range(400):
        assert len(free) == len(blank) + len(kept)
        assert (free.blank_ids.tolist(), free.kept_ids.tolist()) == (blank, kept)
        count = int(random.integers(0, 4))
        match int(random.integers(5)):
            case 0:
                blank += out[:count]
                free.put_blank(ids(*out[:count]))
                del out[:count]
            case 1 | 2:
                kept += out[:count]
                free.put_kept(ids(*out[:count]))
                del out[:count]
            case 3 if kept:
                chosen = [int(x) for x in random.permutation(kept)[:count]]
                kept = [each for each in kept if each not in chosen]
                free.take_out(ids(*chosen))
                out += chosen
            case _ if len(free) >= count:
                expected = blank[::-1][:count]
                lost = kept[: count - len(expected)]
                taken, gone = free.take(count)
                assert (taken.tolist(), gone.tolist()) == (expected + lost, lost)
                del blank[len(blank) - len(expected) :]
                del kept[: len(lost)]
                out += expected + lost
