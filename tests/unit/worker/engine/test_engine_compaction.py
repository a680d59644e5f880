"""A limit on block ids: what lies beyond moves below with the next batches, and no text notices."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.blocks import compaction
from services.worker.blocks.compaction import with_moves
from services.worker.blocks.manager import BlockManager
from services.worker.contract.arrays import I32
from services.worker.contract.batch import CopyOps, TableDelta
from services.worker.contract.executor import KvCapacity
from services.worker.engine.invariants import check_engine
from services.worker.sequences.config import AddRefusal
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.seeds import first_of

LIMIT = 16


def beyond(*, depth: int = 1, limited: int | None = None) -> EngineHarness:
    """Sequence 1 holds blocks 10 to 20 of 24; sequence 0, which has ended, had 0 to 9. Blocks of 4 tokens."""
    harness = make_harness(num_blocks=24, num_lanes=depth, max_batch_tokens=200)
    harness.add(new_sequence(0, num_prompt=40, max_tokens=1))
    harness.add(new_sequence(1, num_prompt=40, max_tokens=20))
    harness.step()
    harness.step()
    assert held(harness, 1) == list(range(10, 21))
    limit(harness, limited)
    return harness


def held(harness: EngineHarness, name: int) -> list[int]:
    blocks = harness.engine.blocks
    row = harness.engine.registry.row_of[new_sequence(name).request_id, 1]
    ids: list[int] = blocks.block_table[row, : blocks.held[row]].tolist()
    return ids


def is_kept(harness: EngineHarness) -> bool:
    return harness.engine.blocks.is_within_limit


def limit(harness: EngineHarness, num_blocks: int | None) -> None:
    harness.engine.memory.limit(num_blocks)
    harness.settle()


def test_what_lies_beyond_moves_with_the_next_batch_and_the_text_stays() -> None:
    """11 blocks are held, 5 of them beyond 16: 16 - 11 = 5 are free, before the move and after it."""
    harness = beyond(limited=LIMIT)
    engine = harness.engine
    assert (engine.capacity_blocks, engine.blocks.num_free, engine.blocks.is_within_limit) == (16, 5, False)
    batch = harness.submitted()
    assert batch.copies.source.tolist() == [16, 17, 18, 19, 20]
    assert batch.table_delta.index.tolist() == [6, 7, 8, 9, 10]
    assert batch.table_delta.block_id.tolist() == batch.copies.target.tolist() == held(harness, 1)[6:]
    assert max(held(harness, 1)) < LIMIT
    assert (engine.blocks.num_free, engine.blocks.is_within_limit) == (5, False)
    harness.land()
    assert (engine.blocks.num_free, engine.blocks.is_within_limit) == (5, True)
    harness.finish()


def test_a_limit_with_nothing_beyond_takes_effect_at_once() -> None:
    harness = make_harness(num_blocks=24)
    limit(harness, LIMIT)
    assert harness.engine.blocks.is_within_limit
    assert harness.offer(new_sequence(0, num_prompt=60, max_tokens=6)) is AddRefusal.TOO_LONG
    assert harness.add(new_sequence(1, num_prompt=60, max_tokens=5)) == 0
    harness.finish()
    assert harness.engine.totals.peak_used_blocks == LIMIT


def test_schedulers_never_get_a_block_beyond() -> None:
    """12 sequences of 20 to 52 tokens want all 24 blocks, over and over."""
    harness = make_harness(num_blocks=24)
    limit(harness, LIMIT)
    for name in range(12):
        harness.add(new_sequence(name, num_prompt=4 + 3 * name, max_tokens=16))
    given: set[int] = set()
    while harness.engine.table.num_sequences:
        given.update(harness.submitted().table_delta.block_id.tolist())
        harness.land()
    harness.judge()
    assert given == set(range(LIMIT))


def assert_refused(harness: EngineHarness, num_blocks: int, why: str) -> None:
    engine = harness.engine
    before = (engine.capacity_blocks, engine.blocks.num_free, engine.blocks.is_within_limit)
    with pytest.raises(ValueError, match=why):
        engine.memory.limit(num_blocks)
    harness.settle()
    assert (engine.capacity_blocks, engine.blocks.num_free, engine.blocks.is_within_limit) == before


def test_a_limit_below_what_is_in_use_is_refused_and_changes_nothing() -> None:
    """Nobody is here, but 10 full blocks of sequence 1 are pinned."""
    harness = beyond()
    harness.pin_full_blocks("reader", 1)
    harness.cancel(harness.stories[1001])
    assert_refused(harness, 9, "10 blocks are in use, more than the 9")
    limit(harness, 10)


def test_a_limit_that_a_sequence_would_outgrow_is_refused_and_changes_nothing() -> None:
    """40 + 20 - 1 tokens take 15 blocks."""
    harness = beyond()
    assert_refused(harness, 14, "at its full length does not fit 14")
    limit(harness, 15)
    harness.step()
    assert harness.engine.blocks.is_within_limit
    harness.finish()
    assert harness.engine.totals.num_preemptions == 0


def test_a_block_that_two_rows_share_moves_once_and_both_follow() -> None:
    harness = beyond()
    harness.add(new_sequence(2, prompt=new_sequence(1, num_prompt=40).prompt.tolist(), max_tokens=20))
    harness.step()
    assert held(harness, 2)[:9] == held(harness, 1)[:9]
    limit(harness, 20)
    batch = harness.submitted()
    assert np.unique(batch.copies.source).size == batch.copies.source.size
    limit(harness, 18)
    harness.land()
    batch = harness.submitted()
    assert batch.copies.source.tolist() == [18, 19]
    assert held(harness, 2)[:9] == held(harness, 1)[:9]
    harness.finish()


def test_the_source_of_a_copy_on_write_moves_when_that_copy_is_made() -> None:
    """Sequence 1 has 38 prompt tokens, so its tenth block is not full, and sequence 2 gets a copy of it."""
    harness = make_harness(num_blocks=24, max_batch_tokens=200)
    harness.add(new_sequence(0, num_prompt=40, max_tokens=1))
    harness.add(new_sequence(1, num_prompt=38, max_tokens=20))
    harness.add(new_sequence(2, prompt=new_sequence(1, num_prompt=38).prompt.tolist(), max_tokens=20, fork_of=1))
    harness.step()
    assert held(harness, 1) == list(range(10, 20))
    limit(harness, LIMIT)
    batch = harness.submitted()
    assert batch.copies.source.tolist() == [19, 16, 17, 18]
    assert held(harness, 1)[:9] == held(harness, 2)[:9]
    entries = list(zip(batch.table_delta.row.tolist(), batch.table_delta.index.tolist(), strict=True))
    assert len(set(entries)) == len(entries), "an entry changes twice"
    assert max(batch.table_delta.block_id) < LIMIT
    harness.land()
    assert harness.submitted().copies.source.tolist() == [19]
    harness.land()
    assert harness.engine.blocks.is_within_limit
    harness.finish()


def test_a_pinned_block_stays_until_it_is_unpinned() -> None:
    harness = beyond()
    harness.pin_full_blocks("reader", 1)
    limit(harness, LIMIT)
    harness.step()
    assert held(harness, 1)[6:10] == [16, 17, 18, 19]
    assert not is_kept(harness)
    harness.unpin("reader")
    harness.settle()
    assert harness.submitted().copies.source.tolist() == [16, 17, 18, 19]
    harness.land()
    assert is_kept(harness)
    harness.finish()


def test_a_pinned_block_that_nobody_holds_any_more_is_gone_when_it_is_unpinned() -> None:
    harness = beyond(limited=LIMIT)
    harness.pin_full_blocks("reader", 1)
    harness.cancel(harness.stories[1001])
    assert (harness.engine.blocks.is_within_limit, harness.engine.blocks.num_free) == (False, 6)
    harness.unpin("reader")
    harness.settle()
    assert (harness.engine.blocks.is_within_limit, harness.engine.blocks.num_free) == (True, LIMIT)


def test_a_batch_moves_so_many_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 400 tokens; the first one ends, so 100 blocks of the other have to move."""
    monkeypatch.setattr(compaction, "MAX_MOVED_BLOCKS", 64)
    harness = make_harness(num_blocks=300, max_batch_tokens=1000, max_model_len=1000)
    harness.add(new_sequence(0, num_prompt=400, max_tokens=1))
    harness.add(new_sequence(1, num_prompt=400, max_tokens=20))
    harness.step()
    limit(harness, 105)
    sizes = []
    while not harness.engine.blocks.is_within_limit:
        sizes.append(harness.submitted().copies.source.size)
        harness.land()
    assert sizes == [64, 31]
    harness.finish()


