"""KV memory that comes and goes, and who fits what there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.blocks.remote_kv import RemoteSpan
from services.worker.blocks.sharing import Sharing
from services.worker.blocks.swapping import Swapping
from services.worker.contract.arrays import Bool
from services.worker.contract.executor import KvCapacity
from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.transitions import Transitions
from services.worker.sequences.table import Hold, SequenceTable, Status
from shared.api_keys import Tier


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Changes which blocks are usable; the only writer of `Hold.NO_ROOM`. The engine owns it."""

    table: SequenceTable
    blocks: BlockManager
    sharing: Sharing
    swapping: Swapping | None
    transitions: Transitions

    def grow(self, first: int, end: int) -> None:
        """Make the blocks from `first` to `end` - 1 usable, in addition to those that are."""
        self.blocks.grow(first, end)
        self._review()

    def limit(self, num_blocks: int | None) -> None:
        """Hand out only blocks with ids below `num_blocks` from now on; None: all. The caller wakes the step loop.

        The schedulers count only these at once. What is held beyond moves with the next batches (`compaction.py`); free
        blocks there lose their contents. `Engine.leave_executor` forgets the limit.

        Raises:
            ValueError: what is held now, or a sequence that is here at its full length, would not fit; nothing has
                changed.
        """
        num_usable = int(np.count_nonzero(self.blocks.usable[:num_blocks]))
        has_room = (self.table.hold & Hold.NO_ROOM) == 0
        if (self._do_not_fit(num_usable) & has_room).any():
            raise ValueError(f"a sequence that is here at its full length does not fit {num_usable} blocks")
        self.blocks.limit(num_blocks)
        self._review()

    def shed(self, num_blocks: int) -> bool:
        """Have the youngest of best effort give up their blocks until all that is in use fits below a limit.

        They run no more until a limit is set. Those in a step or a copy give theirs up when this is called after it.

        Returns:
            Whether another call can free more.
        """
        table, blocks = self.table, self.blocks
        excess = blocks.num_used - int(np.count_nonzero(blocks.usable[:num_blocks]))
        rows = np.flatnonzero((table.status != Status.FREE) & (table.tier == Tier.FLEX) & (table.held_blocks > 0))
        if excess <= 0 or not rows.size:
            return False
        rows = rows[np.argsort(table.arrival_s[rows], kind="stable")].astype(np.int32)
        num_freed = blocks.freeable(rows)[::-1].cumsum()
        rows = rows[::-1][: int(np.searchsorted(num_freed, excess)) + 1]
        table.hold[rows] |= Hold.NO_ROOM
        for row in rows.tolist():
            self.transitions.clear(row)
        return True

    def furnish(self, capacity: KvCapacity, kept: KeptKv, coming: KeptKv, spans: Sequence[RemoteSpan]) -> None:
        """Have an executor's blocks, some named, some kept for KV on its way, in place of those so far."""
        blocks, num_blocks = self.blocks, capacity.num_blocks
        if self.swapping is not None:
            self.swapping.furnish(capacity.host)
        blocks.set_usable(np.arange(blocks.refcount.size, dtype=np.int32), usable=False)
        if num_blocks > blocks.refcount.size:
            blocks.learn(num_blocks)
        for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
            blocks.index.add(name, block)
        blocks.set_usable(np.arange(num_blocks, dtype=np.int32), usable=True)
        self.sharing.coming.expect(coming, spans)
        self._review()

    def _review(self) -> None:
        """Hold the sequences that the whole KV memory cannot fit, and only those."""
        table, too_long = self.table, self._do_not_fit(self.blocks.num_usable)
        for row in np.flatnonzero(too_long).tolist():
            self.transitions.clear(row)
            self.sharing.forks.let_go(row)
        table.hold[too_long] |= Hold.NO_ROOM
        table.hold[~too_long] &= ~Hold.NO_ROOM

    def _do_not_fit(self, num_blocks: int) -> Bool:
        """Return [num_rows]: whether a row's sequence, at its full length, takes more than so many blocks."""
        table = self.table
        longest = table.num_prompt + table.max_output - 1
        too_long: Bool = (table.status != Status.FREE) & (-(-longest // self.blocks.block_size) > num_blocks)
        return too_long
