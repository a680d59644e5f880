"""Giving way to host memory: which way wastes less, who is sent when, and what waits for a copy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.recompute_or_swap import Leaving
from services.worker.scheduling.view import HostView, OnHost, PreemptHow
from tests.support.engine_builders import per_token
from tests.support.engine_views import (
    chosen,
    decide,
    decoding,
    host_view,
    make_view,
    parked,
    prefilling,
    random_view,
)

SWAPPING = ("chunked", "fcfs", "round-robin")


@pytest.fixture(params=SWAPPING)
def scheduler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def leaving(block_copy_s: float, *, free_blocks: int = 1000, num_queued: int = 0) -> Leaving:
    """Computing a token again takes 1 ms, so 100 tokens take 0.1 s; blocks of 4 slots make 25 of them."""
    host = HostView(free_blocks, 0, num_queued, np.zeros(0, dtype=np.int32), block_copy_s)
    return Leaving(host, cost=per_token(0.001))


# Which way wastes less


@pytest.mark.parametrize(("num_others", "break_even_s"), [(0, 0.002), (100, 0.004), (900, 0.02)])
def test_a_row_swaps_if_that_occupies_less_memory_for_nothing(num_others: int, break_even_s: float) -> None:
    """100 tokens are 25 blocks. Recompute: 0.1 s · (100 + others). Swap: 2 · 25 blocks · 100 tokens."""
    assert leaving(0.99 * break_even_s).swaps(25, 100, num_others)
    assert not leaving(1.01 * break_even_s).swaps(25, 100, num_others)


@pytest.mark.parametrize(("num_blocks", "break_even_s"), [(25, 0.002), (5, 0.01), (1, 0.05)])
def test_only_what_is_copied_takes_the_link(num_blocks: int, break_even_s: float) -> None:
    """Recompute: 0.1 s · 100 tokens. Swap: 2 · blocks · 100 tokens, since the others lie idle meanwhile."""
    assert leaving(0.99 * break_even_s).swaps(num_blocks, 100, 0)
    assert not leaving(1.01 * break_even_s).swaps(num_blocks, 100, 0)


def test_the_wait_for_the_link_counts() -> None:
    """Blocks of 1 ms, alone: 0.1 s to recompute, 2 · 25 ms to swap, so up to 50 blocks may be ahead of it."""
    assert leaving(0.001, num_queued=49).swaps(25, 100, 0)
    assert not leaving(0.001, num_queued=51).swaps(25, 100, 0)


def test_what_is_there_already_takes_neither_memory_nor_the_link() -> None:
    """Of 25 blocks 20 are on the host, 15 of them for others too: 5 go out, 10 are taken, 25 come back."""
    there = OnHost(num_blocks=20, num_kept_blocks=15)
    assert leaving(0.99 * 0.1 / 30).swaps(25, 100, 0, there)
    assert not leaving(1.01 * 0.1 / 30).swaps(25, 100, 0, there)
    assert leaving(0.0, free_blocks=10).swaps(25, 100, 0, there)
    assert not leaving(0.0, free_blocks=9).swaps(25, 100, 0, there)
    assert leaving(0.001, num_queued=70).swaps(25, 100, 0, there)
    assert not leaving(0.001, num_queued=71).swaps(25, 100, 0, there)
    assert leaving(0.001, num_queued=1000).swaps(25, 100, 0, OnHost(25, 25)), (
        "who has nothing to send waits for no link"
    )


def test_the_host_has_room_for_what_may_have_to_follow() -> None:
    """5 of 25 blocks go now."""
    assert leaving(0.0, free_blocks=25).swaps(5, 100, 0, num_lent_blocks=20)
    assert not leaving(0.0, free_blocks=24).swaps(5, 100, 0, num_lent_blocks=20)


def test_rows_sent_before_take_memory_and_the_link() -> None:
    """Each of three rows of 25 blocks waits for those before: 0, 25, 50 ms on top of 50, against 99 ms."""
    queue = leaving(0.001)
    queue_of_99 = [queue.swaps(25, 99, 0) for _ in range(4)]
    assert queue_of_99 == [True, True, False, False]
    full = leaving(0.0, free_blocks=60)
    assert [full.swaps(25, 100, 0) for _ in range(3)] == [True, True, False]
    assert full.swaps(10, 40, 0), "10 blocks are left"


def test_a_row_without_kv_has_nothing_to_move() -> None:
    assert not leaving(0.0).swaps(0, 0, 100)


def test_computing_long_contexts_again_costs_more_than_their_length() -> None:
    """1000 tokens make 500 500 pairs: 1.5005 s again, as long as 2 · 250 blocks of 3.001 ms take."""
    host = partial(HostView, 1000, 0, 0, np.zeros(0, dtype=np.int32))
    cost = per_token(0.001, pair_s=1e-6)
    assert Leaving(host(0.0030009), cost).swaps(250, 1000, 0)
    assert not Leaving(host(0.0030011), cost).swaps(250, 1000, 0)


def test_nobody_moves_where_nothing_says_that_computing_again_is_dear() -> None:
    host = HostView(1000, 0, 0, np.zeros(0, dtype=np.int32), 1e-9)
    assert not Leaving(host, None).swaps(25, 100, 0)


# What a step does


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(st.sampled_from(SWAPPING), st.integers(0, 2**32 - 1))
def test_every_answer_keeps_the_contract(scheduler: str, seed: int) -> None:
    view = random_view(np.random.default_rng(seed), swaps=True)
    output = decide(scheduler, view)
    victims = output.preempt[np.isin(output.preempt, view.running)]
    if victims.size:
        kept = view.running.size - victims.size
        assert sorted(victims.tolist()) == sorted(view.running[kept:].tolist()), "the newest give way"
        assert kept >= 1, "the first running row stays"
        assert output.reason == "kv-full"


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(("chunked", "fcfs")), st.integers(0, 2**32 - 1))
def test_without_room_on_the_host_all_is_as_without_a_host(scheduler: str, seed: int) -> None:
    plain, full = (random_view(np.random.default_rng(seed)) for _ in range(2))
    object.__setattr__(full, "host", host_view(free_blocks=0))
    one, other = decide(scheduler, plain), decide(scheduler, full)
    assert (chosen(one), one.preempt.tolist(), one.reason) == (chosen(other), other.preempt.tolist(), other.reason)


def test_the_newest_is_sent_one_step_before_the_blocks_run_out(scheduler: str) -> None:
    """Rows 0 and 1 need no block now and one each in the next step; one is free. Row 2 has 2 blocks."""
    rows = [decoding(7), decoding(7), decoding(6)]
    output = decide(scheduler, make_view(running=rows, free_blocks=1, host=host_view()))
    assert (output.preempt.tolist(), output.preempt_how.tolist()) == ([2], [PreemptHow.SWAP])
    assert chosen(output) == [(0, 1), (1, 1)]
    assert not decide(scheduler, make_view(running=rows, free_blocks=2, host=host_view())).preempt.size
    assert not decide(scheduler, make_view(running=rows, free_blocks=1)).preempt.size, "no host: not ahead of time"


def test_nobody_else_is_sent_while_blocks_are_coming(scheduler: str) -> None:
    """Row 1 lacks a block and sits the step out: two will be free when the copy under way is done."""
    rows = [decoding(7), decoding(8), decoding(6)]
    host = host_view(leaving_blocks=3, num_leaving=3)
    output = decide(scheduler, make_view(running=rows, free_blocks=0, host=host))
    assert chosen(output) == [(0, 1), (2, 1)]
    assert not output.preempt.size


@pytest.mark.parametrize(("lent_blocks", "victims"), [(0, [2]), (1, [])])
def test_nobody_else_is_sent_while_more_can_be_taken_soon(scheduler: str, lent_blocks: int, victims: list[int]) -> None:
    """Two blocks are lacking, one comes with a copy; its row holds more, which can be taken then."""
    rows = [decoding(8), decoding(8), decoding(6)]
    host = host_view(leaving_blocks=1, num_leaving=1, lent_blocks=lent_blocks)
    assert decide(scheduler, make_view(running=rows, free_blocks=0, host=host)).preempt.tolist() == victims


def test_kv_is_dropped_where_moving_it_is_dearer(scheduler: str) -> None:
    """A slow link: nothing is done ahead of time, and in need row 2 is computed again; its 2 blocks serve two rows."""
    slow = host_view(block_copy_s=100.0)
    early = make_view(running=[decoding(7), decoding(7), decoding(6)], free_blocks=0, host=slow, cost=per_token(0.001))
    assert not decide(scheduler, early).preempt.size
    late = make_view(running=[decoding(8), decoding(8), decoding(6)], free_blocks=0, host=slow, cost=per_token(0.001))
    output = decide(scheduler, late)
    assert (output.preempt.tolist(), output.preempt_how.tolist()) == ([2], [PreemptHow.RECOMPUTE])
    assert chosen(output) == [(0, 1), (1, 1)]


def test_a_full_host_falls_back_to_recompute(scheduler: str) -> None:
    """Three rows at a border, nothing free. Row 2 (2 blocks) fits the host, row 1 does not any more.

    Row 2's blocks come when its copy is done: enough for the two that stay, so nobody is dropped.
    """
    rows = [decoding(8), decoding(8), decoding(8)]
    output = decide(scheduler, make_view(running=rows, free_blocks=0, host=host_view(free_blocks=2)))
    assert (output.preempt.tolist(), output.preempt_how.tolist()) == ([2], [PreemptHow.SWAP])
    assert not output.rows.size, "everybody lacks a block"
    output = decide(scheduler, make_view(running=rows, free_blocks=0, host=host_view(free_blocks=1)))
    assert (output.preempt.tolist(), output.preempt_how.tolist()) == ([2], [PreemptHow.RECOMPUTE])
    assert chosen(output) == [(0, 1), (1, 1)]


def test_who_is_on_the_host_comes_back_first_and_is_not_computed(scheduler: str) -> None:
    """Row 1 has KV for 9 of 10 tokens, 3 blocks, and needs 3 and headroom; row 2 waits. 7 blocks are free, then 3."""
    view = partial(
        make_view, running=[decoding(5)], preempted=[parked(10)], waiting=[parked(3)], on_host={1: 9}, host=host_view()
    )
    output = decide(scheduler, view(free_blocks=7))
    assert output.resume.tolist() == [1]
    assert 2 in output.rows, "one more block for row 1, one for row 2, headroom for both"
    assert 1 not in output.rows
    output = decide(scheduler, view(free_blocks=3))
    assert (output.resume.size, chosen(output)) == (0, [(0, 1)]), "nobody passes it, small or not"


def test_a_row_on_its_way_back_counts_as_running(scheduler: str) -> None:
    """Row 1 comes back. It takes one of two places; of 3 blocks two are headroom, one short of what row 2 needs."""
    view = partial(make_view, running=[decoding(5), decoding(6)], waiting=[parked(3)], host=host_view(arriving=(1,)))
    assert 2 not in decide(scheduler, view(max_batch_rows=2)).rows
    assert 2 not in decide(scheduler, view(free_blocks=2)).rows
    assert 2 in decide(scheduler, view(free_blocks=3)).rows


def test_the_first_prefill_waits_for_a_copy_and_else_sends_others(scheduler: str) -> None:
    """Row 0 needs 3 more blocks, none is free: row 1 gives 2 and row 2 two, but only when they have been copied."""
    rows = [prefilling(20, 8), prefilling(20, 8), prefilling(20, 8)]
    output = decide(scheduler, make_view(running=rows, free_blocks=0, host=host_view()))
    assert sorted(output.preempt.tolist()) == [1, 2]
    assert (output.preempt_how == PreemptHow.SWAP).all()
    assert not output.rows.size
    waits = decide(scheduler, make_view(running=rows, free_blocks=0, host=host_view(leaving_blocks=1)))
    assert (waits.rows.size, waits.preempt.size) == (0, 0)


# What parked rows hold


def test_as_few_blocks_go_as_are_needed(scheduler: str) -> None:
    """Rows 0 and 1 lack one block each in the next step, and none is free: of row 2's five the last two go.

    The last of them is not full, so it goes in any case.
    """
    rows = [decoding(7), decoding(7), decoding(18)]
    output = decide(scheduler, make_view(running=rows, free_blocks=0, host=host_view()))
    assert (output.preempt.tolist(), output.preempt_kept.tolist()) == ([2], [3])
    output = decide(scheduler, make_view(running=rows, free_blocks=1, host=host_view()))
    assert (output.preempt.tolist(), output.preempt_kept.tolist()) == ([2], [4])


def test_parked_rows_give_before_a_running_one_does(scheduler: str) -> None:
    """Rows 0 and 1 will lack a block each. The last parked one has one left to give, row 2 then one of three."""
    view = make_view(
        running=[decoding(7), decoding(7)],
        preempted=[parked(30, held=3), parked(30, held=1)],
        free_blocks=0,
        on_host={2: 29},
        host=host_view(),
    )
    output = decide(scheduler, view)
    assert (output.preempt.tolist(), output.preempt_kept.tolist()) == ([2, 3], [2, 0])
    assert (output.preempt_how == PreemptHow.SWAP).all()


def test_with_a_full_host_what_is_lent_is_dropped_before_anybody_stops(scheduler: str) -> None:
    view = make_view(
        running=[decoding(8), decoding(8)],
        preempted=[parked(30, held=3)],
        free_blocks=0,
        on_host={2: 29},
        host=host_view(free_blocks=0),
    )
    output = decide(scheduler, view)
    assert (output.preempt.tolist(), output.preempt_how.tolist()) == ([2], [PreemptHow.RECOMPUTE])
    assert chosen(output) == [(0, 1), (1, 1)]


def test_the_first_in_line_has_what_others_hold_and_nobody_gives_for_nothing(scheduler: str) -> None:
    """Nobody runs. Row 0 needs 8 blocks and holds 2; 4 are free, and row 1 has 2."""
    view = partial(make_view, preempted=[parked(32, held=2), parked(20, held=2)], on_host={0: 31}, host=host_view())
    output = decide(scheduler, view(free_blocks=4))
    assert (output.preempt.tolist(), output.preempt_kept.tolist(), output.resume.size) == ([1], [0], 0)
    output = decide(scheduler, view(free_blocks=6))
    assert (output.preempt.size, output.resume.tolist()) == (0, [0])
    assert not decide(scheduler, view(free_blocks=3)).preempt.size, "it would not fit with them either"
    full = view(free_blocks=5, host=host_view(free_blocks=0))
    output = decide(scheduler, full)
    assert (output.preempt.tolist(), output.resume.tolist()) == ([1], [0]), "dropped blocks are free at once"
