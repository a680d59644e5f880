"""The best groups by trying all of them: an oracle for small clusters, and an ablation.

    minimise  N · thpt(1) / Σ over groups thpt(|g|)     so that the room gained is at least R

Every partition of the groups as they are is looked at; with n of them these are the Bell numbers (21 147 for 9), so
more than `MAX_GROUPS` are refused. Of equal costs the one that gains more wins, then the first in the order of the
search. If none gains enough, the one that gains most is taken.

Pure. Source: KunServe v1, section 4.1. Deviation: room is counted as `capacity` states it.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.planner.policy.plans.kinds import Union
from services.planner.policy.plans.merging import Merger, Obstacle

MAX_GROUPS = 9


def merge_best(merger: Merger) -> None:
    """Form the groups that cost least of all that gain enough.

    Raises:
        ValueError: there are more than `MAX_GROUPS` groups.
    """
    count = merger.num_groups
    if count > MAX_GROUPS:
        raise ValueError(f"the optimum is searched for among at most {MAX_GROUPS} groups, not {count}")
    unions = _unions(merger)
    best: tuple[tuple[float, ...], tuple[int, ...]] | None = None
    for masks in _partitions(count):
        if any(mask not in unions for mask in masks):
            continue
        if len(masks) < merger.min_groups:
            if len(masks) < count:
                merger.obstacles[Obstacle.COPIES] = None
            continue
        score = _score(merger, masks, unions)
        if best is None or score < best[0]:
            best = score, masks
    if best is None:
        return
    for mask in best[1]:
        union = unions[mask]
        if union is not None:
            merger.adopt(union, _nodes(mask, count))


def _nodes(mask: int, count: int) -> list[int]:
    return [node for node in range(count) if mask >> node & 1]


def _unions(merger: Merger) -> dict[int, Union | None]:
    """Return what each set of groups would be, by its mask; None: one stays alone. Sets that cannot be are left out."""
    count = merger.num_groups
    unions: dict[int, Union | None] = {1 << node: None for node in range(count)}
    for mask in range(1, 1 << count):
        if mask not in unions and (union := merger.union(_nodes(mask, count))) is not None:
            unions[mask] = union
    return unions


def _partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every partition of `count` things, as masks."""

    def extend(index: int, masks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if index == count:
            yield masks
            return
        bit = 1 << index
        for place, mask in enumerate(masks):
            yield from extend(index + 1, (*masks[:place], mask | bit, *masks[place + 1 :]))
        yield from extend(index + 1, (*masks, bit))

    return extend(0, ())


def _score(merger: Merger, masks: tuple[int, ...], unions: dict[int, Union | None]) -> tuple[float, ...]:
    """Return what is compared; smaller is better."""
    gained, speed = 0, 0.0
    for mask in masks:
        nodes = _nodes(mask, merger.num_groups)
        union = unions[mask]
        if union is not None:
            gained += union.tiling.num_blocks - int(merger.num_blocks[nodes].sum())
        speed += merger.facts.throughput[int(merger.size[nodes].sum()) - 1]
    short = max(merger.target_tokens - merger.rule.tokens(gained), 0)
    return (short, -speed, -gained)
