"""Groups while a plan is made: a forest of merges over the groups as they are.

    nodes    0 1 2 3 4 | 5 = (0, 1)   6 = (2, 3)   7 = (5, 6)        a column per property, a row per node
             as they are   merged

Merges are done in bulk: many pairs in one call, of which those that gain room are taken in order until enough is
gained. Ranges are handed out once, at the end, from what the members hold now; a node only knows which bag of instances
it is.

Pure and deterministic. Source: KunServe v1, section 4.1 and Algorithm 1; v2, Fig. 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.columns import I64, Bool, group_columns, instance_columns
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.kinds import KindIndex, Union

NUM_COPIES = 2
"""Of every layer there is always another copy that it could be restored from: in another group, or in host memory."""


class Obstacle(StrEnum):
    """What stood in the way of a merge."""

    COPIES = "a layer would be left without a second copy"
    GAIN = "nothing would be gained: the stage with most layers has less room than before"
    RANGES = "what the instances hold cannot be cut into one range for each"
    SIZE = "no larger group is allowed"


class Merger:
    """The groups of a cluster, the merges done, and when to stop."""

    def __init__(self, facts: ClusterFacts, params: DropParams, required_tokens: int) -> None:
        self.facts = facts
        self.target_tokens = required_tokens
        """Enough is gained with so much."""
        self.rule = CapacityRule(facts.model)
        self.columns = instance_columns(facts.instances)
        rounded = replace(self.columns, num_pages=self.columns.num_pages // params.page_quantum * params.page_quantum)
        self.groups = group_columns(facts.model, self.rule, facts.instances, rounded)
        """As they are now, with rounded budgets."""
        self.kinds = KindIndex(self.rule, params, rounded)
        self.max_size = min(params.max_group_size, len(facts.throughput))
        self.min_groups = max(1, NUM_COPIES - fewest_host_copies(facts))
        self.num_groups = len(self.groups.size)
        self.gained_blocks = 0
        self.obstacles: dict[Obstacle, None] = {}
        self.unions: dict[int, Union] = {}
        """Of merged nodes."""
        rows = max(2 * self.num_groups, 1)
        self.bag: I64 = self._column(rows, self._bags())
        self.size: I64 = self._column(rows, self.groups.size)
        self.num_blocks: I64 = self._column(rows, self.groups.num_blocks)
        self.order: I64 = self._column(rows, np.arange(self.num_groups))
        """Least group, as numbered now, of a node; tells its host and whether it is throttled."""
        self.parent: I64 = np.full(rows, -1, dtype=np.int64)
        self.num_nodes = self.num_groups

    @staticmethod
    def _column(rows: int, values: I64) -> I64:
        column = np.zeros(rows, dtype=np.int64)
        column[: len(values)] = values
        return column

    def _bags(self) -> I64:
        """Return the bag of each group as it is."""
        groups, kinds = self.groups, self.kinds.of_instance
        bag_of_kind = np.array([self.kinds.bag((kind,)) for kind in range(int(kinds.max(initial=-1)) + 1)], np.int64)
        bags: I64 = bag_of_kind[kinds[groups.first]]
        # the groups' members one after the other, behind those that are in none
        by_group = kinds[np.argsort(groups.of_instance, kind="stable")].tolist()
        ends = (len(by_group) - groups.size.sum() + np.cumsum(groups.size)).tolist()
        for number in np.flatnonzero(groups.size > 1).tolist():
            bags[number] = self.kinds.bag(by_group[ends[number] - int(groups.size[number]) : ends[number]])
        return bags

    @property
    def gained_tokens(self) -> int:
        """Room gained so far."""
        return self.rule.tokens(self.gained_blocks)

    @property
    def is_done(self) -> bool:
        """Whether no merge is needed, or none is allowed any more."""
        return self.gained_tokens >= self.target_tokens or not self._merges_left()

    def _merges_left(self) -> int:
        """Return how many merges may follow, so that enough copies of every layer remain."""
        left = self.num_groups - self.min_groups
        if left <= 0 and self.num_groups > 1:
            self.obstacles[Obstacle.COPIES] = None
        return max(left, 0)

    def host(self, nodes: I64) -> I64:
        """Return the host of each node."""
        return self.groups.host[self.order[nodes]]

    def throttled(self, nodes: I64) -> Bool:
        """Return of each node whether it has throttled members."""
        return self.groups.throttled[self.order[nodes]]

    def union(self, nodes: Sequence[int]) -> Union | None:
        """Return what the nodes would be as one group, or None where they cannot be or would gain nothing."""
        if self.size[list(nodes)].sum() > self.max_size:
            self.obstacles[Obstacle.SIZE] = None
            return None
        unions = self.kinds.unions(self.kinds.pour([int(self.bag[node]) for node in nodes]))
        before = self.num_blocks[list(nodes)].sum()
        for union in unions:
            if union.tiling.num_blocks > before:
                return union
        self.obstacles[Obstacle.GAIN if unions else Obstacle.RANGES] = None
        return None

    def adopt(self, union: Union, nodes: Sequence[int]) -> int:
        """Put one group in the place of several; return its node."""
        index = list(nodes)
        self.num_groups -= len(index) - 1
        self.gained_blocks += union.tiling.num_blocks - int(self.num_blocks[index].sum())
        node = self.num_nodes
        self.num_nodes += 1
        self.parent[index] = node
        self.bag[node] = union.bag
        self.size[node] = self.size[index].sum()
        self.num_blocks[node] = union.tiling.num_blocks
        self.order[node] = self.order[index].min()
        self.unions[node] = union
        return node

    def merge_pairs(self, ones: I64, others: I64) -> tuple[I64, Bool]:
        """Merge pairs of nodes in order, those that gain, until enough is gained.

        Args:
            ones: [p] nodes.
            others: [p] their partners; no node occurs twice.

        Returns:
            The new nodes, and [p] which pairs they are made of.
        """
        unions, gains = self._price_pairs(ones, others)
        taken = np.flatnonzero(gains > 0)
        enough = np.searchsorted(self.rule.tokens(1) * np.cumsum(gains[taken]), self.target_tokens - self.gained_tokens)
        taken = taken[: min(int(enough) + 1, self._merges_left())]
        is_taken = np.zeros(len(ones), dtype=np.bool_)
        is_taken[taken] = True
        return self._adopt_pairs(ones[taken], others[taken], [unions[i] for i in taken], gains[taken]), is_taken

    def _price_pairs(self, ones: I64, others: I64) -> tuple[list[Union | None], I64]:
        """Return what each pair would be, and the blocks that it would gain; 0 where it cannot be."""
        before = self.num_blocks[ones] + self.num_blocks[others]
        # pairs are alike if their bags are, and the room that they have now
        levels, level = np.unique(before, return_inverse=True)
        num_bags = int(self.bag.max()) + 1
        keys = (self.bag[ones] * num_bags + self.bag[others]) * len(levels) + level
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        found = [self.union((int(ones[i]), int(others[i]))) for i in first]
        after = [0 if union is None else union.tiling.num_blocks for union in found]
        gains: I64 = np.maximum(np.array(after, dtype=np.int64)[inverse] - before, 0)
        return [found[i] for i in inverse.tolist()], gains

    def _adopt_pairs(self, ones: I64, others: I64, unions: Sequence[Union | None], gains: I64) -> I64:
        count = len(ones)
        nodes = np.arange(self.num_nodes, self.num_nodes + count)
        self.num_nodes += count
        self.num_groups -= count
        self.gained_blocks += int(gains.sum())
        self.parent[ones] = self.parent[others] = nodes
        self.num_blocks[nodes] = self.num_blocks[ones] + self.num_blocks[others] + gains
        self.size[nodes] = self.size[ones] + self.size[others]
        self.order[nodes] = np.minimum(self.order[ones], self.order[others])
        for node, union in zip(nodes.tolist(), unions, strict=True):
            assert union is not None, "a pair that gains has ranges"
            self.unions[node] = union
            self.bag[node] = union.bag
        return nodes

    def roots(self) -> I64:
        """Return, for each instance, the node of the group in which it ends; -1 where it has none."""
        node = self.groups.of_instance.copy()
        if not len(self.groups.size):
            return node
        while True:
            parent = np.where(node >= 0, self.parent[node], -1)
            if (parent < 0).all():
                return node
            node = np.where(parent >= 0, parent, node)


def fewest_host_copies(facts: ClusterFacts) -> int:
    """Return of how many hosts the memory holds the parameters of the layer that the fewest hold."""
    hosts: list[dict[str, None]] = [{} for _ in facts.model.layer_bytes]
    copies = {(each.host, each.host_copy): None for each in facts.instances if each.host_copy is not None}
    for host, copy in copies:
        for layer in range(copy.first, min(copy.end, len(hosts))):
            hosts[layer][host] = None
    return min(len(names) for names in hosts)
