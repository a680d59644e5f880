from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.qoe import QoeColumns, answer_qoe, initial_last_s
from sluice_client.qoe import QoeState, QoeTarget, final_qoe

REPEATABLE = settings(derandomize=True, deadline=None)
F64 = NDArray[np.float64]


def fresh(ttft_s: list[float], speed: list[float]) -> QoeColumns:
    ttft, rate = np.array(ttft_s, dtype=np.float64), np.array(speed, dtype=np.float64)
    return QoeColumns(
        ttft_s=ttft,
        speed=rate,
        num_tokens=np.zeros(len(ttft), dtype=np.int32),
        last_s=initial_last_s(ttft, rate),
        delay_sum_s=np.zeros(len(ttft)),
    )


def displayed(ttft: float, speed: float, delivered: list[float]) -> list[float]:
    """The definition: when the strict pacer shows each token."""
    shown: list[float] = []
    for i, at in enumerate(delivered):
        shown.append(max(ttft + i / speed, at, shown[-1] + 1 / speed if shown else -math.inf))
    return shown


def qoe_by_sums(ttft: float, speed: float, delivered: list[float], t: float, *, finished: bool) -> float:
    """The definition: sums over displayed and ideal instants up to t."""
    part = sum(t - at for at in displayed(ttft, speed, delivered) if at <= t)
    num_ideal = max(0, math.floor((t - ttft) * speed) + 1)
    if finished:
        num_ideal = min(num_ideal, len(delivered))
    whole = sum(max(0.0, t - (ttft + i / speed)) for i in range(num_ideal))
    return 1.0 if whole <= 0 else part / whole


TARGETS = st.tuples(st.floats(0.05, 10), st.floats(0.5, 20))
HISTORIES = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 4)), max_size=12)  # (gap before, tokens at once)
STREAMS = st.tuples(TARGETS, HISTORIES)


def play(streams: list[tuple[tuple[float, float], list[tuple[float, int]]]]) -> tuple[QoeColumns, list[list[float]]]:
    """Deliver every stream's history through the columns, all streams side by side; return each token's instant too."""
    columns = fresh([ttft for (ttft, _), _ in streams], [speed for (_, speed), _ in streams])
    now = np.zeros(len(streams))
    instants: list[list[float]] = [[] for _ in streams]
    for step in range(max((len(history) for _, history in streams), default=0)):
        counts = np.zeros(len(streams), dtype=np.int32)
        for row, (_, history) in enumerate(streams):
            if step < len(history):
                now[row] += history[step][0]
                counts[row] = history[step][1]
                instants[row] += [float(now[row])] * history[step][1]
        columns = columns.deliver(now, counts)
    return columns, instants


@given(st.lists(STREAMS, min_size=1, max_size=5), st.floats(0, 20), st.booleans())
@settings(REPEATABLE, max_examples=300)
def test_many_rows_at_once_agree_with_the_sums_of_the_definition(
    streams: list[tuple[tuple[float, float], list[tuple[float, int]]]], later_s: float, finished: bool
) -> None:
    columns, instants = play(streams)
    at = np.array([(times[-1] if times else 0.0) + later_s for times in instants])
    found = columns.qoe_at(at, np.full(len(streams), finished))
    for row, ((ttft, speed), _) in enumerate(streams):
        expected_area = sum(max(0.0, at[row] - ttft - i / speed) for i in range(400))
        if expected_area < 1e-6:
            continue  # the ratio of two roundings
        expected = qoe_by_sums(ttft, speed, instants[row], float(at[row]), finished=finished)
        assert found[row] == pytest.approx(expected, abs=1e-9 + 1e-12 / expected_area)
        delays = [s - (ttft + i / speed) for i, s in enumerate(displayed(ttft, speed, instants[row]))]
        assert columns.delay_sum_s[row] == pytest.approx(sum(delays), abs=1e-9)
        if delays:
            assert columns.last_s[row] == pytest.approx(displayed(ttft, speed, instants[row])[-1], abs=1e-9)


@given(st.lists(STREAMS, min_size=1, max_size=5), st.floats(0, 20), st.booleans())
@settings(REPEATABLE, max_examples=200)
def test_many_rows_at_once_agree_with_the_clients_state(
    streams: list[tuple[tuple[float, float], list[tuple[float, int]]]], later_s: float, finished: bool
) -> None:
    columns, instants = play(streams)
    at = np.array([(times[-1] if times else 0.0) + later_s for times in instants])
    found, final = columns.qoe_at(at, np.full(len(streams), finished)), columns.final()
    for row, ((ttft, speed), _) in enumerate(streams):
        state = QoeState(QoeTarget(ttft, speed))
        for instant in instants[row]:
            state.deliver(instant)
        assert state.num_tokens == columns.num_tokens[row]
        assert columns.delay_sum_s[row] == pytest.approx(state.delay_s, abs=1e-9)
        assert columns.lag_s()[row] == pytest.approx(state.lag_s, abs=1e-9)
        assert final[row] == pytest.approx(state.final(), abs=1e-7)
        if at[row] - ttft > 1e-3:
            assert found[row] == pytest.approx(state.qoe_at(float(at[row]), finished=finished), abs=1e-7)


