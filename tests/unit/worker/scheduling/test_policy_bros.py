"""BROS's scheduler: residuals and groups of tokens, the queues, the size of a batch, who gives way; and its rival."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.bros import BrosScheduler
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import PreemptHow, Scheduler, SchedulerOutput, SchedulerView
from shared.api_keys import Tier
from shared.cost import CostModel
from tests.support.engine_views import check_contract, chosen, decoding, host_view, make_view, parked, random_view

COST = CostModel(g0_s=0.005, b0_s=0.001, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""5 ms a step and 1 ms a token."""
FLEX, DEFAULT = Tier.FLEX, Tier.DEFAULT
NOW_S = 100.0


def tiered(tiers: list[Tier], **view: Any) -> SchedulerView:
    """A view of rows of these tiers, whose newest tokens have just come, or who have."""
    columns = {name: view.pop(name) for name in ("since_s", "slo_ttft_s", "slo_tpot_s", "num_output") if name in view}
    made = make_view(now_s=NOW_S, cost=COST, **{"free_blocks": 100, "max_batch_tokens": 512, **view})
    since_s = NOW_S - np.array(columns.pop("since_s", [0.0] * len(tiers)), dtype=np.float64)
    told: dict[str, Any] = {
        name: np.array(values, dtype=getattr(made.columns, name).dtype) for name, values in columns.items()
    }
    tier = np.array(tiers, dtype=np.uint8)
    moments = {"arrival_s": since_s, "last_token_s": since_s}
    return replace(made, columns=replace(made.columns, **{"tier": tier, **moments, **told}))


def decide(view: SchedulerView, policy: Scheduler | None = None, **chosen_settings: Any) -> SchedulerOutput:
    output = (policy or make_scheduler("bros", **chosen_settings)).schedule(view)
    check_contract(view, output)
    return output


def residuals(view: SchedulerView, **chosen_settings: Any) -> dict[int, float]:
    rows, residual_s = BrosScheduler(**chosen_settings)._by_residual(view)
    assert (np.diff(residual_s) >= 0).all(), "the least comes first"
    return dict(zip(rows.tolist(), residual_s.round(9).tolist(), strict=True))


def test_a_residual_is_what_is_left_of_the_limit_to_the_first_token_or_the_next() -> None:
    inf = float("inf")
    view = tiered(
        [DEFAULT] * 4 + [FLEX],
        running=[decoding(4), decoding(4)],
        preempted=[parked(9)],
        waiting=[parked(8), parked(8)],
        since_s=[0.05, 0.01, 0.3, 0.1, 9.0],
        slo_ttft_s=[0.4, 0.4, 0.5, inf, inf],
        slo_tpot_s=[0.1, inf, 0.2, 0.2, inf],
    )
    assert residuals(view, tpot_s=0.3, ttft_s=0.25) == {0: 0.05, 1: 0.29, 2: 0.2, 3: 0.15}
    readers = replace(view.columns, qoe_ttft_s=np.full(5, 1.0), qoe_speed=np.full(5, 5.0))
    assert residuals(replace(view, columns=readers)) == {0: 0.05, 1: 0.19, 2: 0.2, 3: 0.9}, "limits, then readers"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_the_queues_together_are_in_order(seed: int) -> None:
    """Polled as in the paper; the same as if all were sorted."""
    random = np.random.default_rng(seed)
    view = replace(random_view(random), now_s=NOW_S)
    size = view.columns.order.size
    view = replace(view, columns=replace(view.columns, last_token_s=NOW_S - random.random(size)))
    found = residuals(view)
    rows = np.concatenate([view.running, view.preempted, view.waiting])
    assert sorted(found) == sorted(rows[view.columns.tier[rows] != FLEX].tolist())


