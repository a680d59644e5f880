"""Rows that come to run, and rows that stop running without having ended: admitted, preempted, brought back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from services.worker.blocks.sharing import Sharing
from services.worker.blocks.swapping import Swapping
from services.worker.contract.arrays import EMPTY_I32, I32, Rows
from services.worker.contract.batch import RowInit
from services.worker.engine.retry import RetryQueue
from services.worker.engine.sequence_registry import SequenceRegistry
from services.worker.engine.totals import Totals
from services.worker.scheduling.view import PreemptHow
from services.worker.sequences.assemble import row_init
from services.worker.sequences.events import RowExtra
from services.worker.sequences.table import Hold, SequenceTable, Status
from services.worker.sequences.token_log import TokenLog

_SWAP = int(PreemptHow.SWAP)


@dataclass(kw_only=True, eq=False)
class Transitions:
    """Moves rows between the queues, with their KV. The engine owns it; nobody else calls it."""

    table: SequenceTable
    sharing: Sharing
    registry: SequenceRegistry
    retry: RetryQueue
    log: TokenLog
    totals: Totals
    swapping: Swapping | None
    _admits: list[RowInit] = field(default_factory=list, init=False)
    _drops: list[int] = field(default_factory=list, init=False)
    _lost_tokens: dict[int, int] = field(default_factory=dict, init=False)
    """Of preempted rows: tokens whose KV they gave up."""
    _gave_up_copy: set[int] = field(default_factory=set, init=False)
    """Preempted rows that had their KV on the host."""
    _cached_tokens: dict[int, int] = field(default_factory=dict, init=False)
    """Of admitted rows without a token yet: prompt tokens from the cache."""

    def take_news(self) -> tuple[tuple[RowInit, ...], I32]:
        """Return the rows that are new to the executor since the last call, and those that it may forget."""
        admits, drops = tuple(self._admits), np.array(self._drops, dtype=np.int32) if self._drops else EMPTY_I32
        self._admits.clear()
        self._drops.clear()
        return admits, drops

    def admit(self, rows: list[int], owner: Hashable, leaving: I32) -> None:
        """Let parked rows run, behind what they find of their KV.

        Args:
            rows: waiting or preempted.
            owner: pins the sources of copies until the batch has come back.
            leaving: rows that are preempted for the same batch, after this call.
        """
        table = self.table
        found = self.sharing.admit(rows, owner, leaving)
        self.registry.note_started([row for row in rows if not table.has_started[row]])
        for row, num_tokens in zip(rows, found, strict=True):
            table.admit(row)
            table.num_computed[row] = num_tokens
            self._count_again(row, num_tokens)
            self._introduce(row, num_tokens)
        self.sharing.forks.review()  # a row that finds its whole prompt is a parent that is ready at once

    def preempt(self, row: int, how: int = PreemptHow.RECOMPUTE, num_kept: int = 0) -> None:
        """Take device blocks from a running row, or more of them from a preempted one; it is in no step and no copy.

        Args:
            row: loses its place among those that run, if it has one.
            how: `PreemptHow`, of the blocks that it loses.
            num_kept: of its first blocks, which are full, that it goes on holding.
        """
        table, runs = self.table, self.table.status[row] == Status.RUNNING
        assert runs or table.held_blocks[row] > num_kept, f"row {row} has no such blocks to lose"
        assert not table.hold[row] & (Hold.IN_FLIGHT | Hold.SWAPPING), f"row {row} is in a step or a copy"
        kept_tokens = num_kept * self.table.block_size
        assert kept_tokens <= table.num_computed[row], "only full blocks are kept"
        if how == _SWAP and table.num_computed[row] > kept_tokens:
            assert self.swapping is not None, "there is no host memory to swap to"
            self.totals.num_swap_outs += int(not table.host_tokens[row])
            self.totals.swapped_out_bytes += self.swapping.leave(row, num_kept)
        else:
            self._lose(row, int(table.host_tokens[row] or table.num_computed[row]))
        self.sharing.release(row, num_kept)
        table.num_computed[row] = kept_tokens
        if runs:
            self.totals.num_preemptions += 1
            self.retry.discard(row)
            table.hold[row] &= ~Hold.RETRY
            table.preempt(row)
            self.registry.note_preempted(row)

    def leave_out_all_but(self, rows: Rows, num_lanes: int) -> None:
        """Count who pauses: runs, and could be in the next step, but is not.

        Args:
            rows: of that step; all those that it admits run by now.
            num_lanes: steps in flight together, in which decodes take turns.
        """
        table, running = self.table, self.table.running.view
        if rows.size == running.size:
            return
        is_left = table.hold == 0
        is_left[rows] = False
        left = running[is_left[running]]
        left = left[table.last_step[left] > table.paused_after[left]]
        if num_lanes > 1 and left.size:
            went_on = rows[(table.num_known[rows] - table.num_computed[rows] == 1)]
            went_on = went_on[table.last_step[went_on] > table.paused_after[went_on]]
            left = left[table.last_step[left] < table.last_step[went_on].max(initial=-1)]
        table.paused_after[left] = table.last_step[left]
        self.totals.num_pauses += left.size

    def bring_back(self, row: int) -> None:
        """Make a parked row a running one and copy it KV from the host: its own, or what it finds there."""
        assert self.swapping is not None, "there is no host memory to bring anything back from"
        assert not self.table.hold[row], "the scheduler chose a row that is held"
        is_own = bool(self.table.host_tokens[row])
        if not self.table.has_started[row]:
            self.registry.note_started([row])
        self.table.admit(row)
        num_tokens, num_bytes = self.swapping.come_back(row)
        if is_own:
            self.totals.num_swap_ins += 1
            self.totals.swapped_in_bytes += num_bytes
        self._introduce(row, num_tokens)
        if self.swapping.is_moving(row):
            self.sharing.comes_back(row)
        else:
            self._is_back(row, num_tokens)

    def copied(self, copy_id: int, *, done: bool) -> None:
        """Take in the end of a copy to the host or back."""
        assert self.swapping is not None, "no copy was handed out"
        landed = self.swapping.land(copy_id, done=done)
        row = landed.row
        if not done:
            self.totals.num_failed_copies += 1
        if row is None:
            return
        if done and not landed.to_host:
            self._is_back(row, landed.num_tokens)
        elif not done:
            is_own = bool(self.table.host_tokens[row])
            if not landed.to_host:  # what it held before is sound, and what it has found on the device
                self.swapping.forget(row)
                self.preempt(row, num_kept=int(self.table.num_computed[row]) // self.table.block_size)
            if is_own:
                self._give_up(row, landed.num_tokens)
        if self.table.hold[row] & Hold.PAUSED:
            self.clear(row)

    def clear(self, row: int) -> None:
        """Take all device blocks from a row, if it has any and is in no step and no copy."""
        table = self.table
        is_busy = table.hold[row] & (Hold.IN_FLIGHT | Hold.SWAPPING)
        if not is_busy and (table.status[row] == Status.RUNNING or table.held_blocks[row]):
            self.preempt(row)

    def forget_executor(self) -> None:
        """Take all blocks from all rows, on the device and on the host: the executor is another one now.

        It knows no row. What is computed again of KV that was on the host counts as given up.
        """
        for row in [*self.table.running.view.tolist(), *self.table.preempted.view.tolist()]:
            num_on_host = int(self.table.host_tokens[row])
            self.clear(row)
            if num_on_host:
                self._give_up(row, num_on_host)
        self.table.at_executor[:] = False
        self._admits.clear()
        self._drops.clear()

    def with_cached_tokens(self, rows: Rows, extras: tuple[RowExtra, ...]) -> tuple[RowExtra, ...]:
        """Say with a row's first token what its prompt found in the cache."""
        if not self._cached_tokens:
            return extras
        cached = {i: self._cached_tokens.pop(row, None) for i, row in enumerate(rows.tolist())}
        said = {extra.index: extra for extra in extras}
        said |= {i: replace(said.get(i, RowExtra(i)), cached_tokens=count) for i, count in cached.items() if count}
        return tuple(said[i] for i in sorted(said))

    def ended(self, row: int, is_sound: bool) -> None:  # noqa: FBT001  called by the registry
        """Forget a row that ends, just before it is free; others may use what it has computed if that is sound."""
        self.retry.discard(row)
        if self.swapping is not None:
            self.swapping.end(row, is_sound=is_sound)
        self._lost_tokens.pop(row, None)
        self._gave_up_copy.discard(row)
        self._cached_tokens.pop(row, None)
        if self.table.at_executor[row]:
            known = [init for init in self._admits if init.row != row]
            if len(known) == len(self._admits):
                self._drops.append(row)
            else:  # no batch has told the executor of it
                self._admits[:] = known
        self.totals.num_finished += 1

    def _introduce(self, row: int, num_tokens: int) -> None:
        """Let the executor and the counts know of a row that has come to run, with so many tokens that it has found."""
        table = self.table
        if not table.at_executor[row]:
            table.at_executor[row] = True
            self._admits.append(row_init(table, self.log, row))
        if not table.has_started[row]:
            table.has_started[row] = True
            self._count_prompt(row, num_tokens)

    def _is_back(self, row: int, num_tokens: int) -> None:
        assert self.swapping is not None, "nothing was on the host"
        self.totals.num_brought_back_tokens += num_tokens - int(self.table.num_computed[row])
        self.table.num_computed[row] = num_tokens
        self._count_again(row, num_tokens)
        self.swapping.forget(row)
        self.sharing.comes_back(row)
        self.sharing.forks.review()

    def _lose(self, row: int, num_tokens: int) -> None:
        """Have so many tokens of a row computed again, but for what it holds then or finds; nothing is on the host."""
        self._lost_tokens[row] = max(self._lost_tokens.get(row, 0), num_tokens)
        if self.swapping is not None:
            self.swapping.forget(row)

    def _give_up(self, row: int, num_tokens: int) -> None:
        """As `_lose`, of a row whose KV was on the host."""
        self._lose(row, num_tokens)
        self._gave_up_copy.add(row)

    def _count_again(self, row: int, num_found: int) -> None:
        num_lost = max(self._lost_tokens.pop(row, 0) - num_found, 0)
        self.totals.num_recomputed_tokens += num_lost
        self.totals.num_given_up_tokens += num_lost if row in self._gave_up_copy else 0
        self._gave_up_copy.discard(row)

    def _count_prompt(self, row: int, num_cached: int) -> None:
        num_prompt = int(self.table.num_prompt[row])
        num_cached = min(num_cached, num_prompt)
        self.totals.num_prompt_tokens += num_prompt
        if self.sharing.prefix_caching:
            self.totals.num_prefix_cache_queries += num_prompt
            self.totals.num_prefix_cache_hits += num_cached
        if num_cached:
            self._cached_tokens[row] = num_cached
