"""KV on its way to the host and back: texts stay, memory is conserved, whatever happens to the row meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from services.worker.sequences.table import Hold, Status
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.host_moves import preempt, sent, until_copy


def two_that_fit_once(*, num_host_blocks: int = 20, num_blocks: int = 9, prefix_caching: bool = True) -> EngineHarness:
    """Two sequences of 12 + 16 - 1 = 27 tokens, 7 blocks each, where 9 blocks are: the second has to go for a while."""
    harness = make_harness(num_blocks=num_blocks, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks)
    harness.add_all(2, num_prompt=12, max_tokens=16)
    return harness


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_sequence_goes_to_the_host_and_comes_back_without_computing_anything_again(*, prefix_caching: bool) -> None:
    harness = two_that_fit_once(prefix_caching=prefix_caching)
    harness.finish()
    stats = take_stats(harness.engine)
    assert (stats.totals.num_preemptions, stats.totals.num_swap_outs, stats.totals.num_swap_ins) == (1, 1, 1)
    assert stats.totals.num_recomputed_tokens == 0
    assert stats.totals.swapped_out_bytes == stats.totals.swapped_in_bytes > 0
    assert stats.totals.swapped_out_bytes % 1024 == 0
    assert 0 < stats.totals.num_brought_back_tokens <= 4 * stats.totals.swapped_in_bytes // 1024
    assert stats.totals.num_given_up_tokens == 0
    assert stats.totals.stalled_s > 0


def test_blocks_are_free_only_when_the_copy_is_done() -> None:
    harness = two_that_fit_once()
    row = until_copy(harness, to_host=True)
    table, blocks = harness.engine.table, harness.engine.blocks
    copy = harness.host_copies[0]
    free = blocks.num_free
    assert table.status[row] == Status.PREEMPTED
    assert (table.held_blocks[row], copy.device.size) == (3, 1), "only as many go as are needed"
    assert (blocks.refcount[copy.device] == 0).all()
    assert (blocks.pins[copy.device] == 1).all()
    assert take_stats(harness.engine).num_used_host_blocks == copy.host.size
    harness.land_copy()
    assert blocks.num_free == free + copy.device.size
    stats = take_stats(harness.engine)
    assert stats.num_used_host_blocks == copy.host.size, "the row keeps them"
    assert stats.num_demanded_blocks == copy.host.size, "it needs them again on the device"
    assert stats.num_uncomputed_blocks == 0, "but nothing of them is computed again"


def test_who_comes_back_runs_only_when_its_kv_is_there() -> None:
    harness = two_that_fit_once(prefix_caching=False)
    row = until_copy(harness, to_host=False)
    table, copy = harness.engine.table, harness.host_copies[0]
    assert table.status[row] == Status.RUNNING
    assert table.num_computed[row] == 4 * (table.held_blocks[row] - copy.device.size)
    assert harness.submit() is None, "nobody else is left to run"
    harness.land_copy()
    assert table.num_computed[row] == table.num_known[row] - 1
    assert take_stats(harness.engine).num_used_host_blocks == 0
    batch = harness.submitted()
    assert (batch.rows.tolist(), batch.num_tokens.tolist()) == ([row], [1])
    harness.finish()


@pytest.mark.parametrize("to_host", [True, False])
def test_a_cancel_in_the_middle_of_a_copy_keeps_its_blocks_until_it_is_done(*, to_host: bool) -> None:
    harness = two_that_fit_once(prefix_caching=False)
    row = until_copy(harness, to_host=to_host)
    story = next(story for story in harness.stories.values() if story.row == row)
    copy = harness.host_copies[0]
    assert harness.cancel(story)
    assert story.finish is FinishReason.CANCELLED
    swapping = harness.engine.swapping
    assert swapping is not None
    assert (harness.engine.blocks.pins[copy.device] == 1).all()
    assert swapping.host.num_free == swapping.host.num_usable - copy.host.size
    harness.add(new_sequence(7, num_prompt=4, max_tokens=3))  # it may get the row, and has nothing to do with the copy
    harness.land_copy()
    harness.finish()
    harness.check_empty()


@pytest.mark.parametrize("to_host", [True, False])
def test_after_a_copy_that_fails_the_kv_is_computed_again(*, to_host: bool) -> None:
    harness = two_that_fit_once(prefix_caching=False)
    row = until_copy(harness, to_host=to_host)
    lost = harness.engine.table.host_tokens[row]
    harness.land_copy(done=False)
    assert harness.engine.table.host_tokens[row] == 0
    assert harness.engine.table.status[row] == Status.PREEMPTED
    harness.finish()
    stats = take_stats(harness.engine)
    assert stats.totals.num_failed_copies == 1
    assert 0 < stats.totals.num_given_up_tokens == stats.totals.num_recomputed_tokens <= lost


@pytest.mark.parametrize("seed", range(8))
def test_every_token_that_gave_way_is_brought_back_found_or_computed_again(seed: int) -> None:
    """Without prefix caching none is found: what a copy carries is brought back, what a failed one lost computed."""
    random = np.random.default_rng(seed)
    fails = 0.0 if seed < 2 else 0.3
    harness = make_harness(num_blocks=14, prefix_caching=False, num_host_blocks=int(random.integers(8, 40)))
    for name in range(8):
        harness.add(new_sequence(name, num_prompt=int(random.integers(3, 18)), max_tokens=int(random.integers(9, 25))))
    lost, block_size = 0, harness.engine.config.block_size
    while harness.engine.table.num_sequences:
        if harness.host_copies and (random.random() < 0.5 or not harness.flights):
            copy, done = harness.host_copies[0], bool(random.random() >= fails)
            swapping = harness.engine.swapping
            assert swapping is not None
            move = swapping._moves[copy.copy_id]
            harness.land_copy(done=done)
            lost += 0 if done else move.num_tokens - int(harness.engine.table.num_computed[move.row])
        harness.submit()
        if harness.flights:
            harness.land()
    totals = take_stats(harness.engine).totals
    assert lost <= totals.num_given_up_tokens <= totals.num_recomputed_tokens, "who lost a copy may lose more then"
    assert (lost > 0) == (totals.num_failed_copies > 0)
    carried = totals.swapped_in_bytes // 1024 * block_size
    assert totals.num_brought_back_tokens <= carried
    if not fails:
        assert carried - totals.num_brought_back_tokens < max(totals.num_swap_ins, 1) * block_size
        assert totals.num_brought_back_tokens > 0
    harness.check_empty()


def test_a_full_host_leaves_recompute() -> None:
    harness = two_that_fit_once(num_host_blocks=2)
    harness.finish()
    stats = take_stats(harness.engine)
    assert (stats.totals.num_swap_outs, stats.totals.num_preemptions) == (0, 1)


def test_a_slow_link_leaves_recompute() -> None:
    harness = make_harness(num_blocks=9, num_host_blocks=20, block_copy_s=10.0, cost=per_token(0.001))
    harness.add_all(2, num_prompt=12, max_tokens=16)
    harness.drain()
    assert (harness.engine.totals.num_swap_outs, harness.engine.totals.num_preemptions) == (0, 1)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_pause_in_the_middle_of_a_copy_takes_the_memory_when_it_is_done(*, to_host: bool) -> None:
    """A silent dispatcher's sequences hold no device memory; on the host they may stay."""
    harness = two_that_fit_once()
    row = until_copy(harness, to_host=to_host)
    harness.engine.pause(0)
    harness.settle()
    harness.land_copies()
    assert harness.engine.table.held_blocks[row] == 0
    assert harness.submit() is None
    harness.engine.resume(0)
    harness.finish()


