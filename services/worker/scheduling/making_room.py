"""The running rows of a step in the making, and who of them gives way.

They stand in the policy's order: when blocks run out the last ones go, as many as needed and no more; the first never
does. Where there is host memory, a row that goes is copied there if that wastes less than computing it again
(`recompute_or_swap.py`). Such a row frees what the host has not yet only when the copy is done, so it is sent one step
before the blocks run out; a row that lacks one meanwhile sits that step out.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.blocks_math import Places, missing_blocks, num_kept, num_known
from services.worker.scheduling.recompute_or_swap import Leaving
from services.worker.scheduling.view import EMPTY_ROWS, I32, NO_WAYS, U8, PreemptHow, SchedulerView


class KeptRunning:
    """Rows that run on, in the policy's order, the blocks that are left for more, and the rows that give way."""

    def __init__(self, view: SchedulerView, order: I32) -> None:
        columns = view.columns
        self.rows = order
        self.computed: I32 = columns.num_computed[order]
        self.remaining: I32 = num_known(columns, order) - self.computed
        self.free_blocks = view.free_blocks
        self.coming_blocks = 0 if view.host is None else view.host.leaving_blocks
        """Blocks that are free once the copies to the host are done."""
        self.swapped: I32 = EMPTY_ROWS
        """Rows that give way and move to the host."""
        self.dropped: I32 = EMPTY_ROWS
        """Rows that give way and are computed again."""
        self.arriving = EMPTY_ROWS if view.host is None else view.host.arriving
        """Rows that run when their KV is back from the host."""
        self.come: set[int] = set()
        """Parked rows that come in."""
        self._come_blocks = 0  # promised to them
        self._given_blocks = 0  # of what is promised to anybody
        self._view = view
        self._blocks = view.blocks
        self._leaving = None if view.host is None else Leaving(view.host, view.block_size, view.cost)
        self._freeable: I32 | None = None

    @property
    def count(self) -> int:
        """Rows that run, are in flight, or come in."""
        return int(self.rows.size + self.arriving.size) + self._view.num_in_flight + len(self.come)

    @property
    def any_gone(self) -> bool:
        """Somebody gives way."""
        return bool(self.swapped.size or self.dropped.size)

    def missing(self, places: Places, num_tokens: int) -> I32:
        """Return the blocks that rows, named by their places, lack for their next tokens."""
        return missing_blocks(self._view, self.rows[places], self.computed[places] + num_tokens)

    def come_in(self, row: int, num_blocks: int) -> None:
        """Let a parked row run, which will need so many blocks."""
        self.come.add(row)
        self._come_blocks += num_blocks

    def give(self, num_blocks: int) -> None:
        """Give some row blocks for its known tokens, or for its KV that is on the host."""
        self.free_blocks -= num_blocks
        self._given_blocks += num_blocks

    def promised_blocks(self) -> int:
        """Return the blocks that nobody else may have, besides those that were given.

        One for each row, in flight or not, the rest of each prefill, and what those that come in need.
        """
        view = self._view
        prefills = (self.remaining > 1).nonzero()[0]
        promised = int(self.rows.size) + self._come_blocks - self._given_blocks
        for others in (self.arriving, view.in_flight):
            if others.size:
                promised += int(others.size + missing_blocks(view, others, num_known(view.columns, others)).sum())
        if prefills.size:
            ends = (self.computed + self.remaining)[prefills]
            promised += int(missing_blocks(view, self.rows[prefills], ends).sum())
        return promised

    def freeable(self) -> I32:
        """Return [n]: blocks that each row frees now if it and all after it are dropped, besides those dropped so far.

        A block that a row on its way to the host shares is freed by nobody: the copy needs it.
        """
        if self._freeable is None:
            self._freeable = self._blocks.freeable(np.concatenate([self.rows, self.dropped]))
        return self._freeable[: self.rows.size]

    def make_room(self, needs: I32, ahead: I32) -> None:
        """Let rows give way until those that stay have the blocks that they need, now or when copies are done.

        Nobody gives way if not even the first row could be helped: only pins or a batch in flight can help it.

        Args:
            needs: [n] blocks that each row lacks for this step.
            ahead: [n] blocks that it lacks for this step and the next, at least as many.
        """
        if self._leaving is not None and int(ahead.sum()) > self.free_blocks + self.coming_blocks:
            kept = num_kept(ahead, self.freeable(), self.free_blocks + self.coming_blocks)
            if kept > 0:
                self._swap_from(kept)
        size = self.rows.size
        if int(needs[:size].sum()) > self.free_blocks + self.coming_blocks:
            kept = num_kept(needs[:size], self.freeable(), self.free_blocks + self.coming_blocks)
            if kept > 0:
                self._drop_from(kept)

    def preempt(self, victims: I32, num_blocks: int, *, lacks_place: bool) -> None:
        """Let the first of the victims give way, as few as free enough; nobody if all of them would not.

        Args:
            victims: some of the rows, in the order in which they are to go.
            num_blocks: that are wanted beyond those free or coming; each row that goes also frees its headroom of one.
            lacks_place: one has to go in any case.
        """
        freed = self._blocks.freeable(victims[::-1])[::-1].cumsum() + np.arange(1, victims.size + 1)
        enough = (freed >= num_blocks).nonzero()[0]
        if not enough.size or not (lacks_place or num_blocks > 0):
            return
        victims = victims[: int(enough[0]) + 1]
        swaps = np.array([self._swaps(row, int(self.computed[self.rows == row][0])) for row in victims.tolist()])
        self.dropped = np.concatenate([victims[~swaps], self.dropped])
        self.swapped = np.concatenate([victims[swaps], self.swapped])
        self.free_blocks += int(self._blocks.freeable(victims[~swaps]).sum())
        self._keep(~np.isin(self.rows, victims))

    def gone(self) -> tuple[I32, U8]:
        """Return the rows that give way, and how each does, [n] `PreemptHow`; the last of the order come last."""
        if not self.any_gone:
            return EMPTY_ROWS, NO_WAYS
        how = np.repeat([PreemptHow.RECOMPUTE, PreemptHow.SWAP], [self.dropped.size, self.swapped.size])
        return np.concatenate([self.dropped, self.swapped]), how.astype(np.uint8)

    def _swap_from(self, kept: int) -> None:
        """Send rows to the host, the last one first, until `kept` are left or one is better computed again."""
        count = 0
        while count < self.rows.size - kept:
            last = -1 - count
            if not self._swaps(int(self.rows[last]), int(self.computed[last]), count):
                break
            count += 1
        if count:
            self.coming_blocks += int(self.freeable()[-count:].sum())
            stay = self.rows.size - count
            self.swapped = np.concatenate([self.rows[stay:], self.swapped])
            self._keep(np.arange(self.rows.size) < stay)

    def _swaps(self, row: int, num_tokens: int, num_gone: int = 0) -> bool:
        """Return whether a row with so many tokens goes to the host, after the last `num_gone` rows have gone."""
        host = self._view.host
        if self._leaving is None or host is None or self._view.cost is None:
            return False
        others = int(self.computed[: self.rows.size - num_gone].sum()) - num_tokens
        return self._leaving.swaps(num_tokens, others, host.on_host(row))

    def _drop_from(self, kept: int) -> None:
        freed = int(self.freeable()[kept:].sum())
        self.dropped = np.concatenate([self.rows[kept:], self.dropped])
        self.free_blocks += freed
        freeable = self.freeable()[:kept]
        self._keep(np.arange(self.rows.size) < kept)
        self._freeable = freeable

    def _keep(self, stays: np.ndarray) -> None:
        self.rows, self.computed, self.remaining = self.rows[stays], self.computed[stays], self.remaining[stays]
        self._freeable = None
