"""The fewest bins that hold a few items, by branch and bound."""

from __future__ import annotations

from collections.abc import Iterable


def fewest_bins(sizes: Iterable[int], capacity: int) -> int:
    """Try every way that could be better than the best so far, the largest item first."""
    ordered = sorted(sizes, reverse=True)
    assert not ordered or ordered[0] <= capacity
    rest = [sum(ordered[at:]) for at in range(len(ordered) + 1)]
    best = len(ordered)

    def place(at: int, free: list[int]) -> None:
        nonlocal best
        lacking = max(0, rest[at] - sum(free))
        if len(free) - (-lacking // capacity) >= best:
            return
        if at == len(ordered):
            best = len(free)
            return
        size = ordered[at]
        for room in {room for room in free if room >= size}:
            left = free.copy()
            left.remove(room)
            place(at + 1, [*left, room - size])
        place(at + 1, [*free, capacity - size])

    place(0, [])
    return best