def test_a_child_waits_until_its_parents_prompt_is_back() -> None:
    """The fork comes while the parent's KV is being copied back; it shares it when it has arrived."""
    harness = make_harness(num_blocks=10, prefix_caching=False, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=12, max_tokens=16))
    harness.step()
    preempt(harness, row, 2)
    harness.land_copies()
    assert until_copy(harness, to_host=False) == row
    parent = harness.stories[1000].new
    child = replace(new_sequence(9, prompt=parent.prompt.tolist(), max_tokens=4), fork_of=parent.request_id)
    child_row = harness.add(child)
    assert harness.engine.table.hold[child_row] & Hold.FORK
    harness.land_copy()
    assert not harness.engine.table.hold[child_row] & Hold.FORK
    harness.finish()


def test_peaks_and_stalls_are_counted() -> None:
    """Steps of 50 ms, 9 blocks. Both prompts take 3 blocks; with 15 of 16 tokens each holds 4, and the second gives
    way, block by block: so all of them are used.
    """
    harness = two_that_fit_once()
    away_s = 0.0
    while harness.engine.table.num_sequences:
        before_s, was_away = harness.now_s, bool((harness.engine.table.status == Status.PREEMPTED).any())
        harness.step()
        away_s += (harness.now_s - before_s) * was_away
    stats = take_stats(harness.engine)
    assert stats.totals.peak_used_blocks == 9
    assert 9 < stats.totals.peak_demanded_blocks <= 14, "2 * 7 blocks at most"
    assert stats.totals.stalled_s == pytest.approx(away_s, abs=0.101)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_goes_again_is_copied_as_far_as_it_has_grown(*, prefix_caching: bool) -> None:
    """Blocks of 4: 14 tokens are three full ones and a rest, 22 later ones five and a rest."""
    harness = make_harness(num_blocks=30, prefix_caching=prefix_caching, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=30))
    harness.step()
    assert preempt(harness, row) == [0, 1, 2, 3]
    harness.land_copies()
    for _ in range(9):
        harness.step()
    assert harness.engine.table.num_computed[row] == 22
    assert preempt(harness, row) == [3, 4, 5], "the rest of before is a full block now"
    assert sent(harness)[0] == (True, 3)
    assert harness.engine.totals.swapped_out_bytes == 7 * 1024


