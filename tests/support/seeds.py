"""Which cases of a campaign `make test` runs, and which only `make test-slow` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_of(values: Sequence[Any], count: int) -> list[Any]:
    """Return values for `parametrize`: the first ones as they are, the others marked `slow`."""
    assert 0 < count < len(values), "nothing is left, for the one or for the other"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] * (index >= count))
        for index, value in enumerate(values)
    ]