def test_a_batch_that_fails_has_moved_its_blocks_all_the_same() -> None:
    harness = beyond(limited=LIMIT)
    harness.submitted()
    harness.land("bad luck")
    assert harness.engine.blocks.is_within_limit
    assert harness.submitted().copies.source.size == 0
    harness.finish()


def test_a_retry_moves_blocks_too() -> None:
    harness = beyond()
    harness.submitted()
    harness.land("bad luck")
    limit(harness, LIMIT)
    assert harness.submitted().copies.source.size == 5
    harness.land()
    assert harness.engine.blocks.is_within_limit
    harness.finish()


def test_blocks_that_a_batch_moves_are_nobody_elses_before_it_is_back() -> None:
    """The limit is lifted and sequence 1 cancelled; only then does the batch that copies 16 to 20 run."""
    harness = beyond(depth=2, limited=LIMIT)
    moves = harness.submitted().copies
    limit(harness, None)
    harness.cancel(harness.stories[1001])
    assert harness.engine.blocks.is_within_limit
    assert harness.engine.blocks.num_free == 24 - 11 - 5
    harness.add(new_sequence(2, num_prompt=25, max_tokens=6))
    given = harness.submitted().table_delta.block_id
    assert not np.isin(given, np.concatenate([moves.source, moves.target])).any()
    harness.land()
    assert harness.engine.blocks.num_free == 24 - given.size
    harness.finish()


