"""The two greedy ways to form groups.

*Throughput-greedy*, the default: a priority queue of groups by size; merge the two smallest until the room gained is
enough. All groups of one size are looked at together, so the queue is a list per size:

    size 1:  a b c d e ─► ab  cd      e is left, and goes with the first of size 2
    size 2:  ab cd ─► abe             then cd waits for the next size

Of groups of one size those with throttled members merge first, with one another if they can; of these, groups on one
host before groups on different hosts; then their order decides. A pair that gains nothing, or has no ranges, is passed
over, and the next kind of partner is tried.

*Memory-greedy*, the ablation: one group takes the smallest ones until it is as large as allowed, then the next one
does, until the room gained exceeds the whole KV of the cluster as it was.

Pure. Source: KunServe v1, section 4.1, Algorithm 1; v2, Fig. 6. Deviations: room is counted as `capacity` states it,
and merges that lose are passed over.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from services.planner.policy.plans.columns import I64
from services.planner.policy.plans.merging import Merger, Obstacle

_NOBODY = np.zeros(0, dtype=np.int64)


def merge_smallest(merger: Merger) -> None:
    """Merge the smallest groups until enough is gained, or nothing more can be."""
    queue = _Queue(merger)
    smaller = _NOBODY
    while queue.levels and not merger.is_done:
        nodes = queue.pop()
        throttled = merger.throttled(nodes)
        first, second = nodes[throttled], nodes[~throttled]
        smaller, first = queue.attach(smaller, first)
        smaller, second = queue.attach(smaller, second)
        lonely = queue.pair(first)
        lonely, second = queue.attach(lonely, second)
        smaller = np.concatenate((smaller, lonely, queue.pair(second)))


def merge_largest(merger: Merger) -> None:
    """Grow one group after the other until the room gained exceeds the KV that the cluster had."""
    sizes, blocks = merger.groups.size, merger.groups.num_blocks
    merger.target_tokens = merger.rule.tokens(int(blocks.sum())) + 1
    numbers = np.arange(len(sizes))
    waiting = dict.fromkeys(np.lexsort((numbers, sizes)).tolist())
    for node in np.lexsort((numbers, -sizes)).tolist():
        if merger.is_done:
            break
        if node in waiting:
            del waiting[node]
            _grow(merger, node, waiting)


def _grow(merger: Merger, node: int, waiting: dict[int, None]) -> None:
    """Merge the smallest groups that wait into this one, while that gains."""
    for partner in list(waiting):
        if merger.is_done or merger.size[node] >= merger.max_size:
            break
        union = merger.union((node, partner))
        if union is not None:
            node = merger.adopt(union, (node, partner))
            del waiting[partner]


class _Queue:
    """Groups by size."""

    def __init__(self, merger: Merger) -> None:
        self._merger = merger
        sizes = merger.groups.size
        self.levels: dict[int, list[I64]] = {int(size): [np.flatnonzero(sizes == size)] for size in np.unique(sizes)}

    def pop(self) -> I64:
        """Return all groups of the smallest size, in order."""
        nodes = np.concatenate(self.levels.pop(min(self.levels)))
        return nodes[np.argsort(self._merger.order[nodes], kind="stable")]

    def pair(self, nodes: I64) -> I64:
        """Merge pairs of these groups of one size, as many as are needed and gain; return the others, in order."""
        merger = self._merger
        if len(nodes) and 2 * merger.size[nodes[0]] > merger.max_size:
            if len(nodes) > 1:
                merger.obstacles[Obstacle.SIZE] = None
            return nodes
        left = self._pair_equals(nodes, merger.host(nodes))
        left = self._pair_equals(left, np.zeros_like(left))
        return self._pair_kinds(left)

    def attach(self, groups: I64, pool: I64) -> tuple[I64, I64]:
        """Merge each group with one of a pool, on its own host if there is one; return what is left of both."""
        merger = self._merger
        hopeless: dict[int, None] = {}
        left = []
        for node in groups.tolist():
            bag = int(merger.bag[node])
            place = None if merger.is_done or bag in hopeless else self._find_partner(node, pool)
            if place is None:
                hopeless[bag] = None
                left.append(node)
                continue
            self._merge(np.array([node]), pool[place : place + 1])
            pool = np.delete(pool, place)
        return np.array(left, dtype=np.int64), pool

    def _find_partner(self, node: int, pool: I64) -> int | None:
        """Return the place of the best partner in the pool."""
        merger = self._merger
        is_near = merger.host(pool) == merger.host(np.array([node]))[0]
        for bag in dict.fromkeys(merger.bag[pool].tolist()):
            is_alike = merger.bag[pool] == bag
            near = np.flatnonzero(is_alike & is_near)
            place = int(near[0]) if near.size else int(is_alike.argmax())
            if merger.union((node, int(pool[place]))) is not None:
                return place
        return None

    def _pair_equals(self, nodes: I64, place: I64) -> I64:
        """Pair neighbours of one place and one bag; return those left, in order.

        Args:
            nodes: in order.
            place: [n] number; only groups of one place are paired.
        """
        if len(nodes) < 2 or self._merger.is_done:
            return nodes
        bag = self._merger.bag[nodes]
        by_run = np.lexsort((bag, place))
        is_new = np.ones(len(nodes), dtype=np.bool_)
        is_new[1:] = (np.diff(bag[by_run]) != 0) | (np.diff(place[by_run]) != 0)
        starts = np.flatnonzero(is_new)
        rank = np.arange(len(nodes)) - starts[np.cumsum(is_new) - 1]
        length = np.diff(np.append(starts, len(nodes)))[np.cumsum(is_new) - 1]
        is_one = (rank % 2 == 0) & (rank + 1 < length)
        ones, others = nodes[by_run[is_one]], nodes[by_run[np.flatnonzero(is_one) + 1]]
        in_order = np.argsort(self._merger.order[ones], kind="stable")
        merged = self._merge(ones[in_order], others[in_order])
        return nodes[~np.isin(nodes, merged)]

    def _pair_kinds(self, nodes: I64) -> I64:
        """Pair groups of different bags; return those left, in order."""
        merger = self._merger
        bags = merger.bag[nodes]
        waiting = {bag: nodes[bags == bag] for bag in dict.fromkeys(bags.tolist())}
        for one, other in combinations(waiting, 2):
            count = min(len(waiting[one]), len(waiting[other]))
            if count and not merger.is_done:
                merged = self._merge(waiting[one][:count], waiting[other][:count])
                waiting[one] = waiting[one][~np.isin(waiting[one], merged)]
                waiting[other] = waiting[other][~np.isin(waiting[other], merged)]
        left = np.concatenate([_NOBODY, *waiting.values()])
        return left[np.argsort(merger.order[left], kind="stable")]

    def _merge(self, ones: I64, others: I64) -> I64:
        """Merge pairs; return the nodes that are no more."""
        nodes, is_taken = self._merger.merge_pairs(ones, others)
        if len(nodes):
            self.levels.setdefault(int(self._merger.size[nodes[0]]), []).append(nodes)
        return np.concatenate((ones[is_taken], others[is_taken]))
