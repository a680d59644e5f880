"""A step in the making: the parts from which first-come-first-served policies are put together.

Rules that all parts keep:

- *Who gives way.* When blocks run out the running rows admitted last are preempted, as many as needed and no more
  (`making_room.py`).
- *Nobody comes in too early.* A row is admitted only if all its known tokens fit, next to what the running rows still
  need for theirs and one block of headroom for each of them. A row admitted on its first chunk alone would be
  preempted before it gave a token.
- *Nobody jumps the queue for being small.* A row that does not fit stops the admission, as in vLLM: smaller ones
  behind it would else keep it waiting for ever.
- *Nobody computes what another row is computing.* A row that waits and lacks a block that a running row has begun is
  passed over until that block is there; it keeps its place. The running row goes on in every step that it can, so this
  ends with its prefill.
- *Every lane gets its part.* With several lanes the decodes are spread evenly over them: a step takes at most its share
  of those that decode or are in flight, first who has waited longest since its last step. Prefills are cut by the token
  budget of a step alone, as in Sarathi-Serve, so lanes with prefills may differ in time. The chunks of one prompt may
  be in several lanes, one behind the other.
- *Somebody finishes.* The first running row (of those in no batch in flight: the others cannot be preempted at all) is
  never preempted for want of blocks, so the first of all ends, and then the next one.
  If it lacks blocks that only pins, copies or a batch in flight can give back, nobody gives way for it: it waits, and
  who needs no block goes on.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from services.worker.scheduling.blocks_math import ceil_div, missing_blocks, num_known
from services.worker.scheduling.lanes import Places, lane_share, lane_share_by_cost
from services.worker.scheduling.making_room import Running
from services.worker.scheduling.view import EMPTY_ROWS, I32, SchedulerOutput, SchedulerView
from shared.cost import CostModel

MAX_PASSED_OVER = 64
"""Rows beyond those that a step could take that are looked at, in case some of the first are passed over."""


class StepPlan:
    """Rows chosen so far, and the tokens, rows and blocks that are left for more."""

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._running = Running(view)
        self._arriving = EMPTY_ROWS if view.host is None else view.host.arriving
        self._decodes: I32 = EMPTY_ROWS
        self._chunk_rows: list[int] = []
        self._chunk_begins: list[int] = []
        self._chunk_tokens: list[int] = []
        self._resume: list[int] = []
        self._num_come = 0  # parked rows among those chosen
        self._tokens_left = view.limits.max_batch_tokens
        self._rows_left = view.limits.max_batch_rows

    @property
    def is_empty(self) -> bool:
        """Nobody is chosen yet."""
        return not (self._decodes.size or self._chunk_rows)

    @property
    def preempts(self) -> bool:
        """Somebody gives way."""
        return self._running.any_gone

    @property
    def resumes(self) -> bool:
        """Somebody's KV is brought back from the host."""
        return bool(self._resume)

    @property
    def any_parked(self) -> bool:
        """Somebody waits, or has been preempted."""
        return bool(self._view.preempted.size or self._view.waiting.size)

    def decode(self, cost: CostModel | None = None) -> None:
        """Choose this lane's share of the running rows with one token to compute, and make room for them.

        Args:
            cost: of a step, to share them by; None: lanes have equal numbers.
        """
        running = self._running
        decodes = (running.remaining == 1).nonzero()[0]
        if cost is None:
            share = lane_share(self._view, running.rows, decodes)
        else:
            share = lane_share_by_cost(self._view, running.rows, decodes, cost)
        self._decode(share)
        if not self._decodes.size and share.size < decodes.size:  # they lack blocks; others may go on without any
            self._decode((running.remaining == 1).nonzero()[0])

    def _decode(self, decodes: Places) -> None:
        """Choose decodes among the running rows, named by their places, and make room for them."""
        view, running = self._view, self._running
        decodes = decodes[: min(self._tokens_left, self._rows_left)]
        if not decodes.size:
            return
        missing = self._missing(decodes, 1)
        total = int(missing.sum())
        ahead, most = missing, total
        if view.host is not None and not self._resume:
            ahead = self._missing(decodes, 2)
            most = int(ahead.sum())
        if most > running.free_blocks:
            needs = np.zeros((2, running.rows.size), dtype=np.int32)
            needs[:, decodes] = missing, ahead
            running.make_room(*needs)
            stays = decodes < running.rows.size
            decodes, missing = decodes[stays], missing[stays]
            goes_on = (missing == 0) | (missing.cumsum() <= running.free_blocks)
            decodes, total = decodes[goes_on], int(missing[goes_on].sum())
        self._decodes = running.rows[decodes]
        running.free_blocks -= total
        self._tokens_left -= int(decodes.size)
        self._rows_left -= int(decodes.size)

    def continue_prefills(self) -> None:
        """Choose the rows that have begun a prompt, each with what the limits and blocks allow.

        First those with a chunk in flight, then the running ones with more than one token to compute.
        """
        view, running = self._view, self._running
        begun = [*zip(view.extensible.tolist(), view.extensible_begins.tolist(), strict=True)]
        for i in (running.remaining > 1).nonzero()[0].tolist():
            begun.append((int(running.rows[i]), int(running.computed[i])))
        for row, computed in begun:
            if self._tokens_left == 0 or self._rows_left == 0:
                return
            self._continue_prefill(row, computed)

    def rescue(self) -> None:
        """Make room for the first running row's next chunk if nobody has been chosen for lack of blocks."""
        running = self._running
        if not self.is_empty or not running.rows.size or running.remaining[0] == 1:
            return
        if running.coming_blocks or self._arriving.size:
            return  # a copy's end brings blocks, or a row that can give way
        end = running.computed[:1] + np.minimum(running.remaining[:1], self._tokens_left)
        needs = np.zeros_like(running.rows)
        missing = int(missing_blocks(self._view, running.rows[:1], end)[0])
        freeable = int(running.freeable()[1:].sum())
        needs[0] = min(missing, running.free_blocks + freeable)  # less than all is progress too
        running.make_room(needs, needs)
        self._continue_prefill(int(running.rows[0]), int(running.computed[0]))

    def admit(self, *, whole: bool) -> None:
        """Choose preempted rows, then waiting ones, until one of them does not fit.

        A row whose KV is on the host is brought back, which takes no token of the step.

        Args:
            whole: take a row only if the step has tokens left for all of it; a row that no step has tokens enough for
                comes first in its step and is cut to what fits.
        """
        view, columns = self._view, self._view.columns
        room = self._running.free_blocks - self._promised_blocks()
        begun: set[bytes] = set()
        for row in self._parked():
            if self._places() <= 0:
                return
            need = self._num_to_fit(row)
            if columns.host_tokens[row]:
                if need > room:
                    return
                self._resume.append(row)
                self._num_come += 1
                self._running.free_blocks -= ceil_div(int(columns.host_tokens[row]), view.block_size)
                room -= need + 1
                continue
            if self._tokens_left == 0:
                return
            cached = view.blocks.cached(row)
            if cached.is_coming or cached.next_block in begun:
                continue  # it would compute what another row is computing
            shared = 0 if self.preempts else cached.num_shared_blocks  # who gives way may be the other holder
            left = int(columns.num_prompt[row]) + int(columns.num_output[row]) - cached.num_tokens
            chunk = self._cut(row, cached.num_tokens, left)
            if need - shared > room or not chunk or (whole and chunk < left and not self.is_empty):
                return
            self._choose(row, chunk, cached.num_tokens, shared)
            self._num_come += 1
            room -= need - shared + 1
            if cached.next_block is not None:
                begun.add(cached.next_block)

    def exchange(self, candidates: I32) -> bool:
        """Let some of the candidates give way so that the first parked row fits; `admit` has just found that none does.

        Args:
            candidates: running rows, in the order in which they are to go; nobody is chosen yet.

        Returns:
            Whether somebody gives way by recompute, so that `admit` finds room now.
        """
        running = self._running
        head = next((row for row in self._parked() if self._may_come(row)), None)
        if head is None or not candidates.size:
            return False
        room = running.free_blocks + running.coming_blocks - self._promised_blocks()
        running.exchange(candidates, self._num_to_fit(head) - room, lacks_place=self._places() <= 0)
        return bool(running.dropped.size)

    def output(self) -> SchedulerOutput:
        """Return the decision. If nobody can run or come back, nobody drops KV either: it would be for nothing."""
        if self.is_empty and not self._resume:
            self._running.dropped = EMPTY_ROWS
        preempt, how = self._running.gone()
        rows = self._decodes
        if self._chunk_rows:
            rows = np.concatenate([rows, np.array(self._chunk_rows, dtype=np.int32)])
        num_tokens = np.ones(rows.size, dtype=np.int32)
        num_tokens[self._decodes.size :] = self._chunk_tokens
        return SchedulerOutput(
            rows=rows,
            num_tokens=num_tokens,
            preempt=preempt,
            preempt_how=how,
            reason=self._reason(),
            resume=np.array(self._resume, dtype=np.int32) if self._resume else EMPTY_ROWS,
        )

    def _reason(self) -> str:
        if self._running.any_gone:
            return "kv-full"
        if self.is_empty:
            return "resume" if self._resume else "nothing"
        if self._decodes.size:
            return "mixed" if self._chunk_rows else "decode"
        return "prefill"

    def _missing(self, places: Places, num_tokens: int) -> I32:
        """Return the blocks that running rows, named by their places, lack for their next tokens."""
        running = self._running
        return missing_blocks(self._view, running.rows[places], running.computed[places] + num_tokens)

    def _parked(self) -> chain[int]:
        """Return the rows that may come in, as many as could be of use."""
        most = max(self._places(), 0) + MAX_PASSED_OVER
        return chain(self._view.preempted[:most].tolist(), self._view.waiting[:most].tolist())

    def _may_come(self, row: int) -> bool:
        return bool(self._view.columns.host_tokens[row]) or not self._view.blocks.cached(row).is_coming

    def _num_running(self) -> int:
        """Return how many rows run or will, those chosen to come in included."""
        return int(self._running.rows.size + self._arriving.size) + self._num_come

    def _places(self) -> int:
        """Return how many more rows may come in."""
        limits = self._view.limits
        num_places = limits.max_batch_rows * limits.num_lanes - self._view.num_in_flight
        return min(self._rows_left, num_places - self._num_running())

    def _num_to_fit(self, row: int) -> int:
        """Return the blocks that a parked row must find to come in: for its known tokens and, beside others, the next.

        Others are those that run or are in flight; alone it may use every block.
        """
        columns = self._view.columns
        known = int(columns.num_prompt[row]) + int(columns.num_output[row])
        is_alone = self._num_running() == 0 and self._view.num_in_flight == 0
        return ceil_div(known if is_alone else known + 1, self._view.block_size)

    def _continue_prefill(self, row: int, computed: int) -> None:
        columns = self._view.columns
        held, known = int(columns.held_blocks[row]), int(columns.num_prompt[row]) + int(columns.num_output[row])
        slots = (held + self._running.free_blocks) * self._view.block_size - computed
        chunk = min(self._cut(row, computed, known - computed), slots)
        if chunk > 0:
            self._choose(row, chunk, computed, held)

    def _cut(self, row: int, computed: int, left: int) -> int:
        """Return how many of the tokens that a row has left the step takes, if it has the blocks; 0: none."""
        del row, computed  # here only the number counts
        return min(left, self._tokens_left)

    def _choose(self, row: int, num_tokens: int, computed: int, held: int) -> None:
        self._chunk_rows.append(row)
        self._chunk_begins.append(computed)
        self._chunk_tokens.append(num_tokens)
        self._running.free_blocks -= max(ceil_div(computed + num_tokens, self._view.block_size) - held, 0)
        self._tokens_left -= num_tokens
        self._rows_left -= 1

    def _promised_blocks(self) -> int:
        """Return the blocks that the running rows need besides those that the plan has given out.

        One more for each of them, those in flight included, and for a prefill under way the rest of its known tokens.
        """
        view, running = self._view, self._running
        prefills = (running.remaining > 1).nonzero()[0]
        promised = int(running.rows.size)
        for others in (self._arriving, view.in_flight):
            if others.size:
                promised += int(others.size + missing_blocks(view, others, num_known(view.columns, others)).sum())
        if prefills.size:
            rows, ends = running.rows[prefills], (running.computed + running.remaining)[prefills]
            promised += int(missing_blocks(view, rows, ends).sum())
        for row, begin, chunk in zip(self._chunk_rows, self._chunk_begins, self._chunk_tokens, strict=True):
            promised -= max(ceil_div(begin + chunk, view.block_size) - int(view.columns.held_blocks[row]), 0)
        return promised
