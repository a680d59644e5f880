"""Fitting finds the coefficients from which durations were made, in spite of noise and of steps that were held up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost import CostModel, load_profile
from shared.cost_fit import StepColumns, TooFewStepsError, fit_cost, fit_held_out, non_negative, predict_s

NAMES = ("g0_s", "b0_s", "g1_s", "b1_s", "d_s", "a_s")
A800 = load_profile("qwen2.5-14b-tp1-a800").cost


def measured(cost: CostModel, count: int, seed: int = 0, noise: float = 0.0, held_up: float = 0.0) -> StepColumns:
    """Steps of decodes, of prefill chunks and of both; a share of them took three times as long."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(0, 257, count) * (rng.random(count) < 0.7)
    context = rng.integers(16, 4000, count)
    chunk = rng.integers(2, 2048, count) * ((rng.random(count) < 0.4) | (decodes == 0))
    prefix = rng.integers(0, 4000, count) * (rng.random(count) < 0.5)
    pairs = prefix * chunk + (chunk * chunk + chunk) // 2
    zeros = np.zeros(count)
    shapes = StepColumns((decodes + chunk).astype(float), (decodes * context).astype(float), pairs.astype(float), zeros)
    duration = predict_s(cost, shapes) * np.exp(noise * rng.standard_normal(count))
    duration[rng.random(count) < held_up] *= 3
    return StepColumns(shapes.num_tokens, shapes.kv_decode_tokens, shapes.prefill_pairs, duration)


@pytest.mark.parametrize("name", ["qwen2.5-14b-tp1-a800", "llama-2-13b-tp1-a100", "llama-3-8b-tp1-h200"])
def test_coefficients_without_noise_come_back_exactly(name: str) -> None:
    cost = load_profile(name).cost
    found = fit_cost(measured(cost, 800))
    for field in NAMES:
        assert getattr(found, field) == pytest.approx(getattr(cost, field), rel=1e-4), field


def test_noise_and_held_up_steps_move_the_coefficients_little() -> None:
    """3 % of noise, and every twelfth step three times as long."""
    found = fit_cost(measured(A800, 3000, noise=0.03, held_up=0.08))
    for field, tolerance in zip(NAMES, (0.03, 0.15, 0.15, 0.03, 0.05, 0.10), strict=True):
        assert getattr(found, field) == pytest.approx(getattr(A800, field), rel=tolerance), field


def test_predictions_of_held_out_steps_are_as_good_as_the_noise() -> None:
    """A normal error of 3 % has a mean of 3 % · √(2/π) = 2.4 % and a 95th percentile of 5.9 %."""
    steps = measured(A800, 2000, noise=0.03)
    groups = np.arange(len(steps)) // 4
    fit = fit_held_out(steps, groups, np.random.default_rng(1))
    assert 0.02 < fit.mean_error_ratio < 0.028
    assert 0.05 < fit.p95_error_ratio < 0.07
    assert (fit.num_fitted, fit.num_held_out) == (1500, 500)


def test_one_line_is_fitted_as_one_branch() -> None:
    cost = CostModel(g0_s=0.002, b0_s=3e-5, g1_s=0.0, b1_s=0.0, d_s=1e-7, a_s=2e-9)
    found = fit_cost(measured(cost, 500, noise=0.05))
    assert (found.g1_s, found.b1_s) == (0.0, 0.0)
    assert found.g0_s == pytest.approx(cost.g0_s, rel=0.05)


def test_a_log_without_prefills_leaves_their_price_at_0() -> None:
    steps = measured(A800, 600)
    decodes = steps.take(steps.prefill_pairs == 0)
    found = fit_cost(decodes)
    assert found.a_s == 0.0
    assert found.d_s == pytest.approx(A800.d_s, rel=1e-3)


def test_too_few_steps_are_refused() -> None:
    steps = measured(A800, 39)
    with pytest.raises(TooFewStepsError, match="39 steps"):
        fit_held_out(steps, np.arange(39), np.random.default_rng(0))
    alike = measured(A800, 100)
    with pytest.raises(TooFewStepsError, match="in 7 groups"):
        fit_held_out(alike, np.arange(100) % 7, np.random.default_rng(0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), columns=st.integers(1, 5))
def test_the_least_squares_are_optimal_among_non_negative_ones(seed: int, columns: int) -> None:
    """Karush, Kuhn, Tucker: the gradient is 0 where x > 0, and not negative where x = 0."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.standard_normal((30, columns)), rng.standard_normal(30)
    x = non_negative(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8
    assert gradient[x == 0].min(initial=0) > -1e-8
