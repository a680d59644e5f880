"""A step in the making: the parts from which scheduling policies are put together.

A policy says who and in which order; the plan does the arithmetic of blocks, tokens and rows, and keeps the contract of
`Scheduler.schedule`. Parts may be left out, and come in another order, but nobody gives way for memory any more
once somebody is chosen:

    plan = StepPlan(view, order)       running rows: who comes first keeps its memory longest
    plan.preempt_for(row, victims)     the first victims give way so that a row fits that waits or was preempted
    plan.decode(rows)                  some of `plan.decoding`; the last of the order give way if blocks run out
    plan.prefill(rows)                 some of `plan.begun`, in this order
    plan.rescue()                      the first of the order goes on if nobody could
    plan.admit(line)                   rows that wait or were preempted, in this order
    plan.output()

What a policy may do by it:

- *Choose victims in any order.* `order` is that of keeping: when blocks run out rows go from its end, as many as needed
  and no more (`making_room.py`). `preempt_for` takes another one, so that somebody can come in.
- *Admit in any order.* `line` is any of the parked rows. Admission ends with the first that does not fit, which `admit`
  returns: with the rest of the line the policy may try those behind it, or not.
- *Pause without eviction.* A running row that is not named to `decode` or `prefill` keeps its KV and goes on whenever
  it is named again. Paused rows count as running: `max_running` is how many rows may hold KV, if not as many as run.
- *Keep partial prefills.* What is computed of a prompt stays while it is not named to `prefill`, whoever comes first.
- *Take less of the prompts than fits*, by a `Budget` of its own.

Rules that the parts keep, whatever the order:

- *Nobody comes in too early.* A row is admitted only if all its known tokens fit, next to what the running rows still
  need for theirs and one block of headroom for each of them (who may open the end of somebody's block needs none:
  `making_room.py`). A row admitted on its first chunk alone would be preempted before it gave a token.
- *Nobody computes what another row is computing.* A row that waits and lacks a block that a running row has begun is
  passed over until that block is there; it keeps its place. This ends if the policy lets running rows go on.
- *Somebody finishes.* The first of the order is never preempted for want of blocks, so if that stays the same row while
  it runs, it ends, and then the next one. (Rows in a batch in flight cannot be preempted at all.) If it lacks blocks
  that only pins, copies or a batch in flight can give back, nobody gives way for it: it waits, and who needs no block
  goes on.
- *Nobody waits for what parked rows hold.* They give it up before a running row gives way, and for the first parked row
  that does not fit, if that makes it fit. So where nobody runs, the first of the line comes in.

Policies that come first, serve first (`fcfs`, `chunked`, `round_robin`, `lookahead`) use the order of admission, and
stop at who does not fit, as in vLLM: smaller ones behind would else keep it waiting for ever. Their lanes: `lanes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final, Protocol

import numpy as np

from services.worker.scheduling.blocks_math import Places, among, ceil_div, missing_blocks, num_known
from services.worker.scheduling.chosen import Chosen
from services.worker.scheduling.making_room import KeptRunning
from services.worker.scheduling.opening import opening, shut
from services.worker.scheduling.recompute_or_swap import Bringing
from services.worker.scheduling.view import EMPTY_ROWS, I32, NOTHING_CACHED, SchedulerOutput, SchedulerView

NOBODY: Final = -1
"""No row."""
MAX_PASSED_OVER = 64
"""Rows beyond those that a step could take that are looked at, in case some of the first are passed over."""


class Budget(Protocol):
    """How much of the prompts a step takes, besides what its limits allow."""

    def most(self, begin: int) -> int:
        """Return the most tokens of the next chunk, which begins at this position; 0: none."""

    def take(self, begin: int, num_tokens: int, *, is_cut: bool) -> None:
        """Count a chunk that is chosen; it is cut if known tokens are left behind it."""


class StepPlan:
    """Rows chosen so far, and the tokens, rows and blocks that are left for more.

    Args:
        view: of this moment.
        order: all of `view.running`, who keeps its memory longest first; None: as they were admitted.
        max_running: rows that may hold KV, paused ones and those in flight included; None: as many as can be in steps.
    """

    def __init__(self, view: SchedulerView, order: I32 | None = None, max_running: int | None = None) -> None:
        self.view = view
        self.budget: Budget | None = None
        """Of prompts; None: only the limits of the step. The policy sets it before it chooses any."""
        self._running = KeptRunning(view, view.running if order is None else order)
        self._max_running = view.limits.max_batch_rows * view.limits.num_lanes if max_running is None else max_running
        self._chosen = Chosen(view.limits.max_batch_tokens, view.limits.max_batch_rows)
        self._bringing = Bringing(view.host, view.block_size, view.cost)
        self._counts_shared = False  # of what somebody who comes in needs: another holder must not give it up
        self._coming_names: set[bytes] = set()  # of blocks that rows admitted by this step compute
        self._may_change = False  # somebody is left out for a reason that passes by itself

    @property
    def is_empty(self) -> bool:
        """Nobody is chosen yet."""
        return self._chosen.is_empty

    @property
    def preempted(self) -> I32:
        """Who gives way."""
        return self._running.gone()[0]

    @property
    def resumes(self) -> bool:
        """Somebody's KV is brought back from the host."""
        return bool(self._chosen.resume)

    @property
    def num_decodes(self) -> int:
        """Decodes that are chosen."""
        return int(self._chosen.decodes.size)

    @property
    def decoding(self) -> I32:
        """Running rows with one token to compute that are not chosen yet, in the plan's order."""
        return np.asarray(self._running.rows[self._decoding()])

    @property
    def begun(self) -> dict[int, int]:
        """Prompts that were begun and not chosen yet, and where each goes on; first those with a chunk in flight."""
        view, running = self.view, self._running
        places = (running.remaining > 1).nonzero()[0]
        rows = chain(view.extensible.tolist(), running.rows[places].tolist())
        begins = chain(view.extensible_begins.tolist(), running.computed[places].tolist())
        return {row: begin for row, begin in zip(rows, begins, strict=True) if row not in self._chosen.prompts}

    @property
    def unpromised_blocks(self) -> int:
        """Free blocks beside those that the running rows, and those that come in, are still to get."""
        return self._running.free_blocks - self._running.promised_blocks()

    def leave_free(self, num_blocks: int, line: I32) -> None:
        """Let nobody come in any more unless so many blocks stay free, and what those of a line lack who stay out."""
        lacks = line[~np.isin(line, list(self._running.come))]
        needed = missing_blocks(self.view, lacks, num_known(self.view.columns, lacks) + 1)
        self._running.kept_free = num_blocks + int(needed.sum())

    def decode(self, rows: I32) -> None:
        """Choose some rows of `decoding`, in the plan's order.

        If blocks run out the last of the order give way; if somebody is chosen already, who lacks one sits out.
        """
        running, decodes = self._running, self._decoding()
        if rows.size < decodes.size:
            decodes = decodes[among(self.view, running.rows[decodes], rows)]
        decodes = decodes[: self._chosen.places]
        if not decodes.size:
            return
        opens = opening(self.view, running, decodes, missing := running.missing(decodes, 1))
        missing -= opens
        ahead = missing if self.view.host is None or self.resumes else running.missing(decodes, 2) - opens
        if int(ahead.sum()) > running.free_blocks:
            if self.is_empty:
                needs = np.zeros((2, running.rows.size), dtype=np.int32)
                needs[:, decodes] = missing, ahead
                running.make_room(*needs)
            stays = decodes < running.rows.size
            decodes, missing = decodes[stays], missing[stays] + shut(self.view, running, decodes[stays], opens[stays])
            goes_on = (missing == 0) | (missing.cumsum() <= running.free_blocks)
            decodes, missing = decodes[goes_on], missing[goes_on]
            self._may_change = True
        self._chosen.decode(running.rows[decodes])
        running.free_blocks -= int(missing.sum())

    def prefill(self, rows: I32 | None = None) -> None:
        """Choose prompts that were begun, each with what the limits, the budget and the blocks allow.

        Args:
            rows: in the order in which they are served, those that are not in `begun` are left out; None: all of it.
        """
        begun = self.begun
        for row in begun if rows is None else rows.tolist():
            if row in begun and self._chosen.places:
                self._continue_prefill(row, begun[row])

    def rescue(self) -> None:
        """Make room for the next chunk of the first of the order if nobody has been chosen for lack of blocks."""
        running = self._running
        if not self.is_empty or not running.rows.size or running.remaining[0] == 1:
            return
        if running.coming_blocks or running.arriving.size:  # a copy's end brings blocks, or a row that can give way
            return
        needs, chunk = np.zeros_like(running.rows), min(int(running.remaining[0]), self._chosen.tokens_left)
        missing = int(running.missing(np.zeros(1, dtype=np.intp), chunk)[0])
        freeable = int(running.freeable()[1:].sum()) + running.lent_blocks()
        needs[0] = min(missing, running.free_blocks + freeable)  # less than all is progress too
        running.make_room(needs, needs)
        self._continue_prefill(int(running.rows[0]), int(running.computed[0]))

    def admit(self, line: I32 | None = None, *, whole: bool = False) -> int | None:
        """Choose parked rows, and bring back those on the host, until one does not fit whatever the others give up.

        Args:
            line: preempted and waiting rows, who comes in first first; None: as they arrived, the preempted ones first.
            whole: take a row only if the step has tokens left for all of it; a row that no step has tokens enough for
                comes first in its step and is cut to what fits.

        Returns:
            The row that does not fit; None if the line or the step ended before.
        """
        columns, running, room = self.view.columns, self._running, self.unpromised_blocks
        for row in self._parked(line):
            on_host = int(columns.host_tokens[row])
            if self._places() <= 0 or not (on_host or self._chosen.tokens_left):
                return None
            cached = NOTHING_CACHED if on_host else self.view.blocks.cached(row)
            if cached.is_coming or cached.next_block in self._coming_names:
                self._may_change = True  # it would compute what another row is computing
                continue
            copied = ceil_div(on_host, self.view.block_size) or self._bringing.worth(row, cached.num_tokens)
            left = _num_known(self.view, row) - cached.num_tokens
            chunk = 0 if copied else self._cut(cached.num_tokens, left)
            if whole and chunk < left and not self.is_empty:
                chunk = 0
            if running.gives_way(row) or not (copied or chunk):
                return row
            need, held = _num_to_fit(self.view, row, is_alone=not self._running.count), int(columns.held_blocks[row])
            shared = 0 if self._running.any_gone else cached.num_shared_blocks  # who gives way may be the other holder
            if need - shared > room:
                room, shared = room + (0 if self._counts_shared else running.take_lent(need - room, row)), 0
                if need > room:
                    return row
            if copied:
                self._chosen.resume.append(row)
                running.give(copied - held - shared)
            else:
                self._choose(row, chunk, cached.num_tokens, held + shared)
            running.come_in(row, need - shared + 1)
            room -= need - shared + 1
            self._counts_shared |= shared > 0
            if cached.next_block is not None:
                self._coming_names.add(cached.next_block)
        return None

    def head(self, line: I32 | None = None) -> int | None:
        """Return the first of the line that `admit` would not pass over; None: there is none."""
        on_host, blocks = self.view.columns.host_tokens, self.view.blocks
        return next((row for row in self._parked(line) if on_host[row] or not blocks.cached(row).is_coming), None)

    def preempt_for(self, row: int, victims: I32) -> bool:
        """Let some of the victims give way if the row does not fit, as few as make it fit; nobody is chosen yet.

        Args:
            row: a parked one that is not passed over.
            victims: running rows, in the order in which they are to go.

        Returns:
            Whether somebody gives way by recompute, so that `admit` finds room now.
        """
        assert self.is_empty, "who is chosen already must not give way"
        if (num_places := self._places()) < 0:
            return False  # batches in flight hold so many rows that one place more is not enough
        fits, lacks_place = _num_to_fit(self.view, row, is_alone=not self._running.count), num_places == 0
        meanwhile = 0 if self.view.host is None else int(self._running.missing(self._decoding(), 2).sum())
        lacking = fits + meanwhile - self.unpromised_blocks  # while the copies are under way decodes take some
        cached = NOTHING_CACHED if self.view.columns.host_tokens[row] else self.view.blocks.cached(row)
        if lacks_place or lacking > cached.num_shared_blocks:
            self._running.preempt(victims, lacking, row, lacks_place=lacks_place)
        return bool(self._running.dropped.size)

    def keep_for(self, rows: I32, victims: I32) -> None:
        """Let some of the victims give way if running rows lack blocks for what is known of them; nobody is chosen yet.

        Args:
            rows: running ones that keep theirs.
            victims: others, in the order in which they are to go.
        """
        assert self.is_empty, "who is chosen already must not give way"
        running = self._running
        lacking = int(missing_blocks(self.view, rows, num_known(self.view.columns, rows)).sum())
        if victims.size and lacking > running.free_blocks + running.coming_blocks:
            running.preempt(victims, lacking - running.free_blocks, NOBODY, lacks_place=False)

    def output(self, holds_s: float = 0.0) -> SchedulerOutput:
        """Return the decision. If nobody can run or come back, nobody drops KV either: it would be for nothing.

        Args:
            holds_s: for how long the policy would decide the same again, were it only decodes and nothing happened.
        """
        if self.is_empty and not self.resumes:
            self._running.dropped = EMPTY_ROWS
        preempt, how, kept = self._running.gone()
        rows, num_tokens, resume = self._chosen.arrays()
        reason, look_s = self._chosen.reason(preempts=preempt.size > 0), self.view.now_s + holds_s if holds_s else inf
        holds = holds_s > 0 and reason == "decode" and not (self.resumes or self._may_change or self.begun)
        return SchedulerOutput(rows, num_tokens, preempt, how, kept, reason, resume, look_s, holds)

    def _decoding(self) -> Places:
        decodes: Places = (self._running.remaining == 1).nonzero()[0]
        if self.num_decodes:
            decodes = decodes[~among(self.view, self._running.rows[decodes], self._chosen.decodes)]
        return decodes

    def _parked(self, line: I32 | None) -> Iterator[int]:
        """Return the rows that may come in, as many as could be of use."""
        most = max(self._places(), 0) + MAX_PASSED_OVER
        queues = (self.view.preempted, self.view.waiting) if line is None else (line,)
        rows = chain.from_iterable(queue[:most].tolist() for queue in queues)
        return (row for row in rows if row not in self._running.come)

    def _places(self) -> int:
        """Return how many more rows may come in."""
        return min(self._chosen.rows_left, self._max_running - self._running.count)

    def _continue_prefill(self, row: int, computed: int) -> None:
        held = int(self.view.columns.held_blocks[row])
        slots = (held + self._running.free_blocks) * self.view.block_size - computed
        chunk = min(self._cut(computed, _num_known(self.view, row) - computed), slots)
        if chunk > 0:
            self._choose(row, chunk, computed, held)

    def _cut(self, begin: int, left: int) -> int:
        """Return how many of the tokens that a prompt has left the step takes, if it has the blocks; 0: none."""
        chunk = min(left, self._chosen.tokens_left)
        return chunk if self.budget is None else min(self.budget.most(begin), chunk)

    def _choose(self, row: int, num_tokens: int, begin: int, held: int) -> None:
        self._chosen.compute(row, num_tokens)
        self._running.give(max(ceil_div(begin + num_tokens, self.view.block_size) - held, 0))
        if self.budget is not None:
            self.budget.take(begin, num_tokens, is_cut=begin + num_tokens < _num_known(self.view, row))


def _num_known(view: SchedulerView, row: int) -> int:
    return int(view.columns.num_prompt[row]) + int(view.columns.num_output[row])


def _num_to_fit(view: SchedulerView, row: int, *, is_alone: bool) -> int:
    """Return the blocks that a parked row must find to come in: for its known tokens and, beside others, the next.

    Others are those that run or are in flight; alone it may use every block.
    """
    known = _num_known(view, row) + int(not is_alone)
    return ceil_div(known, view.block_size) - int(view.columns.held_blocks[row])
