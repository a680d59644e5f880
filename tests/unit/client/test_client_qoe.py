"""The constant-time QoE against the definition, and the definition against what the paper says of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.types import ReaderTarget
from sluice_client.qoe import (
    PERFECT_DELAY_S,
    QoeState,
    QoeTarget,
    delay_sum,
    displayed_times,
    final_qoe,
    ideal_times,
    is_perfect,
    qoe_at,
    whole_sum,
)

TOLERANCE = 1e-9
READER = QoeTarget(ttft_s=1.0, speed_tokens_per_s=4.8)


def test_a_reader_of_whom_nobody_has_said_anything_is_the_same_at_both_ends() -> None:
    """Thinking is not paced, so a client knows no speed of it."""
    assert asdict(QoeTarget()) == ReaderTarget().model_dump(exclude={"thinking_speed_tokens_per_s"})


def random_target(rng: random.Random) -> QoeTarget:
    return QoeTarget(rng.uniform(0.05, 5.0), 10 ** rng.uniform(-0.5, 2.5))


def random_deliveries(rng: random.Random, target: QoeTarget) -> list[float]:
    """Bursts, steady streams and pauses, about as fast as the reader, somewhat faster, or slower."""
    count = rng.choice((1, 2, 3, 10, 50, 300))
    mean_gap_s = 10 ** rng.uniform(-1.5, 0.7) / target.speed_tokens_per_s
    now_s, times = rng.uniform(0.0, 3 * target.ttft_s), []
    for _ in range(count):
        times.append(now_s)
        kind = rng.random()
        if kind < 0.1:
            now_s += rng.uniform(0, 20 * mean_gap_s)
        elif kind < 0.7:
            now_s += rng.expovariate(1 / mean_gap_s)
    return times


def streams(seed: int, count: int) -> Iterator[tuple[random.Random, QoeTarget, list[float]]]:
    """Yield readers and what is delivered to them, and the generator that made these."""
    rng = random.Random(seed)
    for _ in range(count):
        target = random_target(rng)
        yield rng, target, random_deliveries(rng, target)


def state_of(target: QoeTarget, delivered: list[float]) -> QoeState:
    state = QoeState(target)
    for t in delivered:
        state.deliver(t)
    return state


@pytest.mark.slow
def test_state_agrees_with_the_definition_on_thousands_of_random_streams() -> None:
    for _, target, delivered in streams(1, 2000):
        state = QoeState(target)
        for t, shown in zip(delivered, displayed_times(target, delivered), strict=True):
            assert state.deliver(t) == pytest.approx(shown, abs=TOLERANCE), (target, delivered)
        assert state.num_tokens == len(delivered)
        assert state.delay_s == pytest.approx(delay_sum(target, delivered), abs=1e-7, rel=TOLERANCE)
        assert abs(state.final() - final_qoe(target, delivered)) <= TOLERANCE, (target, delivered)


def test_state_agrees_with_the_definition_in_the_middle_of_streams() -> None:
    """At any instant between two deliveries, finished or not, tokens in the buffer or not."""
    for rng, target, delivered in streams(2, 2000):
        so_far = delivered[: rng.randint(0, len(delivered))]
        start_s = so_far[-1] if so_far else 0.0
        t = start_s + rng.choice((0.0, rng.uniform(0, 1), rng.uniform(0, 200))) / target.speed_tokens_per_s
        for finished in (False, True):
            got = state_of(target, so_far).qoe_at(t, finished=finished)
            assert abs(got - qoe_at(target, so_far, t, finished=finished)) <= TOLERANCE, (target, so_far, t)


@pytest.mark.slow
@given(
    ttft_s=st.floats(0.01, 10),
    speed=st.floats(0.1, 1000),
    gaps=st.lists(st.floats(0, 30), max_size=40),
    wait_s=st.floats(0, 60),
    finished=st.booleans(),
)
def test_state_agrees_with_the_definition_where_hypothesis_looks(
    ttft_s: float, speed: float, gaps: list[float], wait_s: float, finished: bool
) -> None:
    target = QoeTarget(ttft_s, speed)
    delivered = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    t = (delivered[-1] if delivered else 0.0) + wait_s
    expected_s = sum(max(0.0, t - i) for i in ideal_times(target, 1))
    if 0 < expected_s < 1e-6:
        return  # an area of microseconds is all rounding, in both forms
    state = state_of(target, delivered)
    assert abs(state.qoe_at(t, finished=finished) - qoe_at(target, delivered, t, finished=finished)) <= 1e-8
    if not delivered or state.lag_s == 0 or state.lag_s > 1e-6:
        assert abs(state.final() - final_qoe(target, delivered)) <= 1e-8


def test_tokens_delivered_together_count_one_by_one() -> None:
    rng = random.Random(3)
    for _ in range(300):
        target = random_target(rng)
        together, one_by_one = QoeState(target), QoeState(target)
        now_s = 0.0
        for _ in range(20):
            now_s += rng.expovariate(1.0)
            count = rng.randint(1, 9)
            last = together.deliver(now_s, count)
            for _ in range(count):
                shown = one_by_one.deliver(now_s)
            assert last == pytest.approx(shown, abs=TOLERANCE)
        assert together.delay_s == pytest.approx(one_by_one.delay_s, rel=TOLERANCE)
        assert together.final() == pytest.approx(one_by_one.final(), abs=TOLERANCE)


IDEAL = ideal_times(READER, 200)
SHAPES = {
    "perfect": (IDEAL, 1.0),
    "five seconds late": ([t + 5 for t in IDEAL], 0.806),
    "10.4 seconds late": ([t + 10.4 for t in IDEAL], 0.666),
    "half the speed": ([1 + i / 2.4 for i in range(200)], 0.667),
    "all in a burst at ttft": ([1.0] * 200, 1.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_the_paper_score_as_computed_by_hand(shape: str) -> None:
    delivered, expected = SHAPES[shape]
    assert final_qoe(READER, delivered) == pytest.approx(expected, abs=6e-4)
    assert state_of(READER, delivered).final() == pytest.approx(expected, abs=6e-4)


def test_a_pause_in_the_middle_scores_0_69_though_first_and_last_token_arrive_on_time() -> None:
    """The reader loses the pause, and the reading pacer never catches up.

    62 tokens on time; the next ones 17 s after the 62nd, or when ideal if that is later. So 138 tokens have a lag of
    17 - 1 / 4.8 = 16.79 s: S_delay = 2317, S_whole = 200 * 16.79 + 200 * 199 / (2 * 4.8) = 7504, QoE 0.691.
    """
    delivered = [t if i < 62 else max(t, IDEAL[61] + 17) for i, t in enumerate(IDEAL)]
    assert delivered[0] == IDEAL[0]
    assert delivered[-1] == IDEAL[-1]
    lag_s = 17 - 1 / 4.8
    lags = [d - i for d, i in zip(displayed_times(READER, delivered), IDEAL, strict=True)]
    assert lags == pytest.approx([0.0] * 62 + [lag_s] * 138, abs=TOLERANCE)
    expected = 1 - 138 * lag_s / (200 * lag_s + 200 * 199 / 9.6)
    assert expected == pytest.approx(0.690, abs=0.002)
    assert final_qoe(READER, delivered) == pytest.approx(expected, abs=TOLERANCE)
    assert state_of(READER, delivered).final() == pytest.approx(expected, abs=TOLERANCE)


def test_one_token_scores_one_in_time_and_zero_with_any_delay() -> None:
    assert final_qoe(READER, [1.0]) == 1.0
    assert final_qoe(READER, [0.2]) == 1.0
    assert final_qoe(READER, [1.001]) == pytest.approx(0.0, abs=TOLERANCE)
    assert state_of(READER, [0.2]).final() == 1.0
    assert state_of(READER, [1.001]).final() == 0.0


def test_two_tokens_with_a_tenth_of_a_second_score_a_half() -> None:
    """S_delay = 0.2, S_whole = 2 * 0.1 + 1 / 4.8 = 0.408; 1 - 0.49 = 0.51."""
    delivered = [1.1, 1.1 + 1 / 4.8]
    assert final_qoe(READER, delivered) == pytest.approx(1 - 0.2 / (0.2 + 1 / 4.8), abs=TOLERANCE)
    assert state_of(READER, delivered).final() == pytest.approx(0.51, abs=0.001)


def test_one_token_in_time_is_exactly_perfect_for_every_target() -> None:
    """Where last + 1 / speed does not round back to ttft, a careless state would score 0."""
    rng = random.Random(4)
    for _ in range(2000):
        target = random_target(rng)
        assert state_of(target, [target.ttft_s * rng.random()]).final() == 1.0


def test_nothing_delivered_scores_zero_at_the_end_and_once_something_was_expected() -> None:
    assert final_qoe(READER, []) == 0.0
    assert QoeState(READER).final() == 0.0
    assert QoeState(READER).qoe_at(0.9) == qoe_at(READER, [], 0.9, finished=False) == 1.0
    assert QoeState(READER).qoe_at(1.5) == qoe_at(READER, [], 1.5, finished=False) == 0.0


def test_perfect_means_at_most_a_millisecond_of_delay() -> None:
    rng = random.Random(5)
    for _ in range(500):
        target = random_target(rng)
        assert state_of(target, ideal_times(target, 500)).is_perfect
    assert is_perfect(PERFECT_DELAY_S)
    assert not is_perfect(PERFECT_DELAY_S * 1.01)
    assert not state_of(READER, [1.0, 1.0 + 1 / 4.8 + 0.002]).is_perfect


def test_qoe_stays_between_zero_and_one() -> None:
    for rng, target, delivered in streams(6, 1000):
        t = delivered[-1] + rng.uniform(0, 50)
        for finished in (False, True):
            assert -1e-9 <= qoe_at(target, delivered, t, finished=finished) <= 1 + 1e-9
            assert 0 <= state_of(target, delivered).qoe_at(t, finished=finished) <= 1
        assert -1e-9 <= final_qoe(target, delivered) <= 1 + 1e-9
        assert delay_sum(target, delivered) <= whole_sum(target, delivered) * (1 + 1e-12)


def test_qoe_at_the_last_display_is_the_final_qoe() -> None:
    for _, target, delivered in streams(7, 1000):
        state = state_of(target, delivered)
        if state.last_s - target.ttft_s < 1e-6:
            continue  # one token in time: an area of rounding errors
        last_s = displayed_times(target, delivered)[-1]
        assert qoe_at(target, delivered, last_s, finished=True) == pytest.approx(
            final_qoe(target, delivered), abs=TOLERANCE
        )
        assert state.qoe_at(state.last_s, finished=True) == pytest.approx(state.final(), abs=TOLERANCE)


def test_later_delivery_never_raises_qoe_at_an_instant() -> None:
    for rng, target, delivered in streams(8, 1000):
        later = list(delivered)
        for i in range(rng.randrange(len(later)), len(later)):
            later[i] += rng.uniform(0, 3)
        later = [max(later[: i + 1]) for i in range(len(later))]
        t = later[-1] + rng.uniform(0, 20)
        for finished in (False, True):
            before = state_of(target, delivered).qoe_at(t, finished=finished)
            assert state_of(target, later).qoe_at(t, finished=finished) <= before + TOLERANCE


def test_a_late_last_token_can_raise_the_final_qoe_of_an_answer_that_was_late_before() -> None:
    """A property of the definition, to know when comparing: the last token's lag also stretches S_whole.

    4 tokens at 1 token/s, each 10 s late: S_delay 40, S_whole 46, QoE 0.13. The last one 10 s later: 50, 86, 0.42.
    """
    target = QoeTarget(1.0, 1.0)
    late = [11.0, 12.0, 13.0, 14.0]
    assert final_qoe(target, late) == pytest.approx(1 - 40 / 46)
    assert final_qoe(target, [*late[:3], 24.0]) == pytest.approx(1 - 50 / 86)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["ttft_s", "speed_tokens_per_s"])
def test_target_refuses_numbers_that_no_reader_has(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        QoeTarget(**{field: value})
