"""Sluice: best effort takes nothing from readers, and has what they leave; nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.best_effort import Patience
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import Scheduler, SchedulerOutput, SchedulerView
from shared.api_keys import Tier
from shared.cost import CostModel
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import make_harness
from tests.support.engine_views import (
    check_contract,
    chosen,
    decoding,
    host_view,
    make_view,
    parked,
    prefilling,
    random_view,
)

NOW_S = 100.0
COST = CostModel(g0_s=0.01, b0_s=0.001, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""10 ms a step and 1 ms a token."""
FLEX, DEFAULT = Tier.FLEX, Tier.DEFAULT
BACK_AT_ONCE = 4000.0
"""`reserve_ratio` with which a row of ten tokens counts as back in 40 s: the reserve looks `reserve_s` ahead."""


def tiered(tiers: list[Tier], now_s: float = NOW_S, **view: Any) -> SchedulerView:
    """A view of rows of these tiers, the readers of which have just come, or have text for a minute."""
    made = make_view(now_s=now_s, cost=COST, **{"free_blocks": 100, **view})
    tier = np.array(tiers, dtype=np.uint8)
    num = made.columns.num_output
    columns = replace(
        made.columns,
        tier=tier,
        arrival_s=np.full(num.size, now_s),
        qoe_ttft_s=np.where(tier == FLEX, np.nan, 1.0),
        qoe_speed=np.where(tier == FLEX, np.nan, 5.0),
        qoe_gap_s=np.where(tier == FLEX, np.nan, 0.2),
        qoe_last_s=np.where(num == 0, 0.8, 60.0),
        qoe_delay_sum_s=np.zeros(num.size),
    )
    return replace(made, columns=columns)


def decide(view: SchedulerView, policy: Scheduler | None = None, **settings: Any) -> SchedulerOutput:
    output = (policy or make_scheduler("sluice", **settings)).schedule(view)
    check_contract(view, output)
    return output


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["sluice", "chunked-flex-last", "lookahead"]), st.integers(0, 2**32 - 1), st.booleans())
def test_best_effort_keeps_nothing_that_a_reader_lacks(scheduler: str, seed: int, swaps: bool) -> None:
    """Who of the readers runs gives way only once nobody of best effort holds what they would free.

    And nobody of best effort comes in while a reader whose turn it is does not.
    """
    view = random_view(np.random.default_rng(seed), swaps=swaps)
    output, columns = decide(view, make_scheduler(scheduler)), view.columns
    is_flex = columns.tier == FLEX
    gone, parked_rows = output.preempt, np.concatenate([view.preempted, view.waiting])
    if np.isin(gone, view.running[~is_flex[view.running]]).any():
        left = view.running[is_flex[view.running] & ~np.isin(view.running, gone)]
        assert not (view.blocks.freeable(left) > 0).any() or view.host is not None, "best effort goes first"
    comes = np.concatenate([output.rows, output.resume])
    if is_flex[comes[np.isin(comes, parked_rows)]].any():
        known = columns.num_prompt + columns.num_output
        lack = np.maximum(-(-known // view.block_size) - columns.held_blocks, 0)
        comes, free = comes[is_flex[comes]], view.free_blocks + view.blocks.freeable(gone).sum()
        out = parked_rows[~is_flex[parked_rows] & ~np.isin(parked_rows, [*output.rows, *output.resume])]
        found = [view.blocks.cached(row).num_shared_blocks for row in comes.tolist()]
        assert lack[comes].sum() - sum(found) + lack[out].sum() <= free, "what readers lack stays free"


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["sluice", "chunked-flex-last", "lookahead"]), st.integers(0, 2**32 - 1))
def test_a_reader_who_decodes_is_in_the_step_if_best_effort_is(scheduler: str, seed: int) -> None:
    view = random_view(np.random.default_rng(seed))
    output, columns = decide(view, make_scheduler(scheduler)), view.columns
    is_flex, known = columns.tier == FLEX, columns.num_prompt + columns.num_output
    decodes = view.running[(known - columns.num_computed)[view.running] == 1]
    lacks = columns.held_blocks * view.block_size <= columns.num_computed
    readers = decodes[~is_flex[decodes] & ~lacks[decodes]]
    if is_flex[output.rows].any():
        assert np.isin(readers, np.concatenate([output.rows, output.preempt])).all()


def test_a_document_yields_to_a_reader_in_the_step_in_which_he_comes() -> None:
    """Two documents hold all memory; the one that came last goes, and the reader's prompt is in the step."""
    view = tiered([FLEX, FLEX, DEFAULT], running=[decoding(18), decoding(18)], waiting=[parked(12)], free_blocks=2)
    output = decide(view)
    assert output.preempt.tolist() == [1]
    assert chosen(output) == [(0, 1), (2, 12)]


def test_prompts_of_readers_come_before_those_of_documents_that_were_begun() -> None:
    view = tiered([FLEX, DEFAULT], running=[prefilling(40, 4)], waiting=[parked(30)], max_batch_tokens=32)
    assert chosen(decide(view)) == [(1, 30), (0, 2)]


