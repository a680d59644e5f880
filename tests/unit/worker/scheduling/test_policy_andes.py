"""Andes: whose prompt comes first, who gives way, and how long a step may be, on small moments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from services.worker.scheduling.andes_settings import AndesSettings
from services.worker.scheduling.ranking import rank
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import PreemptHow, SchedulerOutput, SchedulerView
from shared.cost import CostModel
from tests.support.engine_views import Row, check_contract, chosen, decoding, host_view, make_view, parked, prefilling

NOW_S = 100.0
COST = CostModel(g0_s=0.01, b0_s=0.001, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""10 ms a step and 1 ms a token."""
READER = (1.0, 5.0)
"""First token within a second, 5 tokens a second."""


def moment(
    running: list[Row],
    waiting: list[Row] | None = None,
    *,
    waited_s: list[float],
    buffered: list[float] | None = None,
    readers: list[tuple[float, float]] | None = None,
    **view: Any,
) -> SchedulerView:
    """A view at `NOW_S`.

    Args:
        running: rows.
        waiting: the rows behind them.
        waited_s: since each row arrived.
        buffered: seconds of text that each reader has still; negative: so long without.
        readers: what each expects.
        **view: see `make_view`.
    """
    made = make_view(running=running, waiting=waiting or [], now_s=NOW_S, cost=COST, **view)
    ttft_s, speed = np.array(readers or [READER] * len(waited_s)).T
    num, waited = made.columns.num_output, np.array(waited_s)
    on_time_s = ttft_s + (num - 1) / speed
    last_s = np.maximum(waited + np.array(buffered or [0.0] * waited.size), on_time_s)
    last_s = np.where(num == 0, ttft_s - 1 / speed, last_s)
    columns = replace(
        made.columns,
        arrival_s=NOW_S - waited,
        qoe_ttft_s=ttft_s,
        qoe_speed=speed,
        qoe_gap_s=1 / speed,
        qoe_last_s=last_s,
        qoe_delay_sum_s=np.maximum(last_s - on_time_s, 0.0) * num,
    )
    return replace(made, columns=columns)


def decide(view: SchedulerView, **settings: Any) -> SchedulerOutput:
    output = make_scheduler("andes", **settings).schedule(view)
    check_contract(view, output)
    return output


def test_the_shorter_prompt_of_two_late_readers_is_computed_first() -> None:
    view = moment([], [parked(60), parked(10)], waited_s=[3, 3], max_batch_tokens=32)
    assert chosen(decide(view)) == [(1, 10), (0, 22)]


def test_a_new_prompt_goes_before_the_rest_of_a_long_one_under_way() -> None:
    view = moment([prefilling(3000, 1000)], [parked(10)], waited_s=[9, 0.5], free_blocks=900, max_batch_tokens=32)
    assert chosen(decide(view)) == [(1, 10), (0, 22)]


def test_while_memory_is_enough_nobody_gives_way() -> None:
    view = moment([decoding(8), decoding(8)], [parked(10)], waited_s=[9, 9, 5], buffered=[50, 50, 0], free_blocks=9)
    output = decide(view)
    assert not output.preempt.size
    assert {row for row, _ in chosen(output)} == {0, 1, 2}


def test_who_has_text_for_long_gives_way_to_who_waits() -> None:
    """Nobody who runs lacks a block. Row 0 is about to run out of text, row 2 has most, and either makes room."""
    rows, buffered = [decoding(18)] * 3, [0.2, 40, 60, 0]
    view = moment(rows, [parked(12)], waited_s=[9, 9, 9, 2], buffered=buffered, free_blocks=3)
    output = decide(view)
    assert output.preempt.tolist() == [2]
    assert set(output.rows.tolist()) == {0, 1, 3}


def test_nobody_gives_way_for_a_reader_who_gains_less() -> None:
    """The one who waits has a prompt so long that it would take all memory, and the others run out of text."""
    view = moment([decoding(6), decoding(6)], [parked(18)], waited_s=[5, 5, 0], buffered=[0.1, 0.1, 0], free_blocks=1)
    assert not decide(view).preempt.size


def test_who_runs_counts_more() -> None:
    """Two alike, and memory for one of them: changing places would be for nothing."""
    view = moment([decoding(17)], [parked(17)], waited_s=[20, 20], buffered=[-5, 0], free_blocks=1)
    assert not decide(view).preempt.size


