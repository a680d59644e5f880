"""The contract of all schedulers on random moments; and each rule of those that serve who comes first, with arithmetic.

Nobody's turn is over in them, so round-robin does as the others do. Andes: `test_policy_andes.py`.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling import chunked, fcfs, round_robin
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from services.worker.scheduling.view import CachedPrefix, Limits, PreemptHow, SchedulerView
from shared.api_keys import Tier
from shared.systems import SYSTEMS
from tests.support.engine_builders import FIRST_COME
from tests.support.engine_views import (
    Row,
    answer,
    check_contract,
    chosen,
    decide,
    decoding,
    host_view,
    make_view,
    parked,
    prefilling,
    random_view,
    with_sides,
)


@pytest.fixture(params=FIRST_COME)
def scheduler(request: pytest.FixtureRequest) -> str:
    """Each of those that serve who comes first."""
    return str(request.param)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(sorted(SCHEDULERS)), st.integers(0, 2**32 - 1))
def test_every_answer_keeps_the_contract(scheduler: str, seed: int) -> None:
    view = random_view(np.random.default_rng(seed))
    output = decide(scheduler, view)
    takes_all_alike = not make_scheduler(scheduler).best_effort_gives_way or (view.columns.tier != Tier.FLEX).all()
    if output.preempt.size and scheduler in FIRST_COME and takes_all_alike:
        kept = view.running.size - output.preempt.size
        assert output.preempt.tolist() == view.running[kept:].tolist(), "the newest give way"
        assert kept >= 1, "the first running row stays"
        assert output.reason == "kv-full"
        assert (output.preempt_how == PreemptHow.RECOMPUTE).all()
        assert set(output.rows.tolist()) <= set(view.running.tolist()), "nobody comes in while others give way"


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(set(SCHEDULERS) - {"class-round-robin"})), st.integers(0, 2**32 - 1))
def test_the_same_view_gives_the_same_answer(scheduler: str, seed: int) -> None:
    policy, view = make_scheduler(scheduler), random_view(np.random.default_rng(seed))
    first, second = policy.schedule(view), policy.schedule(view)
    assert chosen(first) == chosen(second)
    assert first.preempt.tolist() == second.preempt.tolist()


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_chunked_never_stalls_a_decode_that_stays(seed: int) -> None:
    """Stall-free: each running row with one token to compute is in the step, up to the limits of the step."""
    view = random_view(np.random.default_rng(seed))
    output, columns = decide("chunked", view), view.columns
    known = columns.num_prompt + columns.num_output
    waits = [
        row
        for row in view.running.tolist()
        if known[row] - columns.num_computed[row] == 1 and row not in output.rows and row not in output.preempt
    ]
    full = min(view.limits.max_batch_rows, view.limits.max_batch_tokens)
    stuck = not (known[output.rows] - columns.num_computed[output.rows] == 1).any()  # even the first has no room
    assert not waits or output.rows.size >= full or stuck


def test_chunked_fills_the_step_with_prefill_after_the_decodes() -> None:
    """32 tokens: 2 decodes, the 10 left of a prompt under way, and 20 of a new prompt of 50."""
    view = make_view(
        running=[decoding(9), prefilling(30, 20), decoding(5)], waiting=[parked(50), parked(5)], max_batch_tokens=32
    )
    output = decide("chunked", view)
    assert chosen(output) == [(0, 1), (2, 1), (1, 10), (3, 20)]
    assert output.reason == "mixed"


def test_fcfs_prefills_whole_prompts_and_lets_decodes_wait() -> None:
    """32 tokens: prompts of 20 and 10 fit, the third of 5 does not."""
    view = make_view(running=[decoding(9)], waiting=[parked(20), parked(10), parked(5)], max_batch_tokens=32)
    output = decide("fcfs", view)
    assert chosen(output) == [(1, 20), (2, 10)]
    assert output.reason == "prefill"


def test_fcfs_decodes_when_nothing_waits() -> None:
    output = decide("fcfs", make_view(running=[decoding(9), decoding(5)]))
    assert chosen(output) == [(0, 1), (1, 1)]
    assert output.reason == "decode"


def test_fcfs_runs_a_prompt_longer_than_a_step_in_pieces_of_its_own() -> None:
    """A prompt of 70 in steps of 32: it opens a step, goes on before all others, and shares the step that ends it."""
    first = decide("fcfs", make_view(running=[decoding(9)], waiting=[parked(70), parked(5)]))
    assert chosen(first) == [(1, 32)]
    second = decide("fcfs", make_view(running=[decoding(9), prefilling(70, 32)], waiting=[parked(5)]))
    assert chosen(second) == [(1, 32)]
    third = decide("fcfs", make_view(running=[decoding(9), prefilling(70, 64)], waiting=[parked(5)]))
    assert chosen(third) == [(1, 6), (2, 5)]


def test_fcfs_does_not_cut_a_prompt_that_fits_a_step_of_its_own() -> None:
    view = make_view(waiting=[parked(20), parked(30)], max_batch_tokens=32)
    assert chosen(decide("fcfs", view)) == [(0, 20)]


def test_preempted_rows_come_before_waiting_ones_and_order_is_kept(scheduler: str) -> None:
    view = make_view(preempted=[parked(6), parked(7)], waiting=[parked(3)])
    assert chosen(decide(scheduler, view)) == [(0, 6), (1, 7), (2, 3)]


def test_nobody_overtakes_a_row_that_does_not_fit(scheduler: str) -> None:
    """Room for 8 blocks, one of them headroom for the row that runs; the first needs ceil(31 / 4) = 8."""
    view = make_view(running=[decoding(5)], waiting=[parked(30), parked(3)], free_blocks=8)
    assert chosen(decide(scheduler, view)) == [(0, 1)]


def test_a_row_is_admitted_only_if_all_its_known_tokens_fit(scheduler: str) -> None:
    """A step of 8 tokens; 27 known tokens and the next need 7 blocks, and the running row keeps one free."""
    for free_blocks, admitted in ((7, False), (8, True)):
        view = make_view(running=[decoding(5)], waiting=[parked(27)], free_blocks=free_blocks, max_batch_tokens=8)
        assert (1 in decide(scheduler, view).rows) is admitted


def test_blocks_promised_to_a_prefill_under_way_are_not_given_to_others(scheduler: str) -> None:
    """The prefill holds 2 blocks and needs 8 more for its 40 tokens; 12 free leave 4, less 1: the new row needs 4."""
    view = make_view(running=[prefilling(40, 8)], waiting=[parked(12)], free_blocks=12, max_batch_tokens=64)
    assert 1 not in decide(scheduler, view).rows
    view = make_view(running=[prefilling(40, 8)], waiting=[parked(12)], free_blocks=13, max_batch_tokens=64)
    assert 1 in decide(scheduler, view).rows


def test_a_row_alone_may_use_every_block(scheduler: str) -> None:
    """28 known tokens fill 7 blocks; nobody runs, so no headroom is kept."""
    assert chosen(decide(scheduler, make_view(waiting=[parked(28)], free_blocks=7))) == [(0, 28)]
    view = make_view(waiting=[parked(28)], free_blocks=7, num_in_flight=1)
    assert not decide(scheduler, view).rows.size


def test_only_as_many_give_way_as_needed_and_the_newest_first(scheduler: str) -> None:
    """Rows 0, 1, 2 stand at a block border and no block is free; row 3 gives 1, row 2 gives 2: three for two."""
    view = make_view(running=[decoding(8), decoding(4), decoding(8), decoding(3)], free_blocks=0)
    assert answer(decide(scheduler, view)) == ([2, 3], [(0, 1), (1, 1)])


def test_pinned_blocks_do_not_count_as_freed(scheduler: str) -> None:
    """Row 0 needs a block; row 2's only block is pinned, so row 1 gives way too."""
    view = make_view(running=[decoding(8), decoding(3), decoding(3)], free_blocks=0, pinned={2: 1})
    assert decide(scheduler, view).preempt.tolist() == [1, 2]


