"""The host as a second tier of the prefix cache: which blocks go there before the device forgets them.

    free blocks of the device   blank, blank | kept: oldest ... newest          with the blank ones as many as two
                                               └────────────┘                   steps take: on the host, or on the way

A free block that keeps its contents loses them when it is handed out, and there is no time for a copy then: a step may
take hundreds at once. So the next ones are copied before, and only while nothing else goes to the host: who gives way
comes first.

Source: HiCache of SGLang (2025) and the KV offloading of vLLM have the same two tiers. Deviation: neither when a block
is computed (every block would cross the link) nor when it is evicted (somebody would wait for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.host_blocks import HostBlocks
from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.contract.arrays import EMPTY_I32, I32
from shared.prefix_names import RunName

STEPS_AHEAD: Final = 2
"""Of as many blocks as any can take: one that is made next, and one while what it has made room for is copied."""
COPY_S: Final = 0.02
"""How long one copy keeps the link, or on the CPU the steps."""
FEW: Final = 16
"""Blocks; while no more are taken or given back, a look that has found nothing need not be repeated."""


def about_to_be_lost(device: BlockPool, host: HostBlocks, step_blocks: int, most: int) -> I32:
    """Return the free blocks of the device whose contents should be copied to the host now.

    No more than half of the free ones, which the others can take meanwhile. Of no more than half of what the host has
    free, so that they do not push each other out there, one after the other for ever.

    Args:
        device: whose blocks they are.
        host: where they go.
        step_blocks: most that one step takes.
        most: of one copy.
    """
    num_next = STEPS_AHEAD * step_blocks - device.num_blank
    if num_next <= 0:
        return EMPTY_I32
    ids = device.oldest_kept(min(num_next, host.num_free // 2))
    is_new = [host.index.get(device.index.name_of(block)) is None for block in ids.tolist()]
    return ids[is_new][: min(most, device.num_free // 2)]


def begin_of(names: Sequence[RunName], device: PrefixIndex, host: PrefixIndex) -> tuple[I32, I32]:
    """Return the blocks of the device that hold the first of some full blocks, and those of the host that go on."""
    here = device.find(names)
    there = host.find(names[len(here) :])
    return np.array(here, dtype=np.int32), np.array(there, dtype=np.int32)


class LookingAhead:
    """Looks at most once as long as few blocks are taken or given back: a look asks for the name of each block."""

    def __init__(self) -> None:
        self._num_blank = self._num_free = 0
        """Of the device, the last time."""
        self._few = 0
        """0: something was found then."""

    def about_to_be_lost(self, device: BlockPool, host: HostBlocks, step_blocks: int, block_copy_s: float) -> I32:
        """See there; as many as go over the link in `COPY_S`."""
        num_blank, num_free = device.num_blank, device.num_free
        if abs(num_blank - self._num_blank) < self._few and abs(num_free - self._num_free) < self._few:
            return EMPTY_I32
        most = max(int(COPY_S / block_copy_s), 1) if block_copy_s else host.num_usable
        found = about_to_be_lost(device, host, step_blocks, most)
        self._num_blank, self._num_free = num_blank, num_free
        self._few = 0 if found.size else min(FEW, device.num_usable // FEW)
        return found
