"""Sets of pages or of blocks, as disjoint ranges in ascending order.

Spans.of((0, 3), (5, 6)):   0 1 2 . . 5      a gap is what is not there: never mapped, or given back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Span = tuple[int, int]
"""Half-open: (first, end)."""


@dataclass(frozen=True, slots=True)
class Spans:
    """A set of numbers from 0 on. Equal sets compare equal.

    Attributes:
        ranges: not empty, in ascending order, with a gap between each two. `Spans.of` brings others into this form.
    """

    ranges: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        """Check the form.

        Raises:
            ValueError: a range is empty or negative, or they overlap, touch or are out of order.
        """
        ends = (-1, *(end for _, end in self.ranges))
        for before, (first, end) in zip(ends, self.ranges, strict=False):
            if first <= before or end <= first or first < 0:
                raise ValueError(f"{self.ranges} are not disjoint ranges in ascending order")

    @classmethod
    def of(cls, *ranges: Span) -> Spans:
        """Return the union of some ranges; empty ones count for nothing.

        Raises:
            ValueError: a range ends before it begins, or begins below 0.
        """
        joined: list[Span] = []
        for first, end in sorted(ranges):
            if not 0 <= first <= end:
                raise ValueError(f"({first}, {end}) is not a range of numbers from 0 on")
            if first == end:
                continue
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((first, end))
        return cls(tuple(joined))

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return sum(end - first for first, end in self.ranges)

    @property
    def end(self) -> int:
        """One more than the largest; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else 0

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.ranges:
            yield from range(first, end)

    def __contains__(self, number: int) -> bool:
        return any(first <= number < end for first, end in self.ranges)

    def __or__(self, other: Spans) -> Spans:
        return Spans.of(*self.ranges, *other.ranges)

    def __and__(self, other: Spans) -> Spans:
        return self - (self - other)

    def __sub__(self, other: Spans) -> Spans:
        left: list[Span] = []
        holes = iter(other.ranges)
        hole = next(holes, None)
        for first, end in self.ranges:
            begin = first
            while hole is not None and hole[0] < end:
                if begin < hole[0]:
                    left.append((begin, hole[0]))
                begin = max(begin, hole[1])
                if hole[1] > end:  # it may reach into the next range
                    break
                hole = next(holes, None)
            if begin < end:
                left.append((begin, end))
        return Spans(tuple(left))

    def shifted(self, by: int) -> Spans:
        """Return every number plus `by`.

        Raises:
            ValueError: one would be negative.
        """
        return Spans(tuple((first + by, end + by) for first, end in self.ranges))

    def head(self, count: int) -> Spans:
        """Return the first `count` numbers, or all if there are fewer."""
        kept: list[Span] = []
        for first, end in self.ranges:
            if count <= 0:
                break
            kept.append((first, min(end, first + count)))
            count -= end - first
        return Spans(tuple(kept))