def test_the_limit_of_a_group_is_that_of_its_tokens_and_the_rest_of_it_takes_what_steps_take() -> None:
    """Groups of four: the first token is one by itself. Row 0 has had three of one, which began 0.5 s ago."""
    policy = BrosScheduler(group_tokens=4)
    running = [(1, 5, 5, 2), (1, 1, 1, 1)]
    view = tiered([DEFAULT] * 2, running=running, since_s=[0.5, 0.1], slo_tpot_s=[0.2, 0.2])
    policy.schedule(view)
    policy._period_s = 0.05
    columns = replace(view.columns, num_output=np.array([8, 1], dtype=np.int32), last_token_s=view.columns.last_token_s)
    rows, residual_s = policy._by_residual(replace(view, columns=columns))
    found = dict(zip(rows.tolist(), residual_s.round(9).tolist(), strict=True))
    assert found == {0: round(0.8 - 0.5 - 0 * 0.05, 9), 1: round(0.8 - 0.1 - 3 * 0.05, 9)}
    one = BrosScheduler()
    rows, residual_s = one._by_residual(view)
    assert residual_s.round(9).tolist() == [-0.3, 0.1], "groups of one: each token has its limit"


def test_groups_let_a_document_in_where_single_tokens_would_not() -> None:
    """A step with the document's prompt takes 0.2 s: more than a token may take, less than four of them."""
    view = tiered([DEFAULT, FLEX], running=[decoding(4)], waiting=[parked(200)], slo_tpot_s=[0.1, 0.1])
    assert chosen(decide(view))[1][1] < 100, "it is cut"
    assert chosen(decide(view, group_tokens=4)) == [(0, 1), (1, 200)]


def test_batches_grow_while_nobody_lacks_time_and_shrink_at_once() -> None:
    policy = BrosScheduler(base_rows=2)
    view = tiered([DEFAULT] * 2 + [FLEX] * 30, running=[decoding(4)] * 32, max_batch_rows=16)
    sizes = [decide(view, policy).rows.size for _ in range(5)]
    assert sizes == [2, 4, 8, 16, 16]
    late = tiered([DEFAULT] * 32, running=[decoding(4)] * 32, max_batch_rows=16, slo_tpot_s=[0.012] * 32)
    assert decide(late, policy).rows.size < 16
    assert decide(view, policy).rows.size == 2


def test_who_is_replaced_keeps_its_kv_and_its_residual_allows_a_step() -> None:
    """Two rows fit a batch; steps take 7 ms. Row 1 could wait for one; row 0 could not."""
    policy = BrosScheduler(base_rows=2)
    policy._period_s = 0.007
    tiers, running = [DEFAULT, DEFAULT, FLEX], [decoding(4), decoding(4), decoding(4)]
    view = tiered(tiers, running=running, slo_tpot_s=[0.012, 0.1, 0.1], max_batch_rows=2)
    output = decide(view, policy)
    assert chosen(output) == [(0, 1), (2, 1)]
    assert not output.preempt.size
    urgent = tiered(tiers, running=running, slo_tpot_s=[0.012, 0.012, 0.1], max_batch_rows=2)
    policy = BrosScheduler(base_rows=2)
    policy._period_s = 0.007
    assert chosen(decide(urgent, policy)) == [(0, 1), (1, 1)]


def test_best_effort_that_is_not_chosen_gives_way_first_then_that_which_is_then_who_has_time() -> None:
    """Each row holds 2 blocks, and the one who comes needs 3 and one in reserve."""
    running = [decoding(8, held=2)] * 4
    view = tiered([FLEX, FLEX, DEFAULT, DEFAULT, DEFAULT], running=running, waiting=[parked(10)], free_blocks=2)
    assert decide(view).preempt.tolist() == [1, 0]
    nobody = tiered(
        [DEFAULT] * 5,
        running=running,
        waiting=[parked(10)],
        free_blocks=4,
        max_batch_rows=3,
        since_s=[0.1, 0.05, 0.0, 0.15, 0.3],
    )
    output = decide(nobody)
    assert not np.isin(output.preempt, [3, 0]).any(), "who is nearest to its limit keeps what it has"


@pytest.mark.parametrize("first", [True, False])
def test_real_time_gives_way_to_a_first_token_and_not_to_who_comes_back(first: bool) -> None:
    """Two rows of 2 blocks leave 2; the third, who is late, lacks one more for the step after its own.

    Else the two would change places for each token, and both be late.
    """
    late = {"waiting": [parked(8)]} if first else {"preempted": [(7, 1, 0, 0)]}
    rows: dict[str, Any] = {"running": [decoding(7)] * 2, **late}
    view = tiered([DEFAULT] * 3, free_blocks=2, max_batch_rows=2, since_s=[0.1, 0.0, 9.0], **rows)
    output = decide(view)
    assert output.preempt.tolist() == ([1] if first else [])
    assert chosen(output)