@pytest.mark.parametrize(("has_moved", "num_found"), [(True, 36), (False, 6 * 4)])
def test_moved_blocks_are_found_by_name_and_lost_ones_are_not(*, has_moved: bool, num_found: int) -> None:
    """Of ten full blocks of sequence 1, 10 to 19, another prompt may share nine if they have moved, else six."""
    harness = beyond(limited=LIMIT if has_moved else None)
    if has_moved:
        harness.step()
    harness.cancel(harness.stories[1001])
    limit(harness, LIMIT)
    row = harness.add(new_sequence(2, prompt=new_sequence(1, num_prompt=40).prompt.tolist(), max_tokens=3))
    assert harness.engine.sharing.cached(row).num_tokens == num_found
    harness.finish()
    assert harness.engine.totals.num_prefix_cache_hits == num_found


def test_a_lifted_limit_gives_back_all_blocks_blank() -> None:
    harness = beyond(limited=LIMIT)
    harness.step()
    limit(harness, None)
    assert (harness.engine.capacity_blocks, harness.engine.blocks.num_free) == (24, 13)
    harness.add(new_sequence(2, num_prompt=44, max_tokens=1))
    assert harness.submitted().table_delta.block_id[:8].tolist() == list(range(16, 24))
    harness.finish()


def test_a_limit_may_change_before_it_is_kept() -> None:
    """From 18 to 22 to 16, with a batch on its way after each; what an earlier limit has moved stays where it is."""
    harness = beyond(depth=2, limited=18)
    assert harness.submitted().copies.source.tolist() == [18, 19, 20]
    limit(harness, 22)
    assert harness.engine.blocks.is_within_limit
    limit(harness, LIMIT)
    harness.land()
    assert harness.submitted().copies.source.tolist() == [16, 17]
    harness.land()
    assert harness.engine.blocks.is_within_limit
    harness.finish()


@pytest.mark.parametrize("has_moved", [True, False])
def test_another_executor_has_no_limit_and_gets_what_was_held_moved_or_not(*, has_moved: bool) -> None:
    """Of 41 tokens 40 are computed, so ten full blocks; if all have moved, the first six are where they were."""
    harness = beyond(limited=LIMIT)
    if has_moved:
        harness.step()
    kept = harness.engine.leave_executor(harness.now_s)
    assert (len(kept), kept.ids[:6].tolist()) == (10, list(range(10, 16)))
    assert bool((kept.ids < LIMIT).all()) is has_moved
    harness.engine.enter_executor(KvCapacity(20, harness.engine.config.block_size), 1)
    assert (harness.engine.capacity_blocks, harness.engine.blocks.num_free) == (20, 20)
    check_engine(harness.engine)


def test_who_has_no_room_already_is_in_no_limits_way_and_goes_on_when_it_is_lifted() -> None:
    """60 + 20 - 1 tokens take 20 of 24 blocks."""
    harness = make_harness(num_blocks=24)
    harness.add(new_sequence(0, num_prompt=60, max_tokens=20))
    harness.change_executor(18)
    limit(harness, LIMIT)
    harness.engine.memory.grow(18, 24)
    assert harness.submit() is None
    limit(harness, None)
    harness.finish()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("seed", first_of(range(3), 2))
