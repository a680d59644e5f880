"""BROS's cost functions: what they fit exactly, what they do not, and the largest prompt that fits a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost import CostModel, load_profile, prefill_pairs
from shared.cost_fit import F64
from shared.phase_cost import PhaseCost, fit_phase, fit_steps

COEFFICIENTS = st.builds(PhaseCost, st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 1e-1))


@given(COEFFICIENTS)
def test_what_the_function_says_is_found_again(phase: PhaseCost) -> None:
    lengths: F64 = np.exp2(np.arange(12, dtype=np.float64))
    found = fit_phase(lengths, lengths, phase.of(lengths, lengths))
    assert found.of(lengths, lengths) == pytest.approx(phase.of(lengths, lengths), rel=1e-6)


@given(COEFFICIENTS, st.integers(0, 4000), st.integers(0, 4000), st.floats(0.0, 3.0))
def test_the_largest_prompt_fits_and_one_token_more_does_not(
    phase: PhaseCost, num_tokens: int, num_context: int, limit_s: float
) -> None:
    most = phase.largest(num_tokens, num_context, limit_s)
    if most:
        assert phase.of(num_tokens + most, num_context + most) <= limit_s * (1 + 1e-9)
    assert phase.of(num_tokens + most + 1, num_context + most + 1) >= limit_s * (1 - 1e-9)


def test_prompts_are_near_and_mixed_batches_of_decodes_are_not() -> None:
    """One branch for short and long prompts, and a product of sums: that is what the paper's functions can say."""
    cost = load_profile("opt-13b-tp2-a100").cost
    steps = fit_steps(cost)
    for length in (256, 512, 1024, 2048):
        true_s = cost.step_s(length, 0, prefill_pairs(0, length))
        assert steps.prefill.of(length, length) == pytest.approx(true_s, rel=0.3)
    assert steps.decode.of(64, 64 * 512) == pytest.approx(cost.step_s(64, 64 * 512, 0), rel=0.5)


def test_nothing_takes_no_time() -> None:
    steps = fit_steps(CostModel(g0_s=0.01, b0_s=1e-4, g1_s=0, b1_s=2e-4, d_s=1e-7, a_s=1e-9))
    assert steps.of(0.0, 0.0, 0.0, 0.0) == 0.0
    assert steps.of(0.0, 0.0, 1.0, 9.0) == pytest.approx(steps.decode.of(1.0, 9.0))