def test_a_request_without_a_reader_comes_after_those_with_one_until_it_is_old() -> None:
    for waited_s, first in ((5.0, 1), (900.0, 0)):
        nobody = (np.nan, np.nan)
        view = moment([], [parked(10), parked(10)], waited_s=[waited_s, 1.5], readers=[nobody, READER])
        view = replace(view, limits=replace(view.limits, max_batch_tokens=10))
        assert chosen(decide(view))[0][0] == first


@pytest.mark.parametrize(("buffered_s", "num_tokens"), [(0.5, 687), (-9.0, 137), (2.0, 2000)])
def test_a_step_ends_before_a_reader_runs_out_of_text(buffered_s: float, num_tokens: int) -> None:
    """A token takes 1 ms; 2 decodes 12 ms. Text for 0.5 s lasts 0.7 s with the gap. Who is late gets 0.15 s."""
    view = moment(
        [decoding(8), decoding(8)],
        [parked(3000)],
        waited_s=[30, 30, 1],
        buffered=[buffered_s, 30, 0],
        free_blocks=900,
        max_batch_tokens=2002,
    )
    assert dict(chosen(decide(view)))[2] == pytest.approx(num_tokens, abs=1)


def test_the_least_step_can_be_set() -> None:
    view = moment([decoding(8)], [parked(3000)], waited_s=[30, 1], buffered=[-9, 0], free_blocks=900)
    view = replace(view, limits=replace(view.limits, max_batch_tokens=2000))
    short, long = (dict(chosen(decide(view, least_step_s=least_s)))[1] for least_s in (0.1, 0.4))
    assert long - short == pytest.approx(300, abs=1)


def test_objectives_change_who_comes_first() -> None:
    """Row 0 is spoilt already, row 1 perfect so far and short of time; row 0 is the worst."""
    view = moment([], [parked(10), parked(10)], waited_s=[40.0, 0.9], max_batch_tokens=10)
    first = {name: chosen(decide(view, objective=name))[0][0] for name in ("average", "max-min", "perfect")}
    assert first["max-min"] == 0
    assert first["average"] == first["perfect"] == 1


def test_by_gain_alone_length_does_not_matter() -> None:
    """Row 0 came later, so there is more of its experience to save, and is eight times as long."""
    view = moment([], [parked(80), parked(10)], waited_s=[1.0, 3.0], max_batch_tokens=10)
    by_gain = make_scheduler("lqsf").schedule(view)
    assert (chosen(decide(view))[0][0], chosen(by_gain)[0][0]) == (1, 0)


