"""How a sequence gives way when blocks run out: its KV is dropped, or it moves to host memory.

The two are compared by what they waste: memory that is occupied while nobody makes progress with it, in token-seconds.

    recompute:  t_compute · (own + others)           everybody in the batch waits while the KV is computed again
    swap:       (t_queue + t_out + t_back) · own     the sequence's own memory is blocked while it is copied

A token-second costs the same in both, so the smaller product wins. Out goes what the host has not yet; the queue is
what the link has yet to carry, for who sends anything.

Source: InferCept (Abhyankar et al., 2024), the comparison of the waste of discarding, preserving and swapping (its
section 4). Deviations: preserving is no choice here, since the memory is needed now; copies run beside the steps, so
they stall nobody else, as in InferCept while its swaps stay within a step's budget; instead of that budget the wait for
the link counts.
"""

from __future__ import annotations

from services.worker.scheduling.view import NOTHING_ON_HOST, HostView, OnHost
from shared.cost import CostModel


class Leaving:
    """Decides for one sequence after the other, given those that leave before it.

    Args:
        host: the host memory.
        block_size: token slots of a block.
        cost: of a step; None: unknown, so nothing says that computing again is dear, and nobody moves.
    """

    def __init__(self, host: HostView, block_size: int, cost: CostModel | None) -> None:
        self._cost = cost
        self._block_copy_s = host.block_copy_s
        self._block_size = block_size
        self._free_blocks = host.free_blocks
        self._num_queued = host.num_leaving

    def swaps(self, num_tokens: int, num_other_tokens: int, there: OnHost = NOTHING_ON_HOST) -> bool:
        """Return whether a sequence should move to the host, and count it as leaving if so.

        Args:
            num_tokens: whose KV it has.
            num_other_tokens: of KV of those that run on.
            there: what the host has of it.
        """
        num_blocks = -(-num_tokens // self._block_size)
        num_out, num_taken = num_blocks - there.num_blocks, num_blocks - there.num_kept_blocks
        if self._cost is None or not num_blocks or num_taken > self._free_blocks:
            return False
        queued = self._num_queued if num_out else 0
        swap_s = (queued + num_out + num_blocks) * self._block_copy_s
        if swap_s * num_tokens > self._cost.chunk_s(0, num_tokens) * (num_tokens + num_other_tokens):
            return False
        self._free_blocks -= num_taken
        self._num_queued += num_out
        return True