def test_every_scheduler_gets_below_a_limit_in_a_few_steps_and_stays_there(
    scheduler: str, num_stages: int, seed: int
) -> None:
    """One step for each lane lets forks' copies end, and one more moves the last blocks: there are never 64."""
    random = np.random.default_rng([seed, num_stages])
    harness = make_harness(scheduler, num_blocks=48, max_model_len=96, num_lanes=num_stages)
    for name in range(16):
        num_prompt, max_tokens = int(random.integers(1, 50)), int(random.integers(1, 40))
        fork_of = int(random.integers(name)) if name and random.random() < 0.3 else None
        prompt = new_sequence(0 if fork_of is None else fork_of, num_prompt=num_prompt).prompt.tolist()
        harness.add(new_sequence(name, prompt=prompt, max_tokens=max_tokens, seed=name))
    for _ in range(int(random.integers(2, 40))):
        harness.step()
    engine = harness.engine
    limit(harness, max(engine.blocks.num_used + int(random.integers(3)), 24))
    num_steps = 0
    while not engine.blocks.is_within_limit:
        harness.fill()
        harness.land()
        num_steps += 1
        assert num_steps <= 2 * num_stages + 1
    while engine.table.num_sequences:
        batch = harness.submit()
        assert batch is None or batch.table_delta.block_id.max(initial=0) < engine.capacity_blocks
        if batch is None:
            harness.land()
    harness.judge()
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}


class ExecutorTwin:
    """What an executor knows: tables, and a label in each block; labels of lost blocks are gone."""

    def __init__(self, blocks: BlockManager, num_rows: int) -> None:
        self.blocks = blocks
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.labels: dict[int, str] = {}
        blocks.on_lost = self.lose

    def lose(self, ids: I32) -> None:
        for block in ids.tolist():
            self.labels.pop(block, None)

    def take_in(self, delta: TableDelta, copies: CopyOps) -> None:
        assert not np.intersect1d(copies.source, copies.target).size
        assert np.unique(copies.target).size == copies.target.size
        for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
            self.labels[target] = self.labels[source]
        entries = list(zip(delta.row.tolist(), delta.index.tolist(), strict=True))
        assert len(set(entries)) == len(entries), "an entry changes twice in one batch"
        for (row, index), block in zip(entries, delta.block_id.tolist(), strict=True):
            assert index < self.blocks.held[row]
            self.tables[row][index] = block

    def read(self, row: int) -> list[str]:
        return [self.labels[self.tables[row][index]] for index in range(int(self.blocks.held[row]))]


