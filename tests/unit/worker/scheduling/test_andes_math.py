"""Andes' arithmetic against its definitions: experiences to come as sums over tokens, and packing as algorithm 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.worker.scheduling.packing import batch_sizes, greedy, most_in_time, most_that_fit
from services.worker.scheduling.prediction import UNREAD_GAP_S, UNREAD_TTFT_S, Readers
from services.worker.scheduling.view import F64
from sluice_client.qoe import QoeState, QoeTarget, qoe_at
from tests.support.engine_views import decoding, make_view


def history(rng: np.random.Generator) -> tuple[QoeTarget, list[float]]:
    """A reader, and deliveries: some fast, some slow, some in bursts; whatever a scheduler may have done."""
    target = QoeTarget(float(rng.uniform(0.1, 3)), float(rng.uniform(0.5, 20)))
    gaps_s = rng.exponential(rng.choice([0.01, 1 / target.speed_tokens_per_s, 2.0]), size=rng.integers(0, 40))
    gaps_s[rng.random(gaps_s.size) < 0.3] = 0.0
    return target, (rng.uniform(0, 4) + np.cumsum(gaps_s)).tolist()


def readers_of(target: QoeTarget, delivered_s: list[float]) -> Readers:
    """As the sequence table keeps it."""
    state, gap_s = QoeState(target), 1 / target.speed_tokens_per_s
    for at_s in delivered_s:
        state.deliver(at_s)
    last_s = target.ttft_s + (len(delivered_s) - 1) * gap_s + state.lag_s
    return Readers(*(np.array([value]) for value in (len(delivered_s), last_s, state.delay_s, target.ttft_s, gap_s)))


@pytest.mark.parametrize("seed", range(400))
def test_experiences_to_come_are_the_sums_over_tokens(seed: int) -> None:
    """Nothing more is delivered; and a token at `first` and each period after, fast ones and slow ones."""
    rng = np.random.default_rng(seed)
    target, delivered_s = history(rng)
    readers, now_s = readers_of(target, delivered_s), max([0.0, *delivered_s]) + float(rng.uniform(0, 3))
    at_s, first_s = now_s + float(rng.choice([0.01, 1, 10, 60])), now_s + float(rng.choice([0.001, 0.3, 5, 100]))
    period_s = float(rng.choice([0.01, 0.05, 0.2, 1.5]))
    at: F64 = np.array([at_s])
    assert readers.qoe(at)[0] == pytest.approx(qoe_at(target, delivered_s, at_s, finished=False), abs=1e-9)
    count = max(int((at_s - first_s) / period_s) + 1, 0) if at_s >= first_s else 0
    more = [first_s + i * period_s for i in range(count)]
    served = readers.qoe(at, readers.served(at, np.array([first_s]), period_s))[0]
    assert served == pytest.approx(qoe_at(target, [*delivered_s, *more], at_s, finished=False), abs=1e-9)


def test_a_request_that_nobody_reads_comes_last_and_ages() -> None:
    """Its columns are NaN; nothing that is computed from them is."""
    view = make_view(running=[decoding(4), decoding(9)], now_s=50.0)
    readers = Readers.of(view, view.running)
    assert readers.ttft_s.tolist() == [UNREAD_TTFT_S] * 2
    assert readers.last_s.tolist() == [UNREAD_TTFT_S + 3 * UNREAD_GAP_S, UNREAD_TTFT_S + 8 * UNREAD_GAP_S]
    for at_s, least in ((30.0, 1.0), (61.0, 0.9), (500.0, 0.0)):
        at = np.array([at_s, at_s])
        waits, serves = readers.qoe(at), readers.qoe(at, readers.served(at, at - 20, 0.01))
        assert (waits >= least).all()
        assert (serves >= waits).all()
        assert (serves > waits).all() == (at_s > 499)


def algorithm_1(priority: list[float], weights: list[int], capacity: int, most: int) -> list[bool]:
    """The paper's, item by item."""
    taken, used = [False] * len(priority), 0
    for item in sorted(range(len(priority)), key=lambda item: -priority[item]):
        if used + weights[item] > capacity or sum(taken) == most:
            break
        taken[item] = True
        used += weights[item]
    return taken


def best(gains: list[float], weights: list[int], capacity: int, most: int) -> float:
    """The most that any set gains: the dynamic program of the paper's appendix, over items, memory and count."""
    table = np.zeros((capacity + 1, most + 1))
    for gain, weight in zip(gains, weights, strict=True):
        if weight <= capacity and most:
            table[weight:, 1:] = np.maximum(table[weight:, 1:], table[: capacity + 1 - weight, :-1] + gain)
    return float(table[capacity, most])


def test_packing_is_algorithm_1_and_never_gains_more_than_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """How much less is no law (the paper's section 6.4), so the ratios are printed."""
    rng, ratios = np.random.default_rng(1), list[float]()
    for _ in range(400):
        count, capacity, most = int(rng.integers(1, 12)), int(rng.integers(1, 60)), int(rng.integers(0, 9))
        gains, weights = rng.random(count), rng.integers(1, 30, count).astype(np.int32)
        priority = gains / weights
        order, num_taken = greedy(priority, weights, capacity, most)
        taken = algorithm_1(priority.tolist(), weights.tolist(), capacity, most)
        assert sorted(order[:num_taken].tolist()) == np.flatnonzero(taken).tolist()
        found, bound = float(gains[taken].sum()), best(gains.tolist(), weights.tolist(), capacity, most)
        assert found <= bound + 1e-12
        ratios += [found / bound] if bound else []
    with capsys.disabled():
        print(
            f"\ngreedy / best: P1, P10, P50 {np.percentile(ratios, [1, 10, 50]).round(3)}, mean {np.mean(ratios):.3f}"
        )


def test_the_sizes_that_are_tried_lie_between_the_most_in_time_and_the_most_that_fit() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        weights, capacity = rng.integers(1, 30, int(rng.integers(1, 40))).astype(np.int32), int(rng.integers(30, 300))
        per_row_s, limit_s = float(rng.uniform(0.001, 0.1)), float(rng.uniform(0.05, 0.5))

        def period_s(count: int, per_row_s: float = per_row_s) -> float:
            return 0.02 + count * per_row_s

        largest = most_that_fit(weights, capacity, 32)
        assert np.sort(weights)[:largest].sum() <= capacity
        assert largest == 32 or np.sort(weights)[: largest + 1].sum() > capacity or largest == weights.size
        least = most_in_time(period_s, limit_s, largest)
        assert least == max((size for size in range(1, largest + 1) if period_s(size) <= limit_s), default=1)
        sizes = batch_sizes(least, largest, 4)
        assert (sizes[0], sizes[-1]) == (largest, least)
        assert len(sizes) <= 4
        assert sizes == sorted(set(sizes), reverse=True)
        assert batch_sizes(least, largest, 1) == [largest]


def test_who_thinks_is_read_at_the_speed_of_thinking_and_then_from_its_text_on() -> None:
    """Row 0 thinks and wants ten tokens a second; row 1 has nine tokens, of which four were thinking."""
    view = make_view(running=[decoding(9), decoding(9)], now_s=50.0)
    columns = replace(
        view.columns,
        qoe_speed=np.full(2, 5.0),
        qoe_gap_s=np.array([0.1, 0.2]),
        thinks=np.array([True, False]),
        num_thought=np.array([0, 4], dtype=np.int32),
    )
    readers = Readers.of(replace(view, columns=columns), view.running)
    assert (readers.gap_s.tolist(), readers.num.tolist()) == ([0.1, 0.2], [9, 5])