def stream_of_200(delivered: F64, speed: float = 4.8) -> float:
    columns = fresh([1.0], [speed])
    for at in delivered:
        columns = columns.deliver(float(at))
    return float(columns.final()[0])


def test_the_four_shapes_of_the_design_have_their_known_values() -> None:
    """Speed 4.8, 200 tokens: perfect, 5 s and 10.4 s late, at half speed, a pause of 17 s in the middle."""
    ideal = 1.0 + np.arange(200) / 4.8
    assert stream_of_200(ideal) == pytest.approx(1.0)
    assert stream_of_200(ideal + 5) == pytest.approx(0.806, abs=1e-3)
    assert stream_of_200(ideal + 10.4) == pytest.approx(0.666, abs=1e-3)
    assert stream_of_200(1.0 + np.arange(200) / 2.4) == pytest.approx(0.667, abs=2e-3)


def test_a_burst_counts_like_its_tokens_one_by_one() -> None:
    once = fresh([1.0], [4.8]).deliver(5.0, 20)
    singly = fresh([1.0], [4.8])
    for _ in range(20):
        singly = singly.deliver(5.0)
    assert once.last_s == pytest.approx(singly.last_s)
    assert once.delay_sum_s == pytest.approx(singly.delay_sum_s)
    assert once.num_tokens == singly.num_tokens


def test_a_row_without_a_reader_stays_without_qoe_and_disturbs_no_other() -> None:
    empty = fresh([1.0, math.nan, 1.0], [5.0, math.nan, 5.0])
    columns = empty.deliver(np.array([3.0, 3.0, 0.5]), 2)
    finished = np.array([True, True, True])
    for found in (empty.final(), columns.qoe_at(4.0), columns.final(), columns.qoe_at(4.0, finished)):
        assert np.isnan(found).tolist() == [False, True, False]
    alone = fresh([1.0], [5.0]).deliver(3.0, 2)
    assert columns.qoe_at(4.0)[0] == alone.qoe_at(4.0)[0]
    assert columns.num_tokens.tolist() == [2, 2, 2], "tokens count whether or not somebody reads"


def test_no_new_token_leaves_a_row_exactly_as_it_is() -> None:
    before = fresh([1.0, 2.0], [3.0, 7.0]).deliver(np.array([1.7, 9.1]), 3)
    after = before.deliver(np.array([50.0, 60.0]), np.array([0, 1]))
    assert after.last_s[0] == before.last_s[0]
    assert after.delay_sum_s[0] == before.delay_sum_s[0]
    assert after.num_tokens.tolist() == [3, 4]


def test_nothing_expected_is_1_and_nothing_delivered_is_0() -> None:
    columns = fresh([1.0], [5.0])
    assert columns.qoe_at(0.5).tolist() == [1.0]
    assert columns.qoe_at(2.0).tolist() == [0.0]
    assert columns.final().tolist() == [0.0]


def test_a_perfect_stream_gathers_no_delay() -> None:
    columns = fresh([1.0], [4.8])
    for index in range(10_000):
        columns = columns.deliver(index / 4.8)
    assert columns.delay_sum_s[0] < 1e-6
    assert columns.final()[0] == pytest.approx(1.0, abs=1e-9)


def test_rows_are_taken_in_the_order_asked_for() -> None:
    columns = fresh([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]).take(np.array([2, 0]))
    assert columns.ttft_s.tolist() == [3.0, 1.0]
    assert columns.speed.tolist() == [6.0, 4.0]
    assert len(columns.num_tokens) == len(columns.last_s) == len(columns.delay_sum_s) == 2


@REPEATABLE
@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), max_size=60))
def test_the_qoe_of_a_whole_answer_is_that_of_the_definition(ttft_s: float, speed: float, gaps: list[float]) -> None:
    delivered_s = np.cumsum(np.array(gaps, dtype=np.float64))
    expected = final_qoe(QoeTarget(ttft_s, speed), delivered_s.tolist())
    assert answer_qoe(delivered_s, ttft_s, speed) == pytest.approx(expected, abs=1e-9)
    assert not gaps or math.isnan(answer_qoe(delivered_s, math.nan, math.nan))