class LimitedBlocks:
    """Random operations on a block manager; each row's labels are known apart from it."""

    NUM_ROWS = 6

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        held = np.zeros(self.NUM_ROWS, dtype=np.int32)
        self.blocks = BlockManager(24, 4, held, max_blocks_per_row=16)
        self.twin = ExecutorTwin(self.blocks, self.NUM_ROWS)
        self.wanted: list[list[str]] = [[] for _ in range(self.NUM_ROWS)]
        self.in_flight: deque[int] = deque()
        """Batches that copy."""
        self.readers: list[int] = []
        """Who pins something."""
        self.step = 0
        self.num_moved = 0

    def run(self, num_operations: int) -> None:
        operations = [self.grow_row, self.release, self.share, self.limit, self.pin, self.land]
        for choice in self.random.choice(6, size=num_operations, p=[0.3, 0.2, 0.15, 0.15, 0.05, 0.15]):
            self.step += 1
            operations[choice]()
            self.check()

    def check(self) -> None:
        blocks = self.blocks
        blocks.check_invariants(np.arange(self.NUM_ROWS, dtype=np.int32))
        for row, labels in enumerate(self.wanted):
            assert self.twin.read(row) == labels
            assert blocks.block_table[row, : len(labels)].tolist() == [
                self.twin.tables[row][index] for index in range(len(labels))
            ]
        for name, block in blocks.index._block_of.items():
            assert self.twin.labels[block] == name.decode()
        rows = self.random.permutation(self.NUM_ROWS)[: self.random.integers(1, self.NUM_ROWS + 1)].astype(np.int32)
        assert blocks.freeable(rows).tolist() == [
            self.frees(rows[i:]) - self.frees(rows[i + 1 :]) for i in range(rows.size)
        ]

    def frees(self, rows: I32) -> int:
        """Return how many blocks are free once some rows let go of theirs, beyond those that are."""
        names = [block for row in rows.tolist() for block in self.twin.tables[row].values()]
        blocks = self.blocks
        return sum(names.count(block) == blocks.refcount[block] and not blocks.pins[block] for block in set(names))

    def batch(self, row: int, num_blocks: int) -> None:
        """Give a row blocks up to so many, and let the executor hear of all that has changed."""
        blocks, first = self.blocks, len(self.wanted[row])
        delta = blocks.extend(np.array([row]), np.array([4 * num_blocks], dtype=np.int32))
        copies = blocks.take_copies()
        given, num_copies = delta.block_id.tolist(), copies.source.size
        delta, copies = with_moves(blocks, ("copies", self.step), delta, copies)
        self.num_moved += copies.source.size - num_copies
        if copies.source.size:
            self.in_flight.append(self.step)
        self.twin.take_in(delta, copies)
        for index in range(first, num_blocks):
            block = self.twin.tables[row][index]
            assert block in given
            self.twin.labels[block] = f"{self.step}/{index}"
            self.wanted[row].append(f"{self.step}/{index}")

    def grow_row(self) -> None:
        row = int(self.random.integers(self.NUM_ROWS))
        most = min(self.blocks.num_free, 16 - len(self.wanted[row]))
        if most:
            self.batch(row, len(self.wanted[row]) + int(self.random.integers(1, min(most, 4) + 1)))

    def release(self) -> None:
        row = int(self.random.integers(self.NUM_ROWS))
        for block, label in zip(self.blocks.block_table[row].tolist(), self.wanted[row], strict=False):
            if self.random.random() < 0.6 and not self.blocks.index.is_named[block]:
                self.blocks.index.add(label.encode(), block)
        num_kept = int(self.random.integers(len(self.wanted[row]) + 1)) if self.random.random() < 0.3 else 0
        self.blocks.release(row, num_kept)
        self.wanted[row] = self.wanted[row][:num_kept]
        self.twin.tables[row] = {index: self.twin.tables[row][index] for index in range(num_kept)}

    def share(self) -> None:
        row, other = (int(row) for row in self.random.choice(self.NUM_ROWS, size=2, replace=False))
        if self.wanted[row] or not self.wanted[other] or not self.blocks.num_free:
            return
        count = int(self.random.integers(len(self.wanted[other])))
        ids = self.blocks.block_table[other, : count + 1].copy()
        is_copied = bool(self.random.random() < 0.5)
        self.blocks.share(row, ids[:count], int(ids[count]) if is_copied else None, ("copies", self.step))
        self.wanted[row] = self.wanted[other][:count]
        self.batch(row, count + 1)

    def limit(self) -> None:
        blocks = self.blocks
        lifts = bool(self.random.random() < 0.2)
        num_blocks = None if lifts else max(blocks.num_used + int(self.random.integers(-2, 8)), 0)
        num_in_use = blocks.in_use(np.arange(24, dtype=np.int32))
        try:
            blocks.limit(num_blocks)
        except ValueError:
            assert num_blocks is not None
            assert num_in_use > num_blocks
        else:
            assert blocks.num_usable == min(24 if num_blocks is None else num_blocks, 24)

    def pin(self) -> None:
        row = int(self.random.integers(self.NUM_ROWS))
        if self.readers:
            self.blocks.unpin(self.readers.pop())
        elif self.wanted[row]:
            self.blocks.pin(self.blocks.block_table[row, : len(self.wanted[row])], self.step)
            self.readers.append(self.step)

    def land(self) -> None:
        if self.in_flight:
            self.blocks.unpin(("copies", self.in_flight.popleft()))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_contents_names_and_tables_survive_any_limits(seed: int) -> None:
    limited = LimitedBlocks(seed)
    limited.run(100)
    blocks = limited.blocks
    for owner in limited.readers:
        blocks.unpin(owner)
    while limited.in_flight:
        limited.land()
    limited.check()
    row = int(np.argmax(blocks.held))
    limited.batch(row, len(limited.wanted[row]))
    limited.check()
    while limited.in_flight:
        limited.land()
    assert blocks.is_within_limit
    num_free = blocks.num_free
    rows = limited.random.permutation(LimitedBlocks.NUM_ROWS).astype(np.int32)
    freeable = blocks.freeable(rows)
    for left in range(rows.size - 1, -1, -1):
        blocks.release(int(rows[left]))
        assert blocks.num_free == num_free + freeable[left:].sum()
    assert blocks.num_free == blocks.num_usable


def test_the_random_operations_move_blocks() -> None:
    num_moved = 0
    for seed in range(10):
        limited = LimitedBlocks(seed)
        limited.run(100)
        num_moved += limited.num_moved
    assert num_moved > 20