def test_a_document_yields_to_the_rest_of_a_prompt_that_was_begun() -> None:
    """The prompt lacks nine blocks; the document has nine, and needs no more for its next token."""
    view = tiered([DEFAULT, FLEX], running=[prefilling(40, 4), decoding(35)], free_blocks=0, max_batch_tokens=64)
    output = decide(view)
    assert output.preempt.tolist() == [1]
    assert chosen(output) == [(0, 36)]


@pytest.mark.parametrize(("free_blocks", "comes_back"), [(22, False), (30, True)])
def test_a_document_is_not_brought_back_into_what_a_reader_lacks(free_blocks: int, comes_back: bool) -> None:
    """The first reader takes the step's tokens; the second needs eight blocks in the next one, the document six."""
    waiting = [parked(32), parked(32)]
    view = tiered(
        [FLEX, DEFAULT, DEFAULT],
        preempted=[parked(20)],
        waiting=waiting,
        on_host={0: 20},
        host=host_view(),
        free_blocks=free_blocks,
    )
    output = decide(view, reserve_ratio=0)
    assert chosen(output) == [(1, 32)]
    assert (0 in output.resume) is comes_back


def test_a_document_takes_nothing_that_a_parked_reader_holds() -> None:
    """One reader takes the step's tokens and five blocks are left; the other holds five of six, the document needs six.

    Two of these five would be enough for the document.
    """
    view = tiered(
        [DEFAULT, FLEX, DEFAULT],
        preempted=[parked(24, held=5), parked(20)],
        waiting=[parked(32)],
        on_host={1: 20},
        host=host_view(),
        free_blocks=15,
    )
    columns = replace(view.columns, qoe_last_s=np.array([60.0, 0.8, 0.8]))  # who is parked has text
    output = decide(replace(view, columns=columns), reserve_ratio=0)
    assert chosen(output) == [(2, 32)]
    assert not output.preempt.size
    assert not output.resume.size


