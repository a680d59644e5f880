"""KV that moves to host memory and back while its sequence does not run.

    running ──leave──► preempted, SWAPPING ──copy done──► preempted
    preempted ──come_back──► running, SWAPPING ──copy done──► running

A copy runs beside the steps. Until it is done its device blocks are pinned and its host blocks held, whatever becomes
of the row: so a cancel in the middle is safe, and memory is free only when nobody reads or fills it any more. The row
itself has the bit SWAPPING meanwhile, so nobody schedules it. It keeps its host blocks until its KV is on the device
again, or it ends.

Source: vLLM (Kwon et al., 2023, section 4.5) for swapping whole sequences; InferCept (Abhyankar et al., 2024) for
copies beside the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.blocks.host_blocks import HostBlocks
from services.worker.blocks.manager import BlockManager
from services.worker.contract.executor import HostCopy, HostMemory
from services.worker.scheduling.view import HostView
from services.worker.sequences.table import Hold, SequenceTable, Status


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that has ended, and whose it was."""

    row: int | None
    """None: the row has ended meanwhile."""
    to_host: bool
    num_tokens: int
    """Tokens whose KV it carried."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A copy under way."""

    copy: HostCopy
    row: int
    num_tokens: int
    num_freed: int
    """Device blocks that become free when it is done."""


class Swapping:
    """Host blocks, and the copies under way. The engine owns it; nobody else changes it."""

    def __init__(self, table: SequenceTable, blocks: BlockManager, memory: HostMemory) -> None:
        self.host = HostBlocks(memory.num_blocks)
        self._table = table
        self._blocks = blocks
        self._memory = memory
        self._moves: dict[int, _Move] = {}
        self._move_of: dict[int, int] = {}
        """Copy under way of a row."""
        self._arriving: dict[int, None] = {}
        """Rows whose KV is being brought back, in order."""
        self.num_leaving_blocks = 0
        """Device blocks that become free when the copies to the host are done."""
        self._begun: list[HostCopy] = []
        self._next_copy_id = 0

    @property
    def num_arriving(self) -> int:
        """Rows whose KV is being brought back."""
        return len(self._arriving)

    def view(self) -> HostView:
        """Return what a policy may know."""
        return HostView(
            free_blocks=self.host.num_free,
            leaving_blocks=self.num_leaving_blocks,
            num_leaving=sum(int(move.copy.device.size) for move in self._moves.values() if move.copy.to_host),
            arriving=np.fromiter(self._arriving, dtype=np.int32, count=len(self._arriving)),
            block_copy_s=self._memory.block_copy_s,
        )

    def leave(self, row: int) -> int:
        """Begin to copy a running row's KV to the host; return its bytes. The caller then takes its blocks, pinned."""
        table, blocks = self._table, self._blocks
        num_tokens = int(table.num_computed[row])
        device = blocks.block_table[row, : -(-num_tokens // blocks.block_size)].copy()
        num_freed = int(np.count_nonzero((blocks.refcount[device] == 1) & (blocks.pins[device] == 0)))
        host = self.host.keep(row, device.size)
        table.host_tokens[row] = num_tokens
        self._begin(row, HostCopy(self._next_copy_id, device, host, to_host=True), num_tokens, num_freed)
        return int(device.size) * self._memory.block_kv_bytes

    def come_back(self, row: int) -> int:
        """Give a row, which is a running one now, blocks for its KV and begin to copy it there; return its bytes."""
        num_tokens, host = int(self._table.host_tokens[row]), self.host.blocks_of(row)
        device = self._blocks.take_for(row, int(host.size))
        self._begin(row, HostCopy(self._next_copy_id, device, host, to_host=False), num_tokens, 0)
        return int(device.size) * self._memory.block_kv_bytes

    def take_copies(self) -> list[HostCopy]:
        """Return the copies that have begun since the last call, for the executor."""
        begun, self._begun = self._begun, []
        return begun

    def land(self, copy_id: int) -> EndedCopy:
        """End a copy, done or failed: its blocks are let go, and its row may be scheduled again."""
        move = self._moves.pop(copy_id)
        self.num_leaving_blocks -= move.num_freed
        self._blocks.unpin(("host copy", copy_id))
        self.host.unhold(move.copy.host)
        if self._move_of.get(move.row) != copy_id:
            return EndedCopy(None, move.copy.to_host, move.num_tokens)
        del self._move_of[move.row]
        self._arriving.pop(move.row, None)
        self._table.hold[move.row] &= ~Hold.SWAPPING
        return EndedCopy(move.row, move.copy.to_host, move.num_tokens)

    def forget(self, row: int) -> None:
        """Give up the KV that a row has on the host: it is back, it was lost, or the row ends."""
        self.host.forget(row)
        self._move_of.pop(row, None)
        self._arriving.pop(row, None)
        self._table.host_tokens[row] = 0

    def _begin(self, row: int, copy: HostCopy, num_tokens: int, num_freed: int) -> None:
        self._blocks.pin(copy.device, ("host copy", copy.copy_id))
        self.host.hold(copy.host)
        self._moves[copy.copy_id] = _Move(copy, row, num_tokens, num_freed)
        self.num_leaving_blocks += num_freed
        self._move_of[row] = copy.copy_id
        if not copy.to_host:
            self._arriving[row] = None
        self._table.hold[row] |= Hold.SWAPPING
        self._begun.append(copy)
        self._next_copy_id += 1

    def check_invariants(self) -> None:
        """Check that rows, host blocks and copies agree; raises AssertionError naming the law that is broken."""
        table = self._table
        self.host.check_invariants([move.copy.host for move in self._moves.values()])
        swapping = np.flatnonzero(table.hold & Hold.SWAPPING).tolist()
        assert sorted(self._move_of) == swapping, "the bit SWAPPING and the copies under way differ"
        assert all(self._moves[copy_id].row == row for row, copy_id in self._move_of.items()), "a copy of another row"
        arriving = [row for row, copy_id in self._move_of.items() if not self._moves[copy_id].copy.to_host]
        assert arriving == list(self._arriving), "rows that come back and copies from the host differ"
        assert (table.status[arriving] == Status.RUNNING).all(), "a row that comes back is a running one"
        leaving = sum(move.num_freed for move in self._moves.values())
        assert leaving == self.num_leaving_blocks, "the blocks that become free are counted wrongly"
        kept = np.flatnonzero(table.host_tokens).tolist()
        assert sorted(self.host.rows) == kept, "rows with KV on the host and rows that keep host blocks differ"
        for row in kept:
            num_blocks = -(-int(table.host_tokens[row]) // self._blocks.block_size)
            assert self.host.blocks_of(row).size == num_blocks, f"row {row} keeps too few or too many host blocks"
            assert table.host_tokens[row] < table.num_known[row], f"row {row} has more KV on the host than tokens"
        assert {copy.copy_id for copy in self._begun} <= set(self._moves), "a copy that nobody knows"
