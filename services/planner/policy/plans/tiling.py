"""Which layers each member of a group serves, if every one keeps a part of what it holds: nothing is loaded on a drop.

    holds   A [0, 48)    B [0, 24)    C [24, 48)
    serves  B [0, 16)    A [16, 32)   C [32, 48)          in the order of the pipeline

The search is exact. Of all ways to cut the layers into one range for each member, within what it holds:

1. the least time of the slowest stage is found (layers, plus the embedding and the head where they are);
2. of those whose slowest stage takes at most the given share longer, the most blocks of the smallest stage;
3. of those, the most even one: the least sum of the squared times of the stages.

Each is one pass of the same dynamic program over (members used, layers covered); members that hold the same, with the
same budget, count as one kind. There may be no way at all: members of 2 and 5 layers cannot cover 7 unless their ranges
meet, and two halves with two halves leave no room for a fifth part.

Pure. Source: the project's own design; KunServe v2, Fig. 6, halves the layers of two groups and does not say how ranges
of unequal groups meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import numpy.typing as npt

from services.planner.policy.plans.capacity import CapacityRule
from shared.layers import LayerRange

Table = npt.NDArray[np.float64]
"""[layers covered before, after]: what a stage from the one to the other costs; infinite: not allowed."""
_Join = Callable[[Table, Table], Table]

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class MemberHolding:
    """What a member brings; members of equal holdings are interchangeable."""

    layers: LayerRange
    num_pages: int
    max_blocks: int
    """Large where there is no limit."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Ranges that cover all layers in order, one for each holding."""

    order: tuple[int, ...]
    """By stage: index of the kind of holding, in the order in which the search was given the kinds."""
    layers: tuple[LayerRange, ...]
    """By stage."""
    num_blocks: int
    """Of the smallest stage."""


class TilingSearch:
    """Finds ranges for members of one model. Keeps what it computed of each kind of holding."""

    def __init__(self, rule: CapacityRule) -> None:
        self._rule = rule
        model = rule.model
        edge = np.arange(model.num_layers + 1)
        before, after = edge[:, np.newaxis], edge[np.newaxis, :]
        self._times = (after - before).astype(np.float64)
        self._times[0, :] += model.first_cost_layers
        self._times[:, -1] += model.last_cost_layers
        self._blocks: dict[MemberHolding, Table] = {}

    def find(self, holdings: Sequence[MemberHolding], counts: Sequence[int], imbalance_ratio: float) -> Tiling | None:
        """Return the best ranges for these members, or None if there are none.

        Args:
            holdings: kinds, all different.
            counts: how many members there are of each.
            imbalance_ratio: by how much the slowest stage may take longer than it must; infinite: only room counts.
        """
        blocks = [self._blocks_of(holding) for holding in holdings]
        times = [np.where(table >= 1, self._times, np.inf) for table in blocks]
        slowest = _least(counts, times, np.maximum)
        if not np.isfinite(slowest):
            return None
        limit = slowest * (1 + imbalance_ratio) + _ROUNDING
        scarcity = [np.where(time <= limit, -table, np.inf) for time, table in zip(times, blocks, strict=True)]
        num_blocks = -_least(counts, scarcity, np.maximum)
        squares = [np.where(table <= -num_blocks, self._times**2, np.inf) for table in scarcity]
        order, edges = _trace(counts, squares, _tables(counts, squares, np.add), np.add)
        return Tiling(
            order=tuple(order),
            layers=tuple(LayerRange(first, end) for first, end in pairwise(edges)),
            num_blocks=int(num_blocks),
        )

    def _blocks_of(self, holding: MemberHolding) -> Table:
        """Return the blocks that a member backs if it serves [before, after); 0 where it cannot."""
        table = self._blocks.get(holding)
        if table is None:
            held = holding.layers
            table = np.zeros(self._times.shape)
            starts, stops = np.triu_indices(len(table), k=1)
            inside = (held.first <= starts) & (stops <= held.end)
            starts, stops = starts[inside], stops[inside]
            budget, limit = np.array(holding.num_pages), np.array(holding.max_blocks)
            table[starts, stops] = self._rule.blocks_of(starts, stops, budget, limit)
            self._blocks[holding] = table
        return table


def _strides(counts: Sequence[int]) -> list[int]:
    """Return by how much a state's number grows with one more member of each kind: states count in a mixed radix."""
    return [1, *accumulate((count + 1 for count in counts[:-1]), mul)]


def _tables(counts: Sequence[int], costs: Sequence[Table], join: _Join) -> Table:
    """Return the least cost of every state: [members used, layers covered]."""
    strides = _strides(counts)
    num_states = strides[-1] * (counts[-1] + 1)
    best = np.full((num_states, costs[0].shape[0]), np.inf)
    best[0, 0] = 0.0 if join is np.add else -np.inf
    for state in range(1, num_states):
        for count, stride, cost in zip(counts, strides, costs, strict=True):
            if state // stride % (count + 1):
                joined = join(best[state - stride][:, np.newaxis], cost)
                np.minimum(best[state], joined.min(axis=0), out=best[state])
    return best


def _least(counts: Sequence[int], costs: Sequence[Table], join: _Join) -> float:
    return float(_tables(counts, costs, join)[-1, -1])


def _trace(counts: Sequence[int], costs: Sequence[Table], best: Table, join: _Join) -> tuple[list[int], list[int]]:
    """Return the kinds by stage and the edges of the ranges that have the least cost; from the last stage backwards."""
    strides = _strides(counts)
    state, edge = best.shape[0] - 1, best.shape[1] - 1
    order: list[int] = []
    edges = [edge]
    while state:
        for kind, (count, stride) in enumerate(zip(counts, strides, strict=True)):
            if not state // stride % (count + 1):
                continue
            joined = join(best[state - stride], costs[kind][:, edge])
            before = int(joined.argmin())
            if joined[before] == best[state, edge]:
                break
        else:
            raise AssertionError("the least cost has no way that leads to it")
        state -= stride
        edge = before
        order.append(kind)
        edges.append(edge)
    return order[::-1], edges[::-1]
