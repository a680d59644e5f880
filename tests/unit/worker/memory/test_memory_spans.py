"""Spans against sets of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory.spans import Spans

PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


def numbers(parts: list[tuple[int, int]]) -> set[int]:
    return {number for first, end in parts for number in range(first, end)}


@given(PARTS, PARTS, st.integers(0, 40))
def test_spans_behave_as_sets(one: list[tuple[int, int]], other: list[tuple[int, int]], count: int) -> None:
    a, b = Spans.of(*one), Spans.of(*other)
    x, y = numbers(one), numbers(other)
    for found, expected in ((a, x), (a | b, x | y), (a & b, x & y), (a - b, x - y)):
        assert list(found) == sorted(expected)
        assert found == Spans(found.ranges)  # in its one form
        assert (found.total, found.end, bool(found)) == (len(expected), max(expected, default=-1) + 1, bool(expected))
    assert list(a.head(count)) == sorted(x)[:count]
    assert list(a.shifted(count)) == sorted(number + count for number in x)
    assert all((number in a) == (number in x) for number in range(45))


@pytest.mark.parametrize("ranges", [((3, 3),), ((2, 4), (4, 5)), ((4, 6), (1, 2)), ((-1, 2),), ((0, 5), (3, 7))])
def test_other_forms_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="are not disjoint ranges"):
        Spans(ranges)


def test_impossible_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a range"):
        Spans.of((5, 4))
    with pytest.raises(ValueError, match="disjoint"):
        Spans.of((1, 2)).shifted(-2)