def test_no_more_documents_decode_than_leave_steps_as_fast_as_every_reader() -> None:
    """A row takes 60 ms and a step 10: three rows are faster than a token in 0.2 s, four are not."""
    slow = CostModel(g0_s=0.01, b0_s=0.06, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
    view = tiered([FLEX, FLEX, DEFAULT, FLEX, FLEX], running=[decoding(8)] * 5)
    assert decide(replace(view, cost=slow)).rows.tolist() == [2, 0, 1]
    assert decide(view).rows.size == 5


def test_documents_come_in_as_they_came() -> None:
    """Not the shortest first, which would keep the long ones waiting."""
    view = tiered([FLEX] * 3, waiting=[parked(20), parked(5), parked(10)], max_batch_tokens=27)
    assert chosen(decide(view)) == [(0, 20), (1, 5), (2, 2)]


def test_while_no_reader_comes_documents_have_all_memory_and_whole_steps() -> None:
    view = tiered([FLEX] * 3, waiting=[parked(200), parked(100), parked(95)], max_batch_tokens=400, free_blocks=104)
    assert chosen(decide(view)) == [(0, 200), (1, 100), (2, 95)]


def test_once_readers_come_memory_stays_free_for_them_and_steps_are_short() -> None:
    """100 blocks: the readers' four prompts of 11 tokens take 3 and 1 more each, and as much may come again.

    A second's step of documents is 100 ms long, 10 of which the step takes: 46 tokens beside 44 of readers.
    """
    tiers = [DEFAULT] * 4 + [FLEX] * 9
    view = tiered(tiers, waiting=[parked(11)] * 4 + [parked(40)] * 9, max_batch_tokens=4000, max_batch_rows=99)
    steps = decide(view, reserve_ratio=0)
    assert [tokens for row, tokens in chosen(steps) if row >= 4] == [40, 6]
    policy = make_scheduler("sluice", best_effort_step_s=10.0, reserve_ratio=BACK_AT_ONCE)
    assert [row for row, _ in chosen(decide(view, policy))].count(11) == 0, (
        "four blocks of a reader stay free, and more"
    )
    free = make_scheduler("sluice", best_effort_step_s=10.0, reserve_ratio=0)
    assert len(chosen(decide(view, free))) > len(chosen(decide(view, policy)))


def test_what_is_kept_free_fades_when_no_reader_comes_any_more() -> None:
    policy = make_scheduler("sluice", best_effort_step_s=10.0, reserve_ratio=BACK_AT_ONCE, reserve_s=30.0)
    readers = tiered([DEFAULT] * 4 + [FLEX], waiting=[parked(40)] * 4 + [parked(40)], max_batch_tokens=4000)
    decide(readers, policy)
    nobody = tiered([FLEX] * 5, now_s=NOW_S + 1, waiting=[parked(60)] * 5, max_batch_tokens=4000, free_blocks=85)
    later = replace(nobody, now_s=NOW_S + 400)
    assert len(chosen(decide(nobody, policy))) < len(chosen(decide(later, policy))) == 5


def crowd(now_s: float) -> SchedulerView:
    """A reader holds all memory and others wait, with a document that came before them."""
    waiting = [parked(30), *[parked(12)] * 5]
    return tiered([DEFAULT, FLEX, *[DEFAULT] * 5], now_s=now_s, running=[decoding(40)], waiting=waiting, free_blocks=8)


@pytest.mark.parametrize("patience_s", [60.0, 7.0])
def test_the_oldest_document_comes_first_once_it_has_been_that_for_long(patience_s: float) -> None:
    policy = make_scheduler("sluice", patience_s=patience_s)
    took = [now_s for now_s in np.arange(NOW_S, NOW_S + 100, 0.5) if 1 in decide(crowd(now_s), policy).rows]
    assert took
    assert took[0] == NOW_S + patience_s
    assert len(took) == int((100 - patience_s) / 0.5), "and stays the first until it ends"


def test_who_has_ended_is_the_oldest_no_more_though_nobody_has_come_into_its_place() -> None:
    """Else nobody would grow old until somebody does."""
    patience, chunked = Patience(0.0), make_scheduler("chunked")
    oldest: list[int | None] = []

    class Asking:
        reorders = best_effort_gives_way = False

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            rows = np.concatenate([view.running, view.preempted, view.waiting])
            oldest.append(patience.overdue(replace(view, cost=None), rows))
            return chunked.schedule(view)

    harness = make_harness(Asking())
    for number, max_tokens in enumerate((2, 9)):
        harness.add(new_sequence(number, num_prompt=4, max_tokens=max_tokens, tier=FLEX))
    rows = harness.engine.table.waiting.view.tolist()
    harness.finish()
    assert oldest[0] == rows[0]
    assert oldest[-1] == rows[1]


def test_a_document_of_hours_takes_a_twentieth_of_the_time_at_most() -> None:
    """Its prompt of 10 000 tokens takes 10 s: it has the first turn after 200 s."""
    view = tiered([DEFAULT, FLEX], running=[decoding(40)], waiting=[parked(10_000)], free_blocks=9_000)
    view = replace(view, limits=replace(view.limits, max_batch_rows=1))
    policy = make_scheduler("sluice")
    took = [s for s in range(0, 300, 10) if 1 in decide(replace(view, now_s=NOW_S + s), policy).rows]
    assert took[0] == 200


def with_limits(view: SchedulerView, ttft_s: list[float]) -> SchedulerView:
    return replace(view, columns=replace(view.columns, slo_ttft_s=np.array(ttft_s)))


@pytest.mark.parametrize(("limit_s", "first"), [(0.1, 0), (0.3, 1), (90.0, 0), (np.inf, 0)])
def test_who_can_keep_its_limit_comes_first_and_who_cannot_as_any_reader(limit_s: float, first: int) -> None:
    """Prompts of 20 and 200 ms. The long one comes first while its limit can be kept, and would not be without."""
    view = tiered([DEFAULT] * 2, waiting=[parked(20), parked(200)], max_batch_tokens=32)
    view = replace(view, columns=replace(view.columns, qoe_ttft_s=np.full(2, 50.0), qoe_last_s=np.full(2, 49.8)))
    assert chosen(decide(with_limits(view, [np.inf, limit_s])))[0][0] == first


@pytest.mark.parametrize(("tier", "first"), [(DEFAULT, 0), (Tier.PRIORITY, 1)])
def test_tier_priority_comes_before_all_others_however_much_it_takes(tier: Tier, first: int) -> None:
    """The second prompt is forty times as long as the first, and there is memory for one of them."""
    view = tiered([DEFAULT, tier, FLEX], waiting=[parked(10), parked(400), parked(4)], max_batch_tokens=400)
    assert chosen(decide(view))[0][0] == first


def test_tier_priority_keeps_its_memory_however_much_text_its_reader_has() -> None:
    """It gains nothing by more text for now; the newcomer gains all, and takes a fortieth of the memory."""
    rows = [decoding(390), decoding(10)]
    view = tiered([Tier.PRIORITY, DEFAULT, DEFAULT], running=rows, waiting=[parked(9)], free_blocks=0)
    assert 0 not in decide(view).preempt.tolist()


def test_a_step_ends_before_a_limit_per_token_is_missed() -> None:
    """The row that decodes had its token 150 ms ago and has to have one each 350.5 ms; its reader has text for long."""
    view = tiered([DEFAULT] * 2, running=[decoding(8)], waiting=[parked(3000)], max_batch_tokens=4000, free_blocks=999)
    slow = replace(view.columns, slo_tpot_s=np.array([0.3505, np.inf]), last_token_s=np.full(2, NOW_S - 0.15))
    assert chosen(decide(view))[1][1] == 3000
    assert chosen(decide(replace(view, columns=slow)))[1][1] == 189
