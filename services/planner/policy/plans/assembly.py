"""From merges to a plan: ranges are handed out, room is counted with the real budgets, and the price is made.

Groups that would serve with the same ranges are put together at once, as matrices [groups, stages].

Pure. Source: KunServe v1, section 4.1; v2, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.planner.policy.levers.price import Merges, Price, kv_times_s, prices_s
from services.planner.policy.plans.columns import F64, I64, group_columns
from services.planner.policy.plans.drop_facts import DropParams
from services.planner.policy.plans.drop_plan import DropPlan, NewGroup, Stage
from services.planner.policy.plans.kinds import Union
from services.planner.policy.plans.merging import Merger


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """New groups that serve with the same ranges; [g] each."""

    nodes: I64
    members: I64
    """[g, s] instances by stage"""
    union: Union
    before_tokens: I64
    after_tokens: I64
    merges: Merges


def assemble(merger: Merger, params: DropParams, required_tokens: int) -> DropPlan:
    """Return the plan that carries the merges out, of which there are some; its reason is still empty.

    A group that gains nothing with the real budgets is left out, so that it may have no groups.
    """
    rows: list[tuple[int, NewGroup]] = []
    price = np.zeros(3)
    throughput = np.array(merger.facts.throughput)
    sizes = merger.groups.size
    speed = float(throughput[sizes - 1].sum())
    for batch in _batches(merger, params, throughput):
        exchange_s = kv_times_s(merger.facts.model, params.kv, batch.merges)
        prices = prices_s(params, batch.merges, exchange_s)
        price += prices.sum(axis=1)
        speed += float((batch.merges.throughput_after - batch.merges.throughput_before).sum())
        rows.extend(_new_groups(merger, batch, exchange_s, prices.sum(axis=0)))
    groups = tuple(group for _, group in sorted(rows, key=lambda row: row[0]))
    return DropPlan(
        groups=groups,
        required_tokens=required_tokens,
        gained_tokens=sum(group.after_tokens - group.before_tokens for group in groups),
        slowdown=float(sizes.sum() * throughput[0] / speed),
        price=Price(*price.tolist()),
    )


def _new_groups(merger: Merger, batch: _Batch, exchange_s: F64, price_s: F64) -> Iterator[tuple[int, NewGroup]]:
    """Yield the groups of a batch, each after its order."""
    instances, ranges = merger.facts.instances, batch.union.tiling.layers
    numbers = (batch.before_tokens, batch.after_tokens, exchange_s, price_s)
    rows = zip(
        merger.order[batch.nodes].tolist(),
        batch.members.tolist(),
        *(column.tolist() for column in numbers),
        strict=True,
    )
    for order, members, before, after, seconds, price in rows:
        stages = []
        for index, layers in zip(members, ranges, strict=True):
            instance = instances[index]
            stages.append(Stage(instance.instance_id, instance.layers, layers))
        yield order, NewGroup(tuple(stages), before, after, seconds, price)


def _batches(merger: Merger, params: DropParams, throughput: F64) -> Iterator[_Batch]:
    node = merger.roots()
    members = np.flatnonzero(node >= len(merger.groups.size))
    nodes = np.unique(node[members])
    unions = {id(union): union for union in (merger.unions[number] for number in nodes.tolist())}
    places = {identity: place for place, identity in enumerate(unions)}
    place = np.array([places[id(merger.unions[number])] for number in nodes.tolist()], dtype=np.int64)
    # members lie by union, then by node, then by kind, then by id
    place_of = place[np.searchsorted(nodes, node[members])]
    by_place = np.lexsort((members, merger.kinds.of_instance[members], node[members], place_of))
    members, place_of = members[by_place], place_of[by_place]
    facts = _GroupFacts(merger, params, throughput)
    for number, union in enumerate(unions.values()):
        matrix = members[place_of == number].reshape(-1, len(union.tiling.layers))
        yield facts.batch(nodes[place == number], matrix[:, merger.kinds.columns_by_stage(union)], union)


class _GroupFacts:
    """What a batch needs to know of the groups as they are, by instance."""

    def __init__(self, merger: Merger, params: DropParams, throughput: F64) -> None:
        self._merger = merger
        self._throughput = throughput
        columns, rule, facts = merger.columns, merger.rule, merger.facts
        group = merger.groups.of_instance
        exact = merger.groups
        if params.page_quantum > 1:
            exact = group_columns(facts.model, rule, facts.instances, columns)
        in_group = np.flatnonzero(group >= 0)
        used = np.zeros(len(exact.size), dtype=np.int64)
        np.add.at(used, group[in_group], columns.used_tokens[in_group])
        self._own_tokens = np.where(group >= 0, used[group], 0)
        # what a group has counts once, at its first member
        is_first = np.zeros(len(group), dtype=np.bool_)
        is_first[exact.first] = True
        self._before_blocks = np.where(is_first, exact.num_blocks[group], 0)
        self._speed = np.where(is_first, throughput[exact.size[group] - 1], 0.0)

    def batch(self, nodes: I64, members: I64, union: Union) -> _Batch:
        """Return the batch of these nodes, less those that gain nothing with the real budgets."""
        rule, columns = self._merger.rule, self._merger.columns
        first = np.array([layers.first for layers in union.tiling.layers], dtype=np.int64)
        end = np.array([layers.end for layers in union.tiling.layers], dtype=np.int64)
        backed = rule.blocks_of(first, end, columns.num_pages[members], columns.max_blocks[members])
        before, after = self._before_blocks[members].sum(axis=1), backed.min(axis=1)
        gains = after > before
        nodes, members, before, after = nodes[gains], members[gains], before[gains], after[gains]
        merges = Merges(
            running=columns.num_running[members].sum(axis=1),
            queued=columns.num_queued[members].sum(axis=1),
            throughput_before=self._speed[members].sum(axis=1),
            throughput_after=np.full(len(nodes), self._throughput[members.shape[1] - 1]),
            own_tokens=self._own_tokens[members],
            all_tokens=columns.used_tokens[members].sum(axis=1),
            held=columns.end[members] - columns.first[members],
            kept=np.broadcast_to(end - first, members.shape),
            link_bytes_per_s=columns.link_bytes_per_s[members],
            token_s=columns.token_s[members].max(axis=1) * self._throughput[0] / self._throughput[members.shape[1] - 1],
        )
        block_size = rule.model.block_size
        return _Batch(nodes, members, union, before * block_size, after * block_size, merges)
