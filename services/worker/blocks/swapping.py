"""KV that moves to host memory and back while its sequence does not run.

    running ──leave──► preempted, SWAPPING ──copy done──► preempted
    preempted ──come_back──► running, SWAPPING ──copy done──► running

Block by block: the row's first blocks may stay on the device, so that only those behind them go and come. What is on
the other side already, by its name, is not copied; where that is all of it, the row has no copy to wait for. A copy
runs beside the steps. Until it is done its blocks are pinned on both sides, whatever becomes of the row: so a cancel in
the middle is safe, and memory is free only when nobody reads or fills it any more. The row itself has the bit SWAPPING
meanwhile, so nobody schedules it. It refers to its host blocks until its KV is on the device again, or it ends; full
ones keep their contents beyond that.

Source: vLLM (Kwon et al., 2023, section 4.5) for swapping whole sequences; InferCept (Abhyankar et al., 2024) for
copies beside the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from services.worker.blocks.host_blocks import HostBlocks
from services.worker.blocks.manager import BlockManager
from services.worker.blocks.row_names import RowNames
from services.worker.blocks.second_tier import LookingAhead, begin_of
from services.worker.contract.arrays import EMPTY_I32, I32
from services.worker.contract.executor import HostCopy, HostMemory
from services.worker.scheduling.view import NOTHING_BEHIND, NOTHING_ON_HOST, HostPrefix, HostView, OnHost
from services.worker.sequences.table import Hold, SequenceTable, Status
from shared.cost import CostModel
from shared.prefix_names import RunName

NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that has ended, and whose it was."""

    row: int | None
    """None: the row has ended meanwhile."""
    to_host: bool
    num_tokens: int
    """Tokens of the row whose KV was to be there."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A copy under way."""

    copy: HostCopy
    row: int
    """`NOBODY`: what nobody runs with goes to the host before it is forgotten."""
    num_tokens: int
    names: tuple[RunName, ...] = ()
    """Of the full blocks on the host that it fills, the first ones of the copy."""
    num_freed: int = 0
    """Device blocks that become free when it is done."""