def test_the_oldest_of_best_effort_grows_old_and_has_the_place_of_who_is_late() -> None:
    policy = make_scheduler("bros", patience_s=5.0)
    tiers = [DEFAULT] * 3 + [FLEX]
    view = tiered(tiers, running=[decoding(4)] * 4, max_batch_rows=2, slo_tpot_s=[0.0065] * 4)
    assert 3 not in decide(view, policy).rows
    later = replace(view, now_s=NOW_S + 6.0, columns=replace(view.columns, last_token_s=view.columns.last_token_s + 6))
    assert 3 in decide(later, policy).rows


def test_whoever_goes_to_the_host_takes_all_of_its_blocks_along_if_it_is_to() -> None:
    running = [decoding(16, held=4), decoding(16, held=4)]
    view = tiered([DEFAULT, FLEX, DEFAULT], running=running, waiting=[parked(4)], free_blocks=0, host=host_view())
    for scheduler, kept in (("bros", True), ("bros-whole", False)):
        output = decide(view, make_scheduler(scheduler))
        assert output.preempt.tolist() == [1]
        assert output.preempt_how.tolist() == [PreemptHow.SWAP]
        assert (output.preempt_kept[0] > 0) == kept


def test_classes_take_turns_step_by_step() -> None:
    policy = make_scheduler("class-round-robin")
    tiers = [DEFAULT, FLEX, DEFAULT, FLEX]
    view = tiered(tiers, running=[decoding(4), decoding(4)], waiting=[parked(8), parked(8)])
    steps = [sorted(row for row, _ in chosen(decide(view, policy))) for _ in range(4)]
    assert steps == [[0, 2], [1, 3], [0, 2], [1, 3]]
    alone = tiered([FLEX, FLEX], running=[decoding(4)], waiting=[parked(8)])
    assert [chosen(decide(alone, policy)) for _ in range(2)] == [[(0, 1), (1, 8)]] * 2, "a turn that is nobody's"


@pytest.mark.parametrize("scheduler", ["bros", "bros-whole"])
@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_every_answer_keeps_the_contract_when_it_knows_how_long_steps_take(
    scheduler: str, seed: int, swaps: bool
) -> None:
    random = np.random.default_rng(seed)
    view = replace(random_view(random, swaps=swaps), cost=COST, now_s=float(random.random()))
    decide(view, make_scheduler(scheduler))


def test_a_prompt_that_is_cut_takes_no_tokens_of_more_urgent_ones_that_wait() -> None:
    """Row 0's prompt, which has begun, has 4.9 s; row 1's, which has not, 0.2 s, and so has a step: 195 tokens."""
    urgent = {"since_s": [0.1, 0.1], "slo_ttft_s": [5.0, 0.3]}
    view = tiered([DEFAULT] * 2, running=[(1040, 0, 40, 400)], waiting=[parked(50)], **urgent)
    assert chosen(decide(view)) == [(1, 50), (0, 145)]


def test_kv_that_comes_back_from_the_host_is_none_of_the_tokens_to_which_a_prompt_is_cut() -> None:
    """Row 0's next token has 0.2 s, and its KV of 400 tokens is on the host; a step takes 5 ms and 1 ms a token."""
    limits = {"since_s": [0.1, 0.1], "num_output": [1, 0], "slo_ttft_s": [9.0, 5.0], "slo_tpot_s": [0.3, 0.3]}
    rows = {"preempted": [parked(400)], "waiting": [parked(1000)], "free_blocks": 1000}
    view = tiered([DEFAULT] * 2, host=host_view(), **rows, **limits)
    columns = replace(view.columns, host_tokens=np.array([400, 0], dtype=np.int32))
    output = decide(replace(view, columns=columns))
    assert output.resume.tolist() == [0]
    assert [row for row, _ in chosen(output)] == [1]
    assert 64 <= output.num_tokens[0] <= 195


def test_steps_last_as_long_as_they_are_foretold_however_seldom_somebody_asks() -> None:
    """The mean says whether somebody may be left out of a step: an idle minute, or steps under way, are not in it."""
    policy = BrosScheduler()
    view = tiered([DEFAULT] * 2, running=[decoding(4)] * 2)
    for second in range(200):
        policy.schedule(replace(view, now_s=NOW_S + second))
    assert policy._period_s == pytest.approx(0.007)
