"""Which modelled memory takes what from which, when workers become a group or stop being one.

`kv_table` says it for live workers, whose buffers are limited.

Source: KunServe v2, section 4.2 (KV is exchanged because layers moved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.engine.types import KeptKv
from services.worker.executor.modelled_stage import ModelledStage
from services.worker.executor.shadow_kv import ShadowKv
from shared.ids import WorkerId
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Estate:
    """What a worker brings into a group."""

    layers: LayerRange
    """Held before."""
    kv: ShadowKv
    """Their memory."""
    group: WorkerId
    """Who led the group that it was in, itself if it was alone: that one says which blocks are kept."""
    kept: KeptKv
    block_bytes: int
    """Of a block's keys and values in one layer."""


@dataclass(frozen=True, slots=True)
class Share:
    """A worker that leaves a group in order."""

    layers: LayerRange
    """Held in the group."""
    kv: ShadowKv
    """Their memory."""
    whole: ShadowKv
    """Memory of the whole model, to be filled."""
    shares: tuple[KeptKv, ...]
    """Of the leader: what goes to whom."""
    block_bytes: int
    """Of a block's keys and values in one layer."""


def exchange(before: Sequence[Estate], stages: Sequence[ModelledStage]) -> tuple[KeptKv, int]:
    """Give every stage its layers of the blocks that are kept, under new ids: those of the first worker come first.

    Pages need no room of their own on the way: what a worker has sent makes room for what it gets.

    Returns:
        What the group's blocks hold, and the most bytes that one worker sends or receives.
    """
    num_blocks = min(stage.capacity.num_blocks for stage in stages)
    names: dict[bytes, int] = {}
    sent, received = [0] * len(stages), [0] * len(stages)
    for owner in before:
        fresh = [i for i, name in enumerate(owner.kept.names) if name not in names][: num_blocks - len(names)]
        source = owner.kept.ids[fresh]
        target = np.arange(len(names), len(names) + len(fresh), dtype=np.int32)
        names.update(zip([owner.kept.names[i] for i in fresh], target.tolist(), strict=True))
        holders = [i for i, other in enumerate(before) if other.group == owner.group]
        for index, stage in enumerate(stages):
            for holder in holders:
                part = before[holder].layers.overlap(stage.layers)
                if part is None or not fresh:
                    continue
                stage.kv.take_from(before[holder].kv, source, target)
                if holder != index:
                    num_bytes = len(fresh) * owner.block_bytes * len(part)
                    sent[holder] += num_bytes
                    received[index] += num_bytes
    return KeptKv(tuple(names), np.array(list(names.values()), dtype=np.int32)), max(*sent, *received)


def hand_out(members: Sequence[Share]) -> tuple[list[KeptKv], int]:
    """Give every member of a group that dissolves all layers of the blocks that are its share.

    Returns:
        What each one's blocks hold, and the most bytes that one of them sends or receives.
    """
    kept: list[KeptKv] = []
    sent, received = [0] * len(members), [0] * len(members)
    for index, (member, share) in enumerate(zip(members, members[0].shares, strict=True)):
        count = min(len(share), member.whole.num_blocks)
        target = np.arange(count, dtype=np.int32)
        for holder, other in enumerate(members):
            member.whole.take_from(other.kv, share.ids[:count], target)
            if holder != index:
                num_bytes = count * other.block_bytes * len(other.layers)
                sent[holder] += num_bytes
                received[index] += num_bytes
        kept.append(KeptKv(share.names[:count], target))
    return kept, max(*sent, *received)
