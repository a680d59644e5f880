"""Which sets of instances could form a group, looked at once per kind of set.

An instance is of a *kind*: what it holds, and its budget. A *bag* is how many of each kind a group has. Equal bags can
be cut into ranges alike, so a cluster of equal instances costs one search per size of group, however many there are.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.columns import I64, InstanceColumns
from services.planner.policy.plans.drop_facts import DropParams
from services.planner.policy.plans.tiling import MemberHolding, Tiling, TilingSearch
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Union:
    """A group that would come of a merge."""

    bag: int
    tiling: Tiling
    """`order` holds numbers of kinds of instances."""


class KindIndex:
    """Numbers kinds of instances, and bags of them; remembers which ranges each bag could serve with."""

    def __init__(self, rule: CapacityRule, params: DropParams, columns: InstanceColumns) -> None:
        self._search = TilingSearch(rule)
        self._imbalance_ratios = (params.max_imbalance_ratio, inf)
        self._unions: dict[tuple[int, int], Union | None] = {}
        self._bags: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        rows, inverse = _distinct(np.stack((columns.first, columns.end, columns.num_pages, columns.max_blocks)))
        self.of_instance: I64 = inverse
        """[n] kind of each instance; kinds are sorted by what they hold, then by budget."""
        self._holdings = [
            MemberHolding(LayerRange(int(first), int(end)), int(pages), int(limit))
            for first, end, pages, limit in rows.T
        ]

    def bag(self, kinds: Sequence[int]) -> int:
        """Return the number of a bag of instances of these kinds."""
        key = tuple(sorted(kinds))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._bags)
            self._bags.append(key)
        return number

    def pour(self, bags: Sequence[int]) -> int:
        """Return the number of the bag that holds all that is in these."""
        return self.bag([kind for bag in bags for kind in self._bags[bag]])

    def unions(self, bag: int) -> tuple[Union, ...]:
        """Return the ways to cut the layers for a bag: first an even one, then the one with most room; () if none."""
        found = [self._union(bag, variant) for variant in range(len(self._imbalance_ratios))]
        return tuple(union for union in found if union is not None)

    def columns_by_stage(self, union: Union) -> list[int]:
        """Return, by stage, the place of its instance among the members sorted by kind."""
        content = self._bags[union.bag]
        places = {kind: content.index(kind) for kind in content}
        by_stage = []
        for kind in union.tiling.order:
            by_stage.append(places[kind])
            places[kind] += 1
        return by_stage

    def _union(self, bag: int, variant: int) -> Union | None:
        key = (bag, variant)
        if key not in self._unions:
            content = self._bags[bag]
            kinds = sorted(set(content))
            holdings = [self._holdings[kind] for kind in kinds]
            counts = [content.count(kind) for kind in kinds]
            found = self._search.find(holdings, counts, self._imbalance_ratios[variant])
            if found is not None:
                found = replace(found, order=tuple(kinds[kind] for kind in found.order))
            self._unions[key] = None if found is None else Union(bag, found)
        return self._unions[key]


def _distinct(table: I64) -> tuple[I64, I64]:
    """Return the distinct columns of a table [k, n], sorted by the first row, then the next; and each one's number."""
    order = np.lexsort(table[::-1])
    ordered = table[:, order]
    is_new = np.ones(table.shape[1], dtype=np.bool_)
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    inverse = np.empty(table.shape[1], dtype=np.int64)
    inverse[order] = np.cumsum(is_new) - 1
    return ordered[:, is_new], inverse
