"""The end of a row's blocks goes while its beginning stays: a prefix on the device, a suffix on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from services.worker.scheduling.view import PreemptHow
from services.worker.sequences.table import Hold, Status
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.host_moves import preempt, sent


def one_that_runs(*, prefix_caching: bool = True) -> tuple[EngineHarness, int]:
    """A sequence of blocks of 4 that has computed its prompt: 14 tokens are three full ones and a rest."""
    harness = make_harness(num_blocks=30, num_host_blocks=20, prefix_caching=prefix_caching)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=12))
    harness.step()
    return harness, row


def where(harness: EngineHarness, row: int) -> tuple[int, int, int, int]:
    """Return of a row: its state, its blocks on the device, the tokens in them, and those that the host gives back."""
    table = harness.engine.table
    columns = (table.status, table.held_blocks, table.num_computed, table.host_tokens)
    state, held, computed, host = (int(column[row]) for column in columns)
    return state, held, computed, host


def host_used(harness: EngineHarness) -> int:
    assert harness.engine.swapping is not None
    return harness.engine.swapping.host.num_used


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_the_end_goes_and_comes_back(*, prefix_caching: bool) -> None:
    """With prefix caching the full one of the two blocks is found on the device."""
    harness, row = one_that_runs(prefix_caching=prefix_caching)
    assert preempt(harness, row, 2) == [2, 3]
    assert where(harness, row) == (Status.PREEMPTED, 2, 8, 14)
    harness.land_copies()
    assert (harness.engine.blocks.num_used, host_used(harness)) == (2, 2)
    stats = take_stats(harness.engine)
    assert (stats.num_demanded_blocks, stats.num_uncomputed_blocks, stats.num_head_blocks) == (2, 0, 2)
    assert sent(harness) == [(False, 1 if prefix_caching else 2)]
    totals = harness.engine.totals
    assert (totals.num_preemptions, totals.num_swap_outs, totals.num_swap_ins) == (1, 1, 1)
    assert (totals.swapped_out_bytes, totals.num_recomputed_tokens) == (2 * 1024, 0)
    assert totals.swapped_in_bytes == 1024 * (1 if prefix_caching else 2)


def test_the_executor_hears_of_the_end_alone() -> None:
    harness, row = one_that_runs(prefix_caching=False)
    preempt(harness, row, 2)
    harness.land_copies()
    assert harness.submit() is None, "it comes back"
    harness.land_copies()
    batch = harness.submitted()
    assert (batch.rows.tolist(), batch.start.tolist(), batch.admits) == ([row], [14], ())
    assert (batch.table_delta.row.tolist(), batch.table_delta.index.tolist()) == ([row, row], [2, 3])
    harness.finish()


def test_more_may_go_bit_by_bit_and_comes_back_together() -> None:
    harness, row = one_that_runs(prefix_caching=False)
    assert preempt(harness, row, 3) == [3]
    harness.land_copies()
    assert preempt(harness, row, 1) == [1, 2]
    harness.land_copies()
    assert where(harness, row) == (Status.PREEMPTED, 1, 4, 14)
    assert preempt(harness, row, 0) == [0]
    harness.land_copies()
    assert (where(harness, row), harness.engine.blocks.num_used) == ((Status.PREEMPTED, 0, 0, 14), 0)
    totals = harness.engine.totals
    assert (totals.num_preemptions, totals.num_swap_outs, totals.swapped_out_bytes) == (1, 1, 4 * 1024)
    assert sent(harness) == [(False, 4)]


def test_without_its_beginning_the_end_is_computed_again() -> None:
    """What the host has of it is free, and a later copy finds it by name."""
    harness, row = one_that_runs()
    preempt(harness, row, 2)
    harness.land_copies()
    assert preempt(harness, row, 0, PreemptHow.RECOMPUTE) == []
    assert (where(harness, row), host_used(harness)) == ((Status.PREEMPTED, 0, 0, 0), 0)
    assert sent(harness) == []
    assert harness.engine.totals.num_recomputed_tokens == 2, "the last block, which is not full"


def test_what_is_dropped_behind_the_beginning_is_computed_again() -> None:
    harness, row = one_that_runs(prefix_caching=False)
    assert preempt(harness, row, 2, PreemptHow.RECOMPUTE) == []
    assert where(harness, row) == (Status.PREEMPTED, 2, 8, 0)
    batch = harness.stepped()
    assert (batch.start.tolist(), batch.num_tokens.tolist(), batch.table_delta.index.tolist()) == ([8], [7], [2, 3])
    assert harness.engine.totals.num_recomputed_tokens == 6
    harness.finish()


def test_what_is_dropped_and_then_sent_is_counted_once() -> None:
    """12 of 14 tokens are dropped, one block of the first two goes to the host and comes back."""
    harness, row = one_that_runs(prefix_caching=False)
    preempt(harness, row, 2, PreemptHow.RECOMPUTE)
    assert preempt(harness, row, 1) == [1]
    assert where(harness, row) == (Status.PREEMPTED, 1, 4, 8)
    harness.land_copies()
    assert sent(harness) == [(False, 1)]
    assert harness.engine.totals.num_recomputed_tokens == 6


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_that_fails_leaves_the_beginning(*, to_host: bool) -> None:
    harness, row = one_that_runs(prefix_caching=False)
    preempt(harness, row, 2)
    if not to_host:
        harness.land_copies()
        harness.submit()
    assert harness.host_copies[0].to_host is to_host
    harness.land_copy(done=False)
    assert where(harness, row) == (Status.PREEMPTED, 2, 8, 0)
    assert (harness.engine.blocks.num_used, host_used(harness)) == (2, 0)
    harness.finish()
    assert harness.engine.totals.num_recomputed_tokens == 6


def test_a_second_copy_that_fails_costs_what_lies_behind_it() -> None:
    """The host has the end, but nothing fills the gap."""
    harness, row = one_that_runs(prefix_caching=False)
    preempt(harness, row, 3)
    harness.land_copies()
    preempt(harness, row, 1)
    harness.land_copy(done=False)
    assert (where(harness, row), host_used(harness)) == ((Status.PREEMPTED, 1, 4, 0), 0)
    harness.finish()
    assert harness.engine.totals.num_recomputed_tokens == 10


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("lands_first", [True, False])
def test_a_silent_dispatchers_sequences_hold_no_blocks(*, lands_first: bool, done: bool) -> None:
    harness, row = one_that_runs(prefix_caching=False)
    preempt(harness, row, 2)
    for lands in (lands_first, not lands_first):
        if lands:
            harness.land_copy(done=done)
        else:
            harness.engine.pause(0)
            harness.settle()
    assert harness.engine.blocks.num_used == 0
    assert where(harness, row) == (Status.PREEMPTED, 0, 0, 0)
    assert harness.submit() is None
    harness.engine.resume(0)
    harness.finish()


@pytest.mark.parametrize("lands_first", [True, False])
@pytest.mark.parametrize("how", list(PreemptHow))
def test_a_sequence_that_ends_gives_both_ends_back(how: PreemptHow, *, lands_first: bool) -> None:
    harness, row = one_that_runs()
    preempt(harness, row, 2, how)
    if lands_first:
        harness.land_copies()
    assert harness.cancel(harness.stories[1000])
    harness.land_copies()
    harness.check_empty()


def test_a_sequence_expires_in_two_places() -> None:
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=12, expires_s=1.0))
    harness.step()
    preempt(harness, row, 1)
    harness.land_copies()
    harness.now_s = 2.0
    assert harness.submit() is None
    assert harness.stories[1000].finish is FinishReason.CANCELLED
    harness.land_copies()
    harness.check_empty()


def test_a_row_that_was_to_be_tried_again_may_go() -> None:
    harness, row = one_that_runs()
    other = harness.add(new_sequence(1, num_prompt=5, max_tokens=6))
    harness.submitted()
    harness.land("bad luck")
    assert harness.engine.table.hold[row] & Hold.RETRY
    preempt(harness, row, 2)
    assert not harness.engine.table.hold[row] & Hold.RETRY
    assert harness.engine.table.hold[other] & Hold.RETRY
    harness.finish()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_child_shares_the_prompt_that_its_parked_parent_holds(*, prefix_caching: bool) -> None:
    """The parent has said 6 tokens behind its prompt of 14; it keeps four blocks, of the last of which the child has a
    copy."""
    harness, row = one_that_runs(prefix_caching=prefix_caching)
    for _ in range(6):
        harness.step()
    assert harness.engine.table.num_computed[row] == 20
    assert preempt(harness, row, 4) == [4]
    parent = harness.stories[1000].new
    child = harness.add(
        replace(new_sequence(9, prompt=parent.prompt.tolist(), max_tokens=4), fork_of=parent.request_id)
    )
    batch = harness.submitted()
    assert (batch.rows.tolist(), batch.start.tolist(), batch.copies.source.size) == ([child], [13], 1)
    harness.land()
    harness.finish()


def test_who_shares_a_beginning_keeps_it_when_the_other_gives_it_up() -> None:
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    rows = [harness.add(new_sequence(i, prompt=[*range(5, 17), 50 + i], max_tokens=8)) for i in range(2)]
    while min(harness.engine.table.num_computed[rows]) < 13:
        harness.step()
    used = harness.engine.blocks.num_used
    preempt(harness, rows[0], 2)
    harness.land_copies()
    preempt(harness, rows[0], 0)
    harness.land_copies()
    assert harness.engine.blocks.num_used == used - 1, "its own last block; three are the other's too"
    sent(harness)


def test_a_limit_moves_what_a_parked_row_holds() -> None:
    """Without host memory, where a row that gives way may keep its beginning too: its blocks are 8 and 9."""
    harness = make_harness(num_blocks=24, max_batch_tokens=50, prefix_caching=False)
    rows = [harness.add(new_sequence(i, num_prompt=14, max_tokens=12)) for i in range(3)]
    harness.step()
    preempt(harness, rows[2], 2, PreemptHow.RECOMPUTE)
    table = harness.engine.blocks.block_table
    assert table[rows[2], :2].tolist() == [8, 9]
    harness.cancel(harness.stories[1000])
    harness.engine.memory.limit(8)
    assert harness.stepped().rows.tolist() == [rows[1]]
    assert where(harness, rows[2]) == (Status.PREEMPTED, 2, 8, 0)
    assert (table[rows[2], :2] < 8).all()
    assert harness.engine.blocks.is_within_limit
    harness.finish()


def test_another_executor_knows_no_beginning() -> None:
    harness = make_harness(num_blocks=24)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=12))
    harness.step()
    preempt(harness, row, 2, PreemptHow.RECOMPUTE)
    harness.change_executor(24)
    assert (harness.engine.blocks.num_used, where(harness, row)) == (0, (Status.PREEMPTED, 0, 0, 0))
    harness.finish()


# Nobody waits for what a parked row holds


def test_who_runs_takes_what_parked_rows_hold_before_anybody_else_gives_way() -> None:
    """9 blocks; both hold 4 when the second gives way. The first grows to 7: the second has to give two, one by one."""
    harness = make_harness(num_blocks=9, prefix_caching=False, num_host_blocks=20)
    harness.add_all(2, num_prompt=12, max_tokens=16)
    assert sent(harness) == [(True, 1), (True, 1), (False, 2)]
    totals = harness.engine.totals
    assert (totals.num_preemptions, totals.num_recomputed_tokens) == (1, 0)


@pytest.mark.parametrize("num_shared", [16, 24, 32])
def test_two_that_begin_alike_do_not_push_each_other_out_for_ever(scheduler: str, num_shared: int) -> None:
    """Each needs KV for 17 tokens beyond what they share, in 5 blocks; there are 2 or 3 more than for one of them."""
    for num_blocks in range(num_shared // 4 + 7, num_shared // 4 + 9):
        harness = make_harness(scheduler, num_blocks=num_blocks, num_host_blocks=40, cost=per_token(1e-3))
        for name in range(2):
            prompt = [*range(2, 2 + num_shared), 60 + name, 60 + name]
            harness.add(new_sequence(name, prompt=prompt, max_tokens=16))
        harness.finish(max_steps=200)


@pytest.mark.parametrize("num_host_blocks", [2, 40])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_first_in_line_comes_in_whatever_others_hold(*, prefix_caching: bool, num_host_blocks: int) -> None:
    """20 blocks, of which four parked rows hold 4 each. The first in line needs 5, and 12 when it ends.

    Others give theirs up to the host, or if that is full they lose them.
    """
    harness = make_harness(
        num_blocks=40, max_batch_tokens=100, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks
    )
    rows = [harness.add(new_sequence(i, num_prompt=18, max_tokens=30)) for i in range(5)]
    harness.step()
    for row in rows:
        how = PreemptHow.SWAP if row in rows[1:3] else PreemptHow.RECOMPUTE
        preempt(harness, row, 4 if row != rows[0] else 0, how)
    harness.land_copies()
    blocks = harness.engine.blocks
    blocks.drop_contents(np.arange(40, dtype=np.int32)[(blocks.refcount == 0) & blocks.index.is_named])
    blocks.reserve(np.flatnonzero(blocks.refcount == 0)[:20].astype(np.int32), "somebody else")
    assert (blocks.num_used, blocks.num_free) == (36, 4)
    ends: list[int] = []
    while harness.engine.table.num_sequences:
        harness.fill()
        harness.check_going_on()
        harness.step()
        ends += [story.row for story in harness.stories.values() if story.finish and story.row not in ends]
    assert ends[0] == rows[0]
    blocks.unpin("somebody else")
    harness.judge()
    harness.check_empty()