def test_the_first_prefill_is_rescued_when_others_hold_all_blocks(scheduler: str) -> None:
    """Row 0 needs 3 blocks for the 12 tokens left; of the others row 2 gives 2 and row 1 two more."""
    view = make_view(running=[prefilling(20, 8), prefilling(20, 8), prefilling(20, 8)], free_blocks=0)
    assert answer(decide(scheduler, view)) == ([1, 2], [(0, 12)])


def test_a_decode_that_gives_way_is_not_forgotten_when_the_first_prefill_is_rescued(scheduler: str) -> None:
    """Row 1 needs a second block, none is free, so it gives its own; that one becomes row 0's third."""
    view = make_view(running=[prefilling(20, 8), decoding(4)], free_blocks=0)
    assert answer(decide(scheduler, view)) == ([1], [(0, 4)])


def test_nothing_is_done_while_blocks_in_flight_are_all_that_could_help(scheduler: str) -> None:
    view = make_view(running=[decoding(8)], free_blocks=0, num_in_flight=3)
    output = decide(scheduler, view)
    assert (output.rows.size, output.preempt.size, output.reason) == (0, 0, "nothing")


def test_no_more_rows_run_than_fit_a_step(scheduler: str) -> None:
    view = make_view(running=[decoding(5)] * 3, waiting=[parked(2)] * 3, max_batch_rows=4)
    output = decide(scheduler, view)
    assert [row for row in output.rows.tolist() if row >= 3] == [3]


