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
            if not table.at_executor[row]:
                table.at_executor[row] = True
                self._admits.append(row_init(table, self.log, row))
            if not table.has_started[row]:
                table.has_started[row] = True
                self._count_prompt(row, num_tokens)
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

    def bring_back(self, row: int) -> None:
        """Make a preempted row a running one and begin to copy its KV back from the host."""
        assert self.swapping is not None, "there is no host memory to bring anything back from"
        assert not self.table.hold[row], "the scheduler chose a row that is held"
        assert self.table.host_tokens[row], f"row {row} has no KV on the host"
        self.table.admit(row)
        self.totals.num_swap_ins += 1
        self.totals.swapped_in_bytes += self.swapping.come_back(row)
        if not self.swapping.is_moving(row):
            self._is_back(row)

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
            self._is_back(row)
        elif not done:
            if not landed.to_host:  # what it held before is sound, and what it has found on the device
                self.swapping.forget(row)
                self.preempt(row, num_kept=int(self.table.num_computed[row]) // self.table.block_size)
            self._lose(row, landed.num_tokens)
        if self.table.hold[row] & Hold.PAUSED:
            self.clear(row)

    def clear(self, row: int) -> None:
        """Take all device blocks from a row, if it has any and is in no step and no copy."""
        table = self.table
        is_busy = table.hold[row] & (Hold.IN_FLIGHT | Hold.SWAPPING)
        if not is_busy and (table.status[row] == Status.RUNNING or table.held_blocks[row]):
            self.preempt(row)

    def forget_executor(self) -> None:
        """Take the device blocks from all rows: the executor is another one now, which knows no row."""
        for row in [*self.table.running.view.tolist(), *self.table.preempted.view.tolist()]:
            self.clear(row)
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
        self._cached_tokens.pop(row, None)
        if self.table.at_executor[row]:
            self._drops.append(row)
        self.totals.num_finished += 1

    def _is_back(self, row: int) -> None:
        assert self.swapping is not None, "nothing was on the host"
        self.table.num_computed[row] = self.table.host_tokens[row]
        self._count_again(row, int(self.table.num_computed[row]))
        self.swapping.forget(row)
        self.sharing.forks.review()

    def _lose(self, row: int, num_tokens: int) -> None:
        """Have so many tokens of a row computed again, but for what it holds then or finds; nothing is on the host."""
        self._lost_tokens[row] = max(self._lost_tokens.get(row, 0), num_tokens)
        if self.swapping is not None:
            self.swapping.forget(row)

    def _count_again(self, row: int, num_found: int) -> None:
        self.totals.num_recomputed_tokens += max(self._lost_tokens.pop(row, 0) - num_found, 0)

    def _count_prompt(self, row: int, num_cached: int) -> None:
        num_prompt = int(self.table.num_prompt[row])
        num_cached = min(num_cached, num_prompt)
        self.totals.num_prompt_tokens += num_prompt
        if self.sharing.prefix_caching:
            self.totals.num_prefix_cache_queries += num_prompt
            self.totals.num_prefix_cache_hits += num_cached
        if num_cached:
            self._cached_tokens[row] = num_cached