@pytest.mark.parametrize("wrong", [{"horizon_s": 0}, {"keeps": 0.5}, {"objective": "best"}, {"horizon": 3}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        make_scheduler("andes", **wrong)


SLOW_ROWS = CostModel(g0_s=0.01, b0_s=0.06, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""A step takes 60 ms for each row, so three make it as slow as a reader."""


def test_where_steps_are_too_slow_for_readers_some_sit_out_and_keep_their_memory() -> None:
    """Eight whose experience was perfect so far: with all of them in a step it would be nobody's for long."""
    view = moment([decoding(8)] * 8, waited_s=[2.4] * 8)
    slow = replace(view, cost=SLOW_ROWS)
    some = decide(slow, objective="perfect")
    for other in (decide(view, objective="perfect"), decide(slow, objective="perfect", num_batch_sizes=1)):
        assert other.rows.size == 8
    assert some.rows.size == 3, "in 190 ms each of them gets a token before it is read"
    assert not some.preempt.size
    assert some.holds
    assert some.next_look_s == pytest.approx(NOW_S + 0.2)


def test_nothing_is_decided_while_memory_and_steps_are_enough() -> None:
    """Selective triggering: the step is the plain one, until something happens."""
    view = moment([decoding(8)] * 3, waited_s=[9] * 3)
    output = decide(view)
    assert (output.rows.size, output.next_look_s, output.holds) == (3, np.inf, False)


def test_a_decision_holds_while_others_wait_for_memory_but_not_with_a_prompt_under_way() -> None:
    rows = [decoding(18)] * 3
    view = moment(rows, [parked(18)], waited_s=[4.5, 4.5, 4.5, 0], free_blocks=3)
    assert (decide(view).rows.size, decide(view).holds) == (3, True)
    assert not decide(view, holds_s=0).holds
    with_prompt = moment([*rows, prefilling(60, 20)], [parked(18)], waited_s=[4.5] * 4 + [0], free_blocks=12)
    assert not decide(with_prompt).holds


def test_the_refiner_lets_nobody_give_way_if_the_delay_costs_more() -> None:
    """Row 2 has most text, and would give way; but that it is computed again delays three readers without any text."""
    rows = [decoding(18), decoding(18), decoding(118)]
    for token_s, gives_way in ((0.001, True), (0.2, False)):
        cost = CostModel(g0_s=0.0, b0_s=token_s, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
        view = moment(rows, [parked(12)], waited_s=[4.5, 4.5, 5, 2], free_blocks=3)
        output = decide(replace(view, cost=cost), refines=True, keeps=1, num_batch_sizes=1)
        assert bool(output.preempt.size) == gives_way
        assert decide(replace(view, cost=cost), keeps=1, num_batch_sizes=1).preempt.size


def test_as_much_is_copied_away_as_who_waits_and_the_decodes_meanwhile_need() -> None:
    """Row 3 lacks one block of four; each of three rows of full blocks takes one while the copy is under way."""
    view = moment(
        [decoding(20)] * 3, [parked(12)], waited_s=[4.8, 4.8, 0.1, 2], free_blocks=6, host=host_view(), max_batch_rows=8
    )
    output = decide(view)
    assert output.preempt.tolist() == [2]
    assert output.preempt_how.tolist() == [PreemptHow.SWAP]
    assert output.preempt_kept.tolist() == [1], "of five"


def thinking(view: SchedulerView, row: int, speed: float) -> SchedulerView:
    """The view with a row that thinks, wanted at a speed; its tokens so far came in time, and none is ahead."""
    columns = {name: getattr(view.columns, name).copy() for name in ("qoe_gap_s", "thinks", "qoe_last_s")}
    columns["qoe_gap_s"][row], columns["thinks"][row] = 1 / speed, True
    columns["qoe_last_s"][row] = view.columns.qoe_ttft_s[row] + (view.columns.num_output[row] - 1) / speed
    delays_s = np.where(np.arange(len(columns["thinks"])) == row, 0.0, view.columns.qoe_delay_sum_s)
    return replace(view, columns=replace(view.columns, qoe_delay_sum_s=delays_s, **columns))


def test_a_step_does_not_end_for_who_thinks() -> None:
    """As a reader who is late row 0 leaves the step 0.15 s; thinking, and later still, it leaves it to row 1."""
    view = moment(
        [decoding(8), decoding(8)], [parked(3000)], waited_s=[30, 30, 1], buffered=[-9, 0.5, 0], free_blocks=900
    )
    view = replace(view, limits=replace(view.limits, max_batch_tokens=2002))
    assert dict(chosen(decide(view)))[2] == pytest.approx(137, abs=1)
    assert dict(chosen(decide(thinking(view, 0, 20.0))))[2] == pytest.approx(687, abs=1)


def test_nobody_sits_out_so_that_others_think_faster() -> None:
    """Sixty rows take 70 ms a step: too slow for a reader of 20 tokens per second."""
    view = moment([decoding(8)] * 60, waited_s=[9.0] * 60, buffered=[9.0] * 60, max_batch_rows=64, free_blocks=500)
    view = replace(view, limits=replace(view.limits, max_batch_tokens=500))
    assert not rank(thinking(view, 0, 20.0), AndesSettings())[0].is_slow
    fast = replace(view.columns, qoe_speed=view.columns.qoe_speed.copy(), qoe_gap_s=view.columns.qoe_gap_s.copy())
    fast.qoe_speed[0], fast.qoe_gap_s[0] = 20.0, 0.05
    assert rank(replace(view, columns=fast), AndesSettings())[0].is_slow


@pytest.mark.parametrize(("waited_s", "reader"), [(60.0, READER), (5.0, (np.nan, np.nan))])
def test_after_a_minute_of_thinking_a_row_is_served_before_who_has_text_and_before_nobody(
    waited_s: float, reader: tuple[float, float]
) -> None:
    """Both have 60 tokens, and there is memory for one. The reader of the other has text for 40 s."""
    rows = [(1, 60, 0, 0)] * 2
    for first in (0, 1):
        second, waited, buffered, readers = 1 - first, [waited_s] * 2, [40.0] * 2, [reader] * 2
        waited[first], buffered[first], readers[first] = 60.0, 0.0, READER
        view = moment(
            [], rows, waited_s=waited, buffered=buffered, readers=readers, free_blocks=17, max_batch_tokens=99
        )
        assert decide(thinking(view, first, 1.0)).rows.tolist() == [first], f"and not {second}"
