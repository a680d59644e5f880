"""How a sequence gives way when blocks run out: its KV is dropped, or its last blocks move to host memory.

The two are compared by what they waste: memory that is occupied while nobody makes progress with it, in token-seconds.

    recompute:  t_compute · (own + others)           everybody in the batch waits while the KV is computed again
    swap:       (t_queue + t_out + t_back) · own     the sequence's own memory is blocked while its end is copied

A token-second costs the same in both, so the smaller product wins. Out goes what the host has not yet of the blocks
that are needed; the queue is what the link has yet to carry, for who sends anything. The whole sequence is the case in
which all blocks are needed, so it wastes most. The blocks that stay lie idle beyond the copies, but waste nothing:
whoever needs them has them a step later (`making_room.py`), so they idle only while nobody does.

Source: InferCept (Abhyankar et al., 2024), the comparison of the waste of discarding, preserving and swapping (its
section 4). Deviations: a sequence is preserved in part, as far as nobody needs its memory, and for so long, where
InferCept decides once, for all of it, by a guess at how long it is away; copies run beside the steps, so they stall
nobody else, as in InferCept while its swaps stay within a step's budget; instead of that budget the wait for the link
counts.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.view import F64, I32, NOTHING_ON_HOST, HostView, OnHost, SchedulerView
from shared.cost import CostModel


def again_s(view: SchedulerView, num_tokens: I32) -> F64:
    """Return [n]: what it takes to give way and be back: to be computed again, or copied out and back if that is less.

    Args:
        view: of this moment.
        num_tokens: [n] of KV.
    """
    known, cost, host = num_tokens.astype(np.float64), view.cost, view.host
    if cost is None:
        return np.zeros(known.size)
    compute_s: F64 = known * (cost.token_s + cost.a_s * (known + 1) / 2)
    return compute_s if host is None else np.minimum(compute_s, 2 * host.block_copy_s * known / view.block_size)


class Leaving:
    """Decides for one sequence after the other, given those that leave before it.

    Args:
        host: the host memory.
        cost: of a step; None: unknown, so nothing says that computing again is dear, and nobody moves.
    """

    def __init__(self, host: HostView, cost: CostModel | None) -> None:
        self._cost = cost
        self._block_copy_s = host.block_copy_s
        self._free_blocks = host.free_blocks
        self._num_queued = host.num_leaving

    def swaps(
        self,
        num_blocks: int,
        num_tokens: int,
        num_other_tokens: int,
        there: OnHost = NOTHING_ON_HOST,
        num_lent_blocks: int = 0,
    ) -> bool:
        """Return whether the last blocks of a sequence should move to the host, and count them as leaving if so.

        Args:
            num_blocks: of its KV, so many.
            num_tokens: whose KV it has, here or there.
            num_other_tokens: of KV of those that run on.
            there: what the host has of these blocks.
            num_lent_blocks: that stay, and may have to follow: the host has to have room for them too.
        """
        num_out, num_taken = num_blocks - there.num_blocks, num_blocks - there.num_kept_blocks
        if self._cost is None or not num_blocks or num_taken + num_lent_blocks > self._free_blocks:
            return False
        queued = self._num_queued if num_out else 0
        swap_s = (queued + num_out + num_blocks) * self._block_copy_s
        if swap_s * num_tokens > self._cost.chunk_s(0, num_tokens) * (num_tokens + num_other_tokens):
            return False
        self._free_blocks -= num_taken
        self._num_queued += num_out
        return True


class Bringing:
    """Decides which parked rows get KV that they find on the host, one after the other: where that is sooner there.

    Args:
        host: the host memory; None: there is none.
        block_size: token slots of a block.
        cost: of a step; None: unknown, so nothing says that computing is dear, and nothing is brought.
    """

    def __init__(self, host: HostView | None, block_size: int, cost: CostModel | None) -> None:
        self._host = host
        self._block_size = block_size
        self._cost = cost
        self._num_queued = 0 if host is None else host.num_arriving

    def worth(self, row: int, num_cached: int) -> int:
        """Return with how many of its first blocks, cached ones included, a row should begin; 0: with those alone."""
        host, cost, size = self._host, self._cost, self._block_size
        if host is None or cost is None:
            return 0
        found = host.behind(row)
        if not found.num_blocks or found.num_device_blocks * size != num_cached:
            return 0
        if (self._num_queued + found.num_blocks) * host.block_copy_s >= cost.chunk_s(
            num_cached, found.num_blocks * size
        ):
            return 0
        self._num_queued += found.num_blocks
        return found.num_device_blocks + found.num_blocks
