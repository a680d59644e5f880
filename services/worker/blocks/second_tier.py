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

from typing import Final

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.host_blocks import HostBlocks
from services.worker.contract.arrays import EMPTY_I32, I32

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


class LookingAhead:
    """Looks at most once as long as few blocks are taken or given back: a look asks for the name of each block."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        """Blank and free blocks of the device when nothing was found the last time."""

    def about_to_be_lost(self, device: BlockPool, host: HostBlocks, step_blocks: int, block_copy_s: float) -> I32:
        """See there; as many as go over the link in `COPY_S`."""
        now, few = (device.num_blank, device.num_free), min(FEW, device.num_usable // FEW)
        if self._seen is not None and all(abs(n - m) < few for n, m in zip(now, self._seen, strict=True)):
            return EMPTY_I32
        most = max(int(COPY_S / block_copy_s), 1) if block_copy_s else host.num_usable
        found = about_to_be_lost(device, host, step_blocks, most)
        self._seen = None if found.size else now
        return found