def test_what_is_still_on_the_device_is_not_brought_back() -> None:
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=30))
    harness.step()
    preempt(harness, row)
    assert sent(harness) == [(True, 4), (False, 1)], "the full blocks are in the prefix cache"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_that_begin_alike_keep_one_copy(*, prefix_caching: bool) -> None:
    """Twelve tokens in common, three blocks; where rows share nothing on the device they share nothing there."""
    harness = make_harness(num_blocks=30, prefix_caching=prefix_caching, num_host_blocks=20)
    common = list(range(5, 17))
    rows = [harness.add(new_sequence(i, prompt=[*common, 50 + i], max_tokens=8)) for i in range(2)]
    while min(harness.engine.table.num_computed[rows]) < 13:
        harness.step()
    held = [int(count) for count in harness.engine.table.held_blocks[rows]]
    first = preempt(harness, rows[0])
    harness.land_copies()
    second = preempt(harness, rows[1])
    host = harness.engine.swapping.host if harness.engine.swapping is not None else None
    assert host is not None
    if prefix_caching:
        assert (first, second) == (list(range(held[0])), list(range(3, held[1])))
        assert host.num_used == sum(held) - 3
    else:
        assert (first, second) == (list(range(held[0])), list(range(held[1])))
        assert host.num_used == sum(held)
    sent(harness)


def test_nothing_to_copy_is_done_at_once() -> None:
    """A row of full blocks alone that has been there before."""
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=16, max_tokens=8))
    harness.step()
    table = harness.engine.table
    assert preempt(harness, row) == [0, 1, 2, 3]
    harness.land_copies()
    harness.engine._transitions.bring_back(row)  # all of it is in the prefix cache
    assert (table.status[row], table.num_computed[row], harness.host_copies) == (Status.RUNNING, 16, [])
    assert preempt(harness, row) == []
    assert (table.status[row], table.host_tokens[row], int(table.hold[row])) == (Status.PREEMPTED, 16, 0)
    assert sent(harness) == []


def test_a_copy_that_fails_is_found_by_nobody() -> None:
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=8))
    harness.step()
    preempt(harness, row)
    harness.land_copy(done=False)
    harness.step()
    assert preempt(harness, row) == [0, 1, 2, 3]
    sent(harness)


def test_two_that_leave_together_keep_one_copy_once_both_have_landed() -> None:
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    rows = [harness.add(new_sequence(i, prompt=[*range(5, 17), 50 + i], max_tokens=8)) for i in range(2)]
    while min(harness.engine.table.num_computed[rows]) < 13:
        harness.step()
    preempt(harness, rows[0])
    assert preempt(harness, rows[1])[:3] == [0, 1, 2]
    swapping = harness.engine.swapping
    assert swapping is not None
    held = swapping.host.num_used
    harness.land_copy(1)
    harness.land_copy(0)
    assert swapping.host.num_used == held - 3
    sent(harness)


