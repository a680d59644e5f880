"""The instances of a cluster as columns, and the groups that they are in: a plan for thousands computes with these.

    instances   i0 i1 i2 i3 i4          sorted by id; a column per field
    groups      0  1  1  -  2           a number per group that holds a copy; -1: its group lost a member

Groups are numbered in the order in which they are taken: those with throttled members first, then by the host and the
place of their first member.

Pure; arrays are read-only for those who get them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.planner.policy.plans.capacity import UNLIMITED_BLOCKS, CapacityRule
from services.planner.policy.plans.drop_facts import InstanceFacts, ModelFacts

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceColumns:
    """[n] each: the fields of `InstanceFacts` by their names, in the order of the instances."""

    num_pages: I64
    used_tokens: I64
    demanded_tokens: I64
    growth_tokens: I64
    num_running: I64
    num_queued: I64
    throttled: I64
    """0 or 1"""
    first: I64
    """First layer held."""
    end: I64
    """First layer behind those held."""
    max_blocks: I64
    """`UNLIMITED_BLOCKS` where there is no limit."""
    host: I64
    """Number of the host, in the order of the hosts' names."""
    link_bytes_per_s: F64
    token_s: F64


_COUNTS = ("num_pages", "used_tokens", "demanded_tokens", "growth_tokens", "num_running", "num_queued", "throttled")


def instance_columns(instances: Sequence[InstanceFacts]) -> InstanceColumns:
    """Return the columns of these instances."""

    def column(name: str) -> I64:
        return np.fromiter(map(attrgetter(name), instances), np.int64, len(instances))

    hosts = [instance.host for instance in instances]
    numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
    limits = [UNLIMITED_BLOCKS if each.max_blocks is None else each.max_blocks for each in instances]
    return InstanceColumns(
        **{name: column(name) for name in _COUNTS},
        first=column("layers.first"),
        end=column("layers.end"),
        max_blocks=np.array(limits, dtype=np.int64),
        host=np.fromiter(map(numbers.__getitem__, hosts), np.int64, len(hosts)),
        link_bytes_per_s=np.array([instance.link_bytes_per_s for instance in instances], dtype=np.float64),
        token_s=np.array([instance.token_s for instance in instances], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class GroupColumns:
    """The groups as they are now."""

    of_instance: I64
    """[n] number of each instance's group; -1: the group lacks layers, and no plan counts on it."""
    size: I64
    """[g] instances"""
    num_blocks: I64
    """[g] capacity"""
    throttled: Bool
    """[g] one of its members is"""
    host: I64
    """[g] of its first member"""
    first: I64
    """[g] its first instance"""

    def name(self, number: int, instances: Sequence[InstanceFacts]) -> str:
        """Return the id of a group."""
        return instances[int(self.first[number])].group


def group_columns(
    model: ModelFacts, rule: CapacityRule, instances: Sequence[InstanceFacts], columns: InstanceColumns
) -> GroupColumns:
    """Return the groups of these instances, numbered in the order in which a plan takes them."""
    label = _labels(model, instances, columns)
    valid = label >= 0
    # a group goes by its first instance until it gets its number
    first, inverse = np.unique(label[valid], return_inverse=True)
    throttled = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(throttled, inverse, columns.throttled[valid])
    num_blocks = np.full(len(first), UNLIMITED_BLOCKS, dtype=np.int64)
    backed = rule.blocks_of(
        columns.first[valid], columns.end[valid], columns.num_pages[valid], columns.max_blocks[valid]
    )
    np.minimum.at(num_blocks, inverse, backed)
    size = np.bincount(inverse, minlength=len(first))
    order = np.lexsort((first, columns.host[first], 1 - throttled))
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    of_instance = np.full(len(label), -1, dtype=np.int64)
    of_instance[valid] = number[inverse]
    return GroupColumns(
        of_instance=of_instance,
        size=size[order],
        num_blocks=num_blocks[order],
        throttled=throttled[order] > 0,
        host=columns.host[first][order],
        first=first[order],
    )


def _labels(model: ModelFacts, instances: Sequence[InstanceFacts], columns: InstanceColumns) -> I64:
    """Return the first instance of each one's group, or -1 where the group lacks layers."""
    seen: dict[str, int] = {}
    names = [instance.group_id or instance.instance_id for instance in instances]
    label = np.array([seen.setdefault(name, index) for index, name in enumerate(names)], dtype=np.int64)
    label[np.isin(label, _lacking(model, label, columns))] = -1
    return label


def _lacking(model: ModelFacts, label: I64, columns: InstanceColumns) -> I64:
    """Return the labels of groups whose members do not hold every layer.

    Members are looked at by group, in order of their first layers: each must begin where those before it have got to.
    """
    order = np.lexsort((columns.first, label))
    of_group = label[order]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = of_group[1:] != of_group[:-1]
    # one running maximum for all groups: each group's layers lie above those of the groups before it
    above = np.cumsum(begins) * (model.num_layers + 1)
    reached = np.maximum.accumulate(columns.end[order] + above) - above
    before = np.where(begins, 0, np.roll(reached, 1))
    ends = np.roll(begins, -1)
    lacks = (columns.first[order] > before) | (ends & (reached < model.num_layers))
    lacking: I64 = of_group[lacks]
    return lacking
