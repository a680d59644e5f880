"""Which cases of a test `make test` runs, which only `make test-slow` does, and which `make test-long` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_of(values: Sequence[Any], count: int | None = None, *, in_ci: int | None = None) -> list[Any]:
    """Return values for `parametrize`: the first ones as they are, further ones marked `slow`, the last ones `long`.

    Args:
        count: how many come before those that are slow. None: all of them, or the test is slow itself.
        in_ci: how many there are before those that are `long`. None: all.
    """
    first, most = len(values) if count is None else count, len(values) if in_ci is None else in_ci
    assert 0 < min(first, most) < len(values), "nothing is left, for the one or for the other"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] * (index >= first) + [pytest.mark.long] * (index >= most),
        )
        for index, value in enumerate(values)
    ]