def test_who_is_passed_over_takes_nobodys_place(scheduler: str) -> None:
    """One place is left in a step of 4 rows; two rows wait for what others compute, the third may come in."""
    coming = CachedPrefix(num_tokens=4, next_block=b"a", is_coming=True)
    view = make_view(
        running=[prefilling(9, 4)] * 3, waiting=[parked(9)] * 4, max_batch_rows=4, cached={3: coming, 4: coming}
    )
    assert [row for row in decide(scheduler, view).rows.tolist() if row >= 3] == [5]


def test_who_does_not_fit_lets_nobody_pass(scheduler: str) -> None:
    """First come, first served: 5 free blocks, the first needs 6, the second would need 1."""
    view = make_view(running=[prefilling(9, 8)], waiting=[parked(20), parked(2)], free_blocks=6)
    assert decide(scheduler, view).rows.tolist() == [0]


def test_nobody_gives_up_what_a_row_that_comes_in_shares(scheduler: str) -> None:
    """Row 0 shares 3 of its 4 blocks with row 2, whose 4 are lent; row 1 needs 6 of the 4 free ones."""
    cached = {0: CachedPrefix(num_tokens=12, num_shared_blocks=3)}
    rows = [parked(16), parked(20), parked(24, held=4)]
    output = decide(scheduler, make_view(preempted=rows, free_blocks=4, cached=cached))
    assert (chosen(output), output.preempt.tolist()) == ([(0, 4)], [])


def test_the_registry_has_a_scheduler_for_every_system() -> None:
    assert {system.scheduler for system in SYSTEMS.values()} <= set(SCHEDULERS)
    with pytest.raises(KeyError, match="no scheduler is called 'magic'; there are: fcfs, chunked, chunked-flex-last, "):
        make_scheduler("magic")


# Where blocks are shared


def test_nobody_opens_the_block_of_who_gives_way(scheduler: str) -> None:
    """Rows at a block border lack one each; the last row, from the right, has the only end that can be opened.

    It is enough for one. Of three the other two need its blocks, both of them, and the third sits out.
    """
    one, three = (make_view(running=[decoding(8)] * count + [decoding(5)], free_blocks=0) for count in (1, 3))
    assert answer(decide(scheduler, with_sides(one, [1]))) == ([], [(0, 1), (1, 1)])
    assert answer(decide(scheduler, with_sides(three, [3]))) == ([3], [(0, 1), (1, 1)])


@pytest.mark.parametrize("scheduler", [*FIRST_COME, "bros"])
def test_nobody_opens_the_block_of_who_leaves_for_the_host(scheduler: str) -> None:
    """Row 2 goes for row 1, who lacks a block in the next step; so row 0 lacks one until the copy is made."""
    view = make_view(running=[decoding(8), decoding(7), decoding(5)], free_blocks=0, host=host_view())
    output = decide(scheduler, with_sides(view, [2]))
    assert answer(output) == ([2], [(1, 1)])
    assert output.preempt_how.tolist() == [PreemptHow.SWAP]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(SCHEDULERS)), st.booleans(), st.integers(0, 2**32 - 1))
def test_where_blocks_are_shared_every_answer_keeps_the_contract(scheduler: str, swaps: bool, seed: int) -> None:
    """Rows shortly before a block border and at it."""
    random = np.random.default_rng(seed)
    contexts = random.integers(6, 10, size=random.integers(2, 9)).tolist()
    host, num_free = host_view() if swaps else None, int(random.integers(3))
    view = make_view(running=[decoding(context) for context in contexts], free_blocks=num_free, host=host)
    decide(scheduler, with_sides(view, np.flatnonzero(random.random(len(contexts)) < 0.5).tolist()))


# The step in which everybody decodes