class Swapping:
    """Host blocks, and the copies under way. The engine owns it; nobody else changes it."""

    def __init__(self, table: SequenceTable, blocks: BlockManager, names: RowNames, memory: HostMemory) -> None:
        self.host = HostBlocks(memory.num_blocks)
        """Blocks of the executor's host memory."""
        self._table = table
        self._blocks = blocks
        self._names = names
        self._memory = memory
        self._moves: dict[int, _Move] = {}
        self._move_of: dict[int, int] = {}
        """Copy under way of a row."""
        self._arriving: dict[int, None] = {}
        """Rows whose KV is being brought back, in order."""
        self._num_freed_by = [0, 0]
        """Device blocks that become free when the copies to the host are done: those of rows, those of nobody."""
        self._looking = LookingAhead()
        self._at_rest: HostView | None = None  # the last one, if nothing was copied then
        self._begun: list[HostCopy] = []
        self._next_copy_id = 0

    @property
    def num_leaving_blocks(self) -> tuple[int, int]:
        """Device blocks that become free when the copies to the host are done: those of rows, and those of nobody."""
        return self._num_freed_by[0], self._num_freed_by[1]

    @property
    def num_arriving(self) -> int:
        """Rows whose KV is being brought back."""
        return len(self._arriving)

    def view(self, *, may_leave: bool, may_come: bool) -> HostView:
        """Return what a policy may know.

        Args:
            may_leave: what the device's blocks are said to hold is there, to be read beside the steps.
            may_come: nothing that was to be written to its free blocks before can come late.
        """
        is_at_rest, num_free = may_leave and may_come and not self._moves, self.host.num_free
        if is_at_rest and self._at_rest is not None and self._at_rest.free_blocks == num_free:
            return self._at_rest  # as in most steps
        made = HostView(
            free_blocks=num_free if may_leave else 0,
            leaving_blocks=sum(self._num_freed_by),
            num_leaving=sum(int(move.copy.device.size) for move in self._moves.values() if move.copy.to_host),
            arriving=np.fromiter(self._arriving, dtype=np.int32, count=len(self._arriving)),
            block_copy_s=self._memory.block_copy_s,
            num_arriving=sum(int(move.copy.device.size) for move in self._moves.values() if not move.copy.to_host),
            lent_blocks=sum(int(self._blocks.held[row]) for row in self._move_of if row not in self._arriving),
            on_host=self._on_host if may_leave else _nothing_on_host,
            behind=self._behind if may_come else _nothing_behind,
        )
        self._at_rest = made if is_at_rest else None
        return made

    def leave(self, row: int, num_kept: int) -> int:
        """Begin to copy what a row's blocks hold to the host, but for the first ones; return the bytes.

        The caller then takes these blocks, which are pinned.
        """
        table, blocks = self._table, self._blocks
        num_computed = int(table.num_computed[row])
        end = -(-num_computed // blocks.block_size)
        assert num_kept < end, f"row {row} would keep all its blocks"
        names = self._names.of(row, num_computed // blocks.block_size)[num_kept:]
        host, is_new = self.host.keep(row, names, end - num_kept)
        table.host_tokens[row] = num_tokens = int(table.host_tokens[row]) or num_computed
        device: I32 = blocks.block_table[row, num_kept:end][is_new]
        num_freed = int(((blocks.refcount[device] == 1) & (blocks.pins[device] == 0)).sum())
        self.host.from_right[host[is_new]] = blocks.from_right_of(row, device)
        filled = tuple(name for name, new in zip(names, is_new.tolist(), strict=False) if new)
        copy = HostCopy(self._next_copy_id, device, host[is_new], to_host=True)
        return self._begin(_Move(copy, row, num_tokens, filled, num_freed))

    def come_back(self, row: int) -> tuple[int, int]:
        """Give a row, which is a running one now, blocks for its KV and begin to copy it there.

        Behind those that it holds, the first of its full blocks that the device has still are shared: their tokens are
        computed at once. A row that keeps nothing on the host gets what others have left there behind these.

        Returns:
            Its tokens whose KV is on the device once that is done, and the bytes of the copy.
        """
        table, blocks, num_held = self._table, self._blocks, int(self._blocks.held[row])
        if table.host_tokens[row]:
            num_tokens, host, shared = int(table.host_tokens[row]), self.host.blocks_of(row), EMPTY_I32
            if self._names.are_shared:
                names = self._names.of(row, num_tokens // blocks.block_size)[num_held:]
                shared = np.array(blocks.index.find(names), dtype=np.int32)
            host = host[shared.size :]
        else:
            shared, host = self._found(row)
            num_tokens = int(num_held + shared.size + host.size) * blocks.block_size
        table.num_computed[row] = (num_held + shared.size) * blocks.block_size
        device = blocks.take_for(row, shared, int(host.size))
        blocks.from_right[device] = self.host.from_right[host]
        copy = HostCopy(self._next_copy_id, device, host, to_host=False)
        return num_tokens, self._begin(_Move(copy, row, num_tokens))

    def copy_ahead(self, cost: CostModel | None, step_blocks: int) -> None:
        """Begin to copy what the device is about to forget, unless something is on its way there.

        Nothing is copied that would not be worth bringing back. Blocks hold what their names say: no batch in flight is
        yet to fill them.

        Args:
            cost: of a step; None: unknown.
            step_blocks: most that one takes.
        """
        if cost is None or self._memory.block_copy_s >= cost.chunk_s(0, self._blocks.block_size):
            return
        if not self._names.are_shared or any(move.copy.to_host for move in self._moves.values()):
            return
        device = self._looking.about_to_be_lost(self._blocks, self.host, step_blocks, self._memory.block_copy_s)
        if not device.size:
            return
        owner, blocks = ("host copy", self._next_copy_id), self._blocks
        names = tuple(map(blocks.index.name_of, device.tolist()))
        blocks.pin_kept(device, owner)
        host = self.host.hand_out(owner, blocks.from_right[device])
        copy = HostCopy(self._next_copy_id, device, host, to_host=True)
        self._enter(_Move(copy, NOBODY, 0, names, int(device.size)))

    def is_moving(self, row: int) -> bool:
        """Return whether a copy of the row's KV is under way."""
        return row in self._move_of

    def take_copies(self) -> list[HostCopy]:
        """Return the copies that have begun since the last call, for the executor."""
        begun, self._begun = self._begun, []
        return begun

    def land(self, copy_id: int, *, done: bool) -> EndedCopy:
        """End a copy, done or failed: its blocks are let go, and its row may be scheduled again."""
        move = self._moves.pop(copy_id)
        self._num_freed_by[move.row == NOBODY] -= move.num_freed
        is_here = self._move_of.get(move.row) == copy_id
        if done:
            self.host.name(move.names, move.copy.host, move.row if is_here else None)
        elif not move.copy.to_host:
            self._drop(move.copy.host)  # they may be why
        self._blocks.unpin(("host copy", copy_id), first=done and move.row == NOBODY)
        self.host.unpin(("host copy", copy_id))
        if not is_here:
            return EndedCopy(None, move.copy.to_host, move.num_tokens)
        del self._move_of[move.row]
        self._arriving.pop(move.row, None)
        self._table.hold[move.row] &= ~Hold.SWAPPING
        return EndedCopy(move.row, move.copy.to_host, move.num_tokens)

    def end(self, row: int, *, is_sound: bool) -> None:
        """Give up the KV that a row has on the host, since it ends.

        Args:
            row: ends.
            is_sound: others may use what it has computed.
        """
        if not (is_sound and self._names.are_shared):
            names = self._names.made(row)
            self._drop(self.host.find(names))
            for copy_id, move in self._moves.items():
                if not set(names).isdisjoint(move.names):
                    self._moves[copy_id] = replace(move, names=())
        self.forget(row)

    def forget(self, row: int) -> None:
        """Give up the KV that a row has on the host: it is back, or it was lost."""
        self.host.forget(row)
        self._move_of.pop(row, None)
        self._arriving.pop(row, None)
        self._table.host_tokens[row] = 0

    def furnish(self, memory: HostMemory | None) -> None:
        """Have other host memory, without contents, in place of that so far: no row keeps any, and no copy is made."""
        assert not self.host.rows, "a row's KV lies in the host memory of another executor"
        assert not self._moves, "the executor changes only while nothing is copied"
        self._memory = memory or HostMemory(0, 0, 0.0)
        self.host = HostBlocks(self._memory.num_blocks)
        self._looking, self._at_rest = LookingAhead(), None

    def _found(self, row: int) -> tuple[I32, I32]:
        """Return with which blocks a parked row that holds none can begin: the device's, and the host's that follow."""
        if not self._names.are_shared or not len(self.host.index) or self._blocks.held[row]:
            return EMPTY_I32, EMPTY_I32
        names = self._names.of(row, (int(self._table.num_known[row]) - 1) // self._blocks.block_size)
        return begin_of(names, self._blocks.index, self.host.index)

    def _behind(self, row: int) -> HostPrefix:
        device, host = self._found(row)
        return HostPrefix(int(device.size), int(host.size)) if host.size else NOTHING_BEHIND

    def _on_host(self, row: int, num_kept: int) -> OnHost:
        if not len(self.host.index):
            return NOTHING_ON_HOST
        names = self._names.of(row, int(self._table.num_computed[row]) // self._blocks.block_size)
        ids = self.host.find(names[num_kept:])
        return OnHost(int(ids.size), self.host.in_use(ids)) if ids.size else NOTHING_ON_HOST

    def _drop(self, ids: I32) -> None:
        self.host.drop_contents(ids[self.host.index.is_named[ids]])

    def _begin(self, move: _Move) -> int:
        """Begin a copy, if there is anything to copy; return its bytes."""
        copy, row = move.copy, move.row
        if not copy.device.size:
            return 0
        self._blocks.pin(copy.device, ("host copy", copy.copy_id))
        self.host.pin_kept(copy.host, ("host copy", copy.copy_id))
        self._move_of[row] = copy.copy_id
        if not copy.to_host:
            self._arriving[row] = None
        self._table.hold[row] |= Hold.SWAPPING
        return self._enter(move)

    def _enter(self, move: _Move) -> int:
        """Count a copy, whose blocks are pinned, as under way; return its bytes."""
        self._moves[move.copy.copy_id] = move
        self._num_freed_by[move.row == NOBODY] += move.num_freed
        self._begun.append(move.copy)
        self._next_copy_id += 1
        return int(move.copy.device.size) * self._memory.block_kv_bytes

    def check_invariants(self) -> None:
        """Check that rows, host blocks and copies agree; raises AssertionError naming the law that is broken."""
        table = self._table
        self.host.check_invariants()
        swapping = np.flatnonzero(table.hold & Hold.SWAPPING).tolist()
        assert sorted(self._move_of) == swapping, "the bit SWAPPING and the copies under way differ"
        assert all(self._moves[copy_id].row == row for row, copy_id in self._move_of.items()), "a copy of another row"
        arriving = [row for row, copy_id in self._move_of.items() if not self._moves[copy_id].copy.to_host]
        assert arriving == list(self._arriving), "rows that come back and copies from the host differ"
        assert (table.status[arriving] == Status.RUNNING).all(), "a row that comes back is a running one"
        assert sum(move.row == NOBODY for move in self._moves.values()) <= 1, "more than one copy for nobody"
        freed = [sum(m.num_freed for m in self._moves.values() if (m.row == NOBODY) is none) for none in (False, True)]
        assert freed == self._num_freed_by, "the blocks that become free are counted wrongly"
        kept = np.flatnonzero(table.host_tokens).tolist()
        assert sorted(self.host.rows) == kept, "rows with KV on the host and rows that keep host blocks differ"
        for row in kept:
            num_blocks, host = -(-int(table.host_tokens[row]) // self._blocks.block_size), self.host.blocks_of(row)
            assert host.size, f"row {row} has nothing on the host"
            if row in arriving:
                coming = self._moves[self._move_of[row]].copy.host
                assert (host[-coming.size :] == coming).all(), f"row {row} waits for other blocks than it keeps"
                assert table.held_blocks[row] == num_blocks, f"row {row} has too few or too many blocks for its KV"
            else:
                num_blocks -= int(table.held_blocks[row])
                assert host.size == num_blocks, f"row {row} keeps too few or too many host blocks"
            assert table.host_tokens[row] < table.num_known[row], f"row {row} has more KV on the host than tokens"
        assert {copy.copy_id for copy in self._begun} <= set(self._moves), "a copy that nobody knows"


def _nothing_on_host(_row: int, _num_kept: int) -> OnHost:
    return NOTHING_ON_HOST


def _nothing_behind(_row: int) -> HostPrefix:
    return NOTHING_BEHIND
