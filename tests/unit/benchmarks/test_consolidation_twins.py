"""Consolidations against twins that skip them: both see the same requests, and what is late is counted in both."""

from __future__ import annotations

import pytest

from benchmarks.consolidation_twins import Limits, compare


@pytest.mark.slow
def test_a_consolidation_and_its_twin_see_the_same_requests() -> None:
    """With limits that nobody keeps, all who were there are late in both."""
    pair = compare(0, 3.0, Limits(0.0, 0.0), by_kv_alone=False)
    assert pair is not None
    assert pair.num_moves > 0
    assert pair.violations[0] == pair.violations[1] > 60