def test_who_ends_with_an_error_leaves_nothing_on_the_host() -> None:
    """Nor does what another one was copying of the same blocks."""
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    rows = [harness.add(new_sequence(i, prompt=[*range(5, 17), 50 + i], max_tokens=30)) for i in range(2)]
    swapping = harness.engine.swapping
    assert swapping is not None
    while min(harness.engine.table.num_computed[rows]) < 13:
        harness.step()
    preempt(harness, rows[0])
    harness.land_copies()
    assert len(swapping.host.index) == 3
    while harness.engine.table.status[rows[0]] != Status.RUNNING or harness.host_copies:
        harness.step()
    for _ in range(30):
        if harness.stories[1000].finish is FinishReason.ERROR:
            break
        batch = harness.submitted()
        guilty = rows[0] in batch.rows.tolist()
        harness.land("bad luck" if guilty else None, blamed=(rows[0],) if guilty else ())
    assert harness.stories[1000].finish is FinishReason.ERROR
    assert len(swapping.host.index) == 0
    assert preempt(harness, rows[1])[:3] == [0, 1, 2]
    sent(harness)


def test_what_a_failed_copy_back_came_from_is_copied_anew() -> None:
    harness = make_harness(num_blocks=30, prefix_caching=False, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=14, max_tokens=8))
    harness.step()
    preempt(harness, row)
    harness.land_copies()
    while not harness.host_copies:
        harness.submit()
    harness.land_copy(done=False)
    harness.step()
    assert preempt(harness, row) == [0, 1, 2, 3]
    sent(harness)


def test_without_prefix_caching_names_end_with_the_sequence() -> None:
    harness = make_harness(num_blocks=30, prefix_caching=False, num_host_blocks=20)
    for name, cancels in ((0, False), (1, True)):
        row = harness.add(new_sequence(name, num_prompt=14, max_tokens=8))
        harness.step()
        preempt(harness, row)
        swapping = harness.engine.swapping
        assert swapping is not None
        if cancels:
            harness.cancel(harness.stories[1000 + name])
        harness.land_copies()
        assert len(swapping.host.index) == (0 if cancels else 3)
        sent(harness)
        assert len(swapping.host.index) == 0


def test_the_policy_is_asked_again_if_who_comes_back_is_there_at_once() -> None:
    """Nothing else runs, and no copy ends: nobody would wake the loop."""
    harness = make_harness(num_blocks=30, num_host_blocks=20)
    row = harness.add(new_sequence(0, num_prompt=16, max_tokens=8))
    harness.step()
    preempt(harness, row)
    harness.land_copies()
    assert harness.submitted().rows.tolist() == [row]
    assert not harness.host_copies
    harness.finish()


def test_no_copy_begins_while_a_batch_in_flight_copies_blocks() -> None:
    """It would read what has yet to be there, or fill what is written over then.

    One is on the host; another's blocks from 15 on move below with a batch of one of two lanes.
    """
    harness = make_harness(num_blocks=22, num_host_blocks=20, num_lanes=2, max_batch_tokens=200)
    parked = harness.add(new_sequence(0, num_prompt=40, max_tokens=8, ignore_eos=True))
    harness.add(new_sequence(1, num_prompt=43, max_tokens=12, ignore_eos=True))
    harness.step()
    harness.step()
    preempt(harness, parked)
    harness.land_copies()
    harness.engine.memory.limit(15)
    engine, swapping = harness.engine, harness.engine.swapping
    assert swapping is not None

    def seen() -> tuple[list[int], bool, bool]:
        """Who may come back, whether somebody may leave, and whether blocks found on the host may be brought."""
        view = engine._viewing.view(harness.now_s, engine.limits)
        assert view.host is not None
        return view.preempted.tolist(), view.host.free_blocks > 0, view.host.behind == swapping._behind

    assert seen() == ([parked], True, True)
    batch = harness.submitted()
    assert batch.copies.source.size > 0
    assert seen() == ([], False, False)
    assert not engine._viewing.may_leave, "nor is anything copied ahead"
    harness.land()
    assert seen() == ([parked], True, True)
    engine.memory.limit(None)
    harness.finish()
