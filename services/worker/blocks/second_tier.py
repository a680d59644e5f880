"""The host as a second tier of the prefix cache: which blocks go there before the device forgets them. Pure.

    free blocks of the device   blank, blank | kept: oldest ... newest          few blank ones are left:
                                                ▲ copied to the host, those that are not there yet

A free block that keeps its contents loses them when it is handed out, and there is no time for a copy then. So the
oldest ones are copied while there are still some blank ones, a few at a time, and only while nothing else goes to the
host: who gives way comes first.

Source: HiCache of SGLang (2025) and the KV offloading of vLLM have the same two tiers. Deviation: neither when a block
is computed (every block would cross the link) nor when it is evicted (somebody would wait for it).
"""

from __future__ import annotations

from typing import Final

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.host_blocks import HostBlocks
from services.worker.contract.arrays import EMPTY_I32, I32

MOST_AT_ONCE: Final = 32
"""Blocks of one copy: on their way they are not free."""
LOOKED_AT: Final = 2 * MOST_AT_ONCE
"""Oldest blocks that are looked at: what is behind them is not forgotten soon."""
FEW_BLANK: Final = 1 / 8
"""Share of the device's blocks: while more than this hold nothing, nothing is about to be forgotten."""


def about_to_be_lost(device: BlockPool, host: HostBlocks) -> I32:
    """Return the free blocks of the device whose contents should be copied to the host now.

    No more than a fourth of the free ones, so that nobody gives way for them. Of no more than half of what the host has
    free, so that they do not push each other out there, one after the other for ever.
    """
    if device.num_blank > FEW_BLANK * device.num_usable:
        return EMPTY_I32
    ids = device.oldest_kept(min(LOOKED_AT, host.num_free // 2))
    is_new = [host.index.get(device.index.name_of(block)) is None for block in ids.tolist()]
    return ids[is_new][: min(MOST_AT_ONCE, device.num_free // 4)]