def plain_view(random: np.random.Generator) -> SchedulerView:
    """Rows that decode, and now and then one that does not or that waits; blocks and limits about as they need them."""
    contexts = random.integers(1, 40, size=random.integers(0, 9)).tolist()
    running = [decoding(context) for context in contexts]
    if random.random() < 0.2:
        running.append(prefilling(12, 4))
    return make_view(
        running=running,
        waiting=[parked(5)] if random.random() < 0.2 else [],
        preempted=[parked(5)] if random.random() < 0.1 else [],
        free_blocks=int(random.integers(0, 20)),
        max_batch_rows=int(random.integers(4, 12)),
        max_batch_tokens=int(random.choice([6, 8, 32])),
        host=host_view() if random.random() < 0.3 else None,
    )


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(["chunked", "fcfs", "round-robin"]), st.integers(0, 2**32 - 1))
def test_the_short_way_to_a_step_of_decodes_gives_the_long_ways_answer(scheduler: str, seed: int) -> None:
    view = plain_view(np.random.default_rng(seed))
    output = plain_decode(view)
    if output is None:
        return
    check_contract(view, output)
    module = {"chunked": chunked, "fcfs": fcfs, "round-robin": round_robin}[scheduler]
    with patch.object(module, "plain_decode", lambda _: None):
        long_way = make_scheduler(scheduler).schedule(view)
    assert chosen(output) == chosen(long_way)
    assert (output.reason, output.preempt.size, output.resume.size) == ("decode", 0, 0)
    assert (long_way.reason, long_way.preempt.size, long_way.resume.size) == ("decode", 0, 0)


def test_the_short_way_is_open_only_where_nothing_is_to_be_decided() -> None:
    rows = [decoding(7), decoding(8), decoding(9)]
    assert plain_decode(make_view(running=rows, free_blocks=6, max_batch_rows=3, max_batch_tokens=3)) is not None
    closed = {
        "nobody": make_view(),
        "somebody waits": make_view(running=rows, waiting=[parked(1)]),
        "somebody was preempted": make_view(running=rows, preempted=[parked(1)]),
        "a prompt is under way": make_view(running=[*rows, prefilling(9, 4)]),
        "too few places": make_view(running=rows, max_batch_rows=2),
        "too few tokens": make_view(running=rows, max_batch_tokens=2),
        "memory may be short": make_view(running=rows, free_blocks=5),
        "several lanes": replace(make_view(running=rows), limits=Limits(32, 8, 2)),
    }
    assert [why for why, view in closed.items() if plain_decode(view) is not None] == []


def went_on(num_prompt: int, num_output: int) -> Row:
    """A row that ran elsewhere."""
    return num_prompt, num_output, 0, 0


@pytest.mark.parametrize("scheduler", ["chunked", "andes", "sluice", "lqsf", "tokenflow"])
def test_who_comes_with_its_kv_and_text_does_not_wait_for_prompts(scheduler: str) -> None:
    """Two prompts have begun and take all that a step has; of the rows that wait one ran elsewhere, and lacks a bit."""
    here = {4: CachedPrefix(48, 12)}
    running, waiting = [decoding(9), prefilling(90, 20), prefilling(90, 10)], [parked(50), went_on(40, 13)]
    view = make_view(running=running, waiting=waiting, max_batch_tokens=32, cached=here)
    steps = dict(chosen(decide(scheduler, view)))
    assert (steps[0], steps[4]) == (1, 5)


@pytest.mark.parametrize("scheduler", ["chunked", "tokenflow"])
@pytest.mark.parametrize(
    ("row", "found", "tier"),
    [
        (parked(53), 48, Tier.DEFAULT),  # a prompt that somebody else had before
        (went_on(40, 13), 44, Tier.DEFAULT),  # more than two blocks of 4 are lacking
        (went_on(40, 13), 0, Tier.DEFAULT),  # its worker died: all of it is computed again
        (went_on(40, 13), 48, Tier.FLEX),
    ],
)
def test_others_that_wait_let_prompts_go_on(scheduler: str, row: Row, found: int, tier: Tier) -> None:
    view = make_view(
        running=[decoding(9), prefilling(90, 20)], waiting=[row], max_batch_tokens=32, cached={2: CachedPrefix(found)}
    )
    tiers = np.array([Tier.DEFAULT, Tier.DEFAULT, tier], dtype=np.uint8)
    view = replace(view, columns=replace(view.columns, tier=tiers))
    steps = dict(chosen(decide(scheduler, view)))
    assert 2 not in steps
    assert steps[1] == 31


@pytest.mark.parametrize("scheduler", ["chunked", "andes", "sluice"])
def test_who_comes_with_its_kv_takes_no_memory_that_is_promised(scheduler: str) -> None:
    running = [decoding(9), prefilling(90, 20, held=5)]
    view = make_view(
        running=running, waiting=[went_on(40, 13)], max_batch_tokens=32, free_blocks=20, cached={2: CachedPrefix(48)}
    )
    assert 2 not in dict(chosen(decide(scheduler, view)))
