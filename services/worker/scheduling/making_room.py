"""The running rows of a step in the making, and who of them gives way.

They stand in the policy's order: when blocks run out the last ones go, as many as needed and no more; the first never
does. Where there is host memory, the end of a row that goes is copied there if that wastes less than computing it again
(`recompute_or_swap.py`): as few of its last blocks as are needed. Its first ones stay on the device and are *lent*:
they go before anybody else gives way, and also for a parked row that does not fit else. What is copied is free only
when the copy is done, so a row is sent one step before the blocks run out; a row that lacks one meanwhile sits that
step out.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.scheduling.blocks_math import Places, among, ceil_div, missing_blocks, num_kept, num_known
from services.worker.scheduling.recompute_or_swap import Leaving
from services.worker.scheduling.view import EMPTY_ROWS, I32, NO_WAYS, U8, BlockFacts, PreemptHow, SchedulerView

FEW_VICTIMS: Final = 8
"""So many are looked at first; if they are too few, so many times as many."""


class KeptRunning:
    """Rows that run on, in the policy's order, the blocks that are left for more, and the rows that give way."""

    def __init__(self, view: SchedulerView, order: I32) -> None:
        self.rows, columns = order, view.columns
        self.computed: I32 = columns.num_computed.take(order)
        self.remaining: I32 = num_known(columns, order) - self.computed
        self.free_blocks = view.free_blocks
        self.coming_blocks = 0 if view.host is None else view.host.leaving_blocks
        """Blocks that are free once the copies to the host are done."""
        self.lent_later = 0 if view.host is None else view.host.lent_blocks
        """Blocks that can be taken then."""
        self.swapped: I32 = EMPTY_ROWS
        """Rows that give way and move to the host, but for `kept`."""
        self.kept: dict[int, int] = {}
        """By row of `swapped`: how many of its first blocks it keeps."""
        self.dropped: I32 = EMPTY_ROWS
        """Rows that give way and are computed again."""
        self.holding: I32 = EMPTY_ROWS
        """Parked rows that hold blocks; the last one loses them first."""
        if view.preempted.size:
            self.holding = view.preempted[columns.held_blocks[view.preempted] > 0]
        self.arriving = EMPTY_ROWS if view.host is None else view.host.arriving
        """Rows that run when their KV is back from the host."""
        self.come: set[int] = set()
        """Parked rows that come in."""
        self.kept_free = 0
        """Blocks that nobody who comes in may have, nor what parked rows hold; 0: he may have those."""
        self._come_blocks = 0  # promised to them
        self._given_blocks = 0  # of what is promised to anybody
        self._view = view
        self._blocks = view.blocks
        self._leaving = None if view.host is None else Leaving(view.host, view.cost)
        self._freeable: I32 | None = None

    @property
    def count(self) -> int:
        """Rows that run, are in flight, or come in."""
        return int(self.rows.size + self.arriving.size) + self._view.num_in_flight + len(self.come)

    @property
    def any_gone(self) -> bool:
        """Somebody gives way."""
        return bool(self.swapped.size or self.dropped.size)

    def gives_way(self, row: int) -> bool:
        """Return whether a row gives way, or gives up more of what it holds."""
        return self.any_gone and (row in self.kept or row in self.dropped)

    def missing(self, places: Places, num_tokens: int) -> I32:
        """Return the blocks that rows, named by their places, lack for their next tokens."""
        return missing_blocks(self._view, self.rows[places], self.computed[places] + num_tokens)

    def come_in(self, row: int, num_blocks: int) -> None:
        """Let a parked row run, which will need so many blocks."""
        self.come.add(row)
        if self.holding.size:
            self._stay_holding(self.holding != row)
        self._come_blocks += num_blocks

    def give(self, num_blocks: int) -> None:
        """Give some row blocks for its known tokens, or for its KV that is on the host."""
        self.free_blocks -= num_blocks
        self._given_blocks += num_blocks

    def promised_blocks(self) -> int:
        """Return the blocks that nobody else may have, besides those that were given.

        One for each row that finds no end of another one's, the rest of each prefill, and what those that come in need.
        """
        view = self._view
        prefills = (self.remaining > 1).nonzero()[0]
        promised = self.kept_free + self.rows.size - view.sides.num_of(self.rows)
        promised += self._come_blocks - self._given_blocks
        for others in (self.arriving, view.in_flight):
            if others.size:
                missing = missing_blocks(view, others, num_known(view.columns, others))
                promised += int(others.size) + int(missing.sum())
        if prefills.size:
            ends = (self.computed + self.remaining)[prefills]
            promised += int(missing_blocks(view, self.rows[prefills], ends).sum())
        return promised

    def freeable(self) -> I32:
        """Return [n]: blocks that each row frees now if it and all after it are dropped, besides those dropped so far.

        Lent ones go before. A block that a row on its way to the host shares is freed by nobody: the copy needs it.
        """
        return self._all_freeable()[: self.rows.size]

    def lent_blocks(self) -> int:
        """Return how many blocks parked rows free if they are dropped, besides those dropped so far."""
        return int(self._all_freeable()[self.rows.size :][: self.holding.size].sum()) if self.holding.size else 0

    def take_lent(self, num_blocks: int, row: int) -> int:
        """Let parked rows give up their last blocks until so many are free or coming; none do if that is not enough.

        Args:
            num_blocks: that are wanted beyond the free ones.
            row: a parked one for which it is; it gives up nothing.

        Returns:
            How many are free now that were not.
        """
        before, wanted = self.free_blocks, self.free_blocks + num_blocks
        others = self.holding[self.holding != row]
        if self.kept_free or not others.size or not 0 < wanted - self._room() <= self._lent_but(row):
            return 0
        freeable = self._blocks.freeable(np.concatenate([others, self.dropped]))[: others.size]
        for other, count in zip(others[::-1].tolist(), freeable[::-1].tolist(), strict=True):
            if wanted > self._room() and not self._send(other, wanted - self._room(), count, self.computed.sum()):
                self._drop(other)
        self._stay_holding(~among(self._view, self.holding, self.gone()[0]))
        return self.free_blocks - before

    def make_room(self, needs: I32, ahead: I32) -> None:
        """Let rows give way until those that stay have the blocks that they need, now or when copies are done.

        Nobody gives way if not even the first row could be helped: only pins or a batch in flight can help it.

        Args:
            needs: [n] blocks that each row lacks for this step.
            ahead: [n] blocks that it lacks for this step and the next, at least as many.
        """
        if self._leaving is not None and int(ahead.sum()) > self._room():
            kept = num_kept(ahead, self.freeable(), self._room() + self.lent_blocks() + self.lent_later)
            if kept > 0:
                self._swap_from(kept, int(ahead[:kept].sum()))
        needs = needs[: self.rows.size]
        if int(needs.sum()) > self._room():
            kept = num_kept(needs, self.freeable(), self._room() + self.lent_blocks() + self.lent_later)
            if kept > 0:
                self._drop_from(kept, int(needs[:kept].sum()) - self.lent_later)

    def preempt(self, victims: I32, num_blocks: int, row: int, *, lacks_place: bool) -> None:
        """Let the first of the victims give way, as few as free enough; nobody if all of them would not.

        Args:
            victims: some of the rows, in the order in which they are to go.
            num_blocks: that are wanted beyond those free; each row that goes also frees its headroom of one.
            row: a parked one for which it is. Others give up what they hold first.
            lacks_place: one has to go in any case.
        """
        wanted, lent = self.free_blocks + num_blocks, self._lent_but(row)
        if not lacks_place and wanted - self._room() <= lent + self.lent_later:
            self.take_lent(num_blocks, row)
            return
        freeable, enough = _freed_first(self._blocks, victims, wanted - self._room() - lent)
        if not enough:
            return
        count, freed = freeable.size, int(freeable.sum()) + freeable.size
        self.take_lent(num_blocks - freed, row)
        lacking, dropped = wanted - self._room(), list[int]()
        for victim, num_freed in zip(victims[:count].tolist(), freeable.tolist(), strict=False):
            others = self.computed.sum() - self._view.columns.num_computed[victim]
            if not self._send(victim, max(lacking, 1), num_freed, others):
                dropped.append(victim)
            lacking -= num_freed + 1
        self._drop(*dropped)
        self._keep(~among(self._view, self.rows, victims[:count]))

    def gone(self) -> tuple[I32, U8, I32]:
        """Return the rows that give way, and how each does, [n] `PreemptHow`; the last of the order come last.

        The third: how many of its first blocks each keeps.
        """
        if not self.any_gone:
            return EMPTY_ROWS, NO_WAYS, EMPTY_ROWS
        how = np.repeat([PreemptHow.RECOMPUTE, PreemptHow.SWAP], [self.dropped.size, self.swapped.size])
        kept = [0] * self.dropped.size + [self.kept[row] for row in self.swapped.tolist()]
        return np.concatenate([self.dropped, self.swapped]), how.astype(np.uint8), np.array(kept, dtype=np.int32)

    def _all_freeable(self) -> I32:
        if self._freeable is None:
            self._freeable = self._blocks.freeable(np.concatenate([self.rows, self.holding, self.dropped]))
        return self._freeable

    def _lent_but(self, row: int) -> int:
        """Return how many blocks parked rows free without this one."""
        others = np.concatenate([self.holding[self.holding != row], self.dropped])
        return int(self._blocks.freeable(others)[: others.size - self.dropped.size].sum()) if self.holding.size else 0

    def _room(self) -> int:
        return self.free_blocks + self.coming_blocks

    def _swap_from(self, kept: int, wanted: int) -> None:
        """Send rows to the host until `kept` are left and so many blocks are free or coming.

        Parked ones first, then the last of the order; no more of them once one is better computed again.
        """
        freeable, size, last = self._all_freeable(), self.rows.size, self.rows.size
        others = int(self.computed.sum())
        for place in range(size + self.holding.size - 1, kept - 1, -1):
            if place >= size:
                if wanted <= self._room():
                    continue
                row = int(self.holding[place - size])
            else:
                row = int(self.rows[place])
                others -= int(self.computed[place])
            if not self._send(row, max(wanted - self._room(), 1), int(freeable[place]), others):
                break
            last = min(last, place)
        self._stay_holding(~among(self._view, self.holding, self.swapped))
        self._keep(np.arange(size) < last)

    def _send(self, row: int, lacking: int, freeable: int, num_other_tokens: int) -> bool:
        """Send as many of a row's last blocks to the host as are lacking; not if computing them again wastes less.

        Args:
            row: runs, or holds blocks still.
            lacking: blocks, at least one.
            freeable: what all its blocks would free: the first ones may be shared.
            num_other_tokens: of KV of those that run on.
        """
        columns, host = self._view.columns, self._view.host
        if self._leaving is None or host is None:
            return False
        num_tokens, held = int(columns.num_computed[row]), int(columns.held_blocks[row])
        num_full, num_blocks = num_tokens // self._view.block_size, ceil_div(num_tokens, self._view.block_size)
        kept = max(min(held - lacking, num_full, num_blocks - 1), 0) if lacking < freeable else 0
        there, num_known = host.on_host(row, kept), max(num_tokens, int(columns.host_tokens[row]))
        if not self._leaving.swaps(num_blocks - kept, num_known, int(num_other_tokens), there, kept):
            return False
        self.swapped = np.append(np.int32(row), self.swapped)
        self.kept[row] = kept
        self.coming_blocks += min(held - kept, freeable)
        return True

    def _drop_from(self, kept: int, wanted: int) -> None:
        """Drop all rows from `kept` on, and parked ones before until so many blocks are free or coming."""
        for row in self.holding[::-1].tolist():
            if wanted > self._room():
                self._drop(row)
        self._drop(*self.rows[kept:].tolist())
        self._stay_holding(~among(self._view, self.holding, self.dropped))
        self._keep(np.arange(self.rows.size) < kept)

    def _drop(self, *rows: int) -> None:
        """Drop rows, the last one first."""
        self.dropped = np.concatenate([np.array(rows, dtype=np.int32), self.dropped])
        self.free_blocks += int(self._blocks.freeable(self.dropped)[: len(rows)].sum())

    def _keep(self, stays: np.ndarray) -> None:
        self.rows, self.computed, self.remaining = self.rows[stays], self.computed[stays], self.remaining[stays]
        self._freeable = None

    def _stay_holding(self, stays: np.ndarray) -> None:
        self.holding, self._freeable = self.holding[stays], None


def _freed_first(blocks: BlockFacts, victims: I32, num_blocks: int) -> tuple[I32, bool]:
    """Return what each of the first victims frees, as few as free so many together, and whether any number does.

    Each also frees its headroom of one. Few are looked at first: to ask for all is dear, and few go.
    """
    looked_at = FEW_VICTIMS
    while True:
        freeable = blocks.freeable(victims[:looked_at][::-1])[::-1]
        freed = freeable.cumsum() + np.arange(1, freeable.size + 1)
        count = int(np.searchsorted(freed, num_blocks)) + 1
        if count <= freeable.size or looked_at >= victims.size:
            return freeable[:count], count <= freeable.size
        looked_at *= FEW_VICTIMS
