"""Merges of groups: one by one or in bulk, what a node says of itself is what its groups say together."""

from __future__ import annotations

import numpy as np
import pytest

from services.planner.policy.plans.drop_facts import DropParams
from services.planner.policy.plans.merging import Merger
from tests.support.drop_builders import random_facts
from tests.support.kinds import some

SEEDS = range(60)
COLUMNS = ("size", "num_blocks", "order", "parent")


def leaves(merger: Merger, node: int) -> list[int]:
    """Return the groups as they were that a node is made of."""
    children = np.flatnonzero(merger.parent[: merger.num_nodes] == node).tolist()
    return sorted(leaf for child in children for leaf in leaves(merger, child)) if children else [node]


def draw_merges(seed: int) -> tuple[Merger, int]:
    """Return groups that were merged at random, and how many merges that took."""
    rng = np.random.default_rng(seed)
    merger = Merger(random_facts(rng), DropParams(), required_tokens=10**9)
    count = 0
    for _ in range(20):
        roots = np.flatnonzero(merger.parent[: merger.num_nodes] < 0)
        if len(roots) < 2:
            break
        nodes = rng.choice(roots, min(int(rng.integers(2, 4)), len(roots)), replace=False).tolist()
        union = merger.union(nodes)
        if union is not None:
            merger.adopt(union, nodes)
            count += 1
    return merger, count


@pytest.mark.slow
def test_a_node_has_the_sizes_of_its_groups_and_the_place_of_the_first_of_them() -> None:
    total = 0
    for seed in SEEDS:
        merger, count = draw_merges(seed)
        total += count
        first = len(merger.groups.size)
        for node in range(first, merger.num_nodes):
            own = leaves(merger, node)
            assert merger.order[node] == min(own)
            assert merger.size[node] == merger.groups.size[own].sum()
            assert (
                merger.num_blocks[node] == merger.unions[node].tiling.num_blocks > merger.groups.num_blocks[own].sum()
            )
            assert merger.bag[node] == merger.unions[node].bag
            index = np.array([node])
            assert merger.host(index) == merger.groups.host[min(own)]
            assert merger.throttled(index) == merger.groups.throttled[min(own)]
        roots = np.flatnonzero(merger.parent[: merger.num_nodes] < 0)
        assert len(roots) == merger.num_groups
        gained = merger.num_blocks[roots].sum() - merger.groups.num_blocks.sum()
        assert merger.gained_blocks == gained
        ends = merger.roots()
        for instance, group in enumerate(merger.groups.of_instance.tolist()):
            assert ends[instance] < 0 if group < 0 else group in leaves(merger, int(ends[instance]))
    assert total > len(SEEDS), "merges came to pass"


@pytest.mark.parametrize("seed", SEEDS)
def test_pairs_merged_in_bulk_are_what_they_are_one_by_one(seed: int) -> None:
    bulk, single = (
        Merger(random_facts(np.random.default_rng(seed)), DropParams(), required_tokens=10**9) for _ in range(2)
    )
    while True:
        roots = np.flatnonzero(bulk.parent[: bulk.num_nodes] < 0)
        half = len(roots) // 2
        before = bulk.num_nodes
        ones, others = roots[:half], roots[half : 2 * half][::-1]
        nodes, is_taken = bulk.merge_pairs(ones, others)
        for one, other in zip(ones[is_taken].tolist(), others[is_taken].tolist(), strict=True):
            union = some(single.union((one, other)))
            single.adopt(union, (one, other))
        assert nodes.tolist() == list(range(before, single.num_nodes))
        for name in COLUMNS:
            assert getattr(bulk, name).tolist() == getattr(single, name).tolist(), name
        assert (bulk.num_groups, bulk.gained_blocks) == (single.num_groups, single.gained_blocks)
        assert [each.tiling for each in bulk.unions.values()] == [each.tiling for each in single.unions.values()]
        if not len(nodes):
            return
