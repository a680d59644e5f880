"""A step in the making: the parts from which first-come-first-served policies are put together.

Rules that all parts keep:

- *Who gives way.* When blocks run out the running rows admitted last are preempted, as many as needed and no more.
- *Nobody comes in too early.* A row is admitted only if all its known tokens fit, next to what the running rows still
  need for theirs and one block of headroom for each of them. A row admitted on its first chunk alone would be
  preempted before it gave a token.
- *Nobody jumps the queue for being small.* A row that does not fit stops the admission, as in vLLM: smaller ones
  behind it would else keep it waiting for ever.
- *Nobody computes what another row is computing.* A row that waits and lacks a block that a running row has begun is
  passed over until that block is there; it keeps its place. The running row goes on in every step that it can, so this
  ends with its prefill.
- *Somebody finishes.* The first running row is never preempted, so it ends, and then the next one. If it lacks blocks
  that only pins or a batch in flight can give back, nobody gives way for it: it waits, and who needs no block goes on.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from services.worker.policy.blocks_math import ceil_div, missing_blocks, num_kept, num_known
from services.worker.policy.view import I32, PreemptHow, SchedulerOutput, SchedulerView

MAX_PASSED_OVER = 64
"""Rows beyond those that a step could take that are looked at, in case some of the first are passed over."""
_RECOMPUTE = np.uint8(PreemptHow.RECOMPUTE)


class StepPlan:
    """Rows chosen so far, and the tokens, rows and blocks that are left for more."""

    def __init__(self, view: SchedulerView) -> None:
        columns = view.columns
        self._view = view
        self._running = view.running
        self._computed: I32 = columns.num_computed[view.running]
        self._remaining: I32 = num_known(columns, view.running) - self._computed
        self._decodes: I32 = view.running[:0]
        self._chunk_rows: list[int] = []
        self._chunk_tokens: list[int] = []
        self._preempt: I32 = view.running[:0]
        self._freeable_blocks: I32 | None = None
        self._free_blocks = view.free_blocks
        self._tokens_left = view.limits.max_batch_tokens
        self._rows_left = view.limits.max_batch_rows

    @property
    def is_empty(self) -> bool:
        """Nobody is chosen yet."""
        return not (self._decodes.size or self._chunk_rows)

    @property
    def preempts(self) -> bool:
        """Somebody gives way."""
        return bool(self._preempt.size)

    def decode(self) -> None:
        """Choose the running rows with one token to compute, as many as the limits allow, and make room for them."""
        view = self._view
        decodes = (self._remaining == 1).nonzero()[0][: min(self._tokens_left, self._rows_left)]
        if not decodes.size:
            return
        rows = self._running[decodes]
        missing = missing_blocks(view, rows, self._computed[decodes] + 1)
        total = int(missing.sum())
        if total > self._free_blocks:
            needs = np.zeros_like(self._running)
            needs[decodes] = missing
            kept = num_kept(needs, self._freeable(), self._free_blocks)
            if kept > 0:
                self._give_way(kept)
            goes_on = decodes < kept if kept > 0 else missing == 0
            rows, total = rows[goes_on], int(missing[goes_on].sum())
        self._decodes = rows
        self._free_blocks -= total
        self._tokens_left -= int(rows.size)
        self._rows_left -= int(rows.size)

    def continue_prefills(self) -> None:
        """Choose the running rows with more than one token to compute, each with what the limits and blocks allow."""
        for i in (self._remaining > 1).nonzero()[0].tolist():
            if self._tokens_left == 0 or self._rows_left == 0:
                return
            self._continue_prefill(i)

    def rescue(self) -> None:
        """Make room for the first running row's next chunk if nobody has been chosen for lack of blocks."""
        if not self.is_empty or not self._running.size or self._remaining[0] == 1:
            return
        view = self._view
        end = self._computed[:1] + np.minimum(self._remaining[:1], self._tokens_left)
        needs = np.zeros_like(self._running)
        missing = int(missing_blocks(view, self._running[:1], end)[0])
        freeable = int(self._freeable()[1:].sum())
        needs[0] = min(missing, self._free_blocks + freeable)  # less than all is progress too
        kept = num_kept(needs, self._freeable(), self._free_blocks)
        if needs[0]:
            self._give_way(kept)
            self._continue_prefill(0)

    def admit(self, *, whole: bool) -> None:
        """Choose preempted rows, then waiting ones, until one of them does not fit. Nobody may have been preempted.

        Args:
            whole: take a row only if the step has tokens left for all of it; a row that no step has tokens enough for
                comes first in its step and is cut to what fits.
        """
        view = self._view
        room = self._free_blocks - self._promised_blocks()
        num_running = int(self._running.size)
        places = min(self._rows_left, view.limits.max_batch_rows - num_running)
        most = places + MAX_PASSED_OVER
        begun: set[bytes] = set()
        for row in chain(view.preempted[:most].tolist(), view.waiting[:most].tolist()) if places > 0 else ():
            if places == 0 or self._tokens_left == 0:
                return
            cached = view.blocks.cached(row)
            if cached.is_coming or cached.next_block in begun:
                continue  # it would compute what another row is computing
            known = int(view.columns.num_prompt[row]) + int(view.columns.num_output[row])
            alone = num_running == 0 and view.num_in_flight == 0
            need = ceil_div(known if alone else known + 1, view.block_size) - cached.num_shared_blocks
            cut = known - cached.num_tokens > self._tokens_left
            if need > room or (whole and cut and not self.is_empty):
                return
            chunk = min(known - cached.num_tokens, self._tokens_left)
            self._choose(row, chunk, cached.num_tokens, cached.num_shared_blocks)
            num_running, places, room = num_running + 1, places - 1, room - need - 1
            if cached.next_block is not None:
                begun.add(cached.next_block)

    def output(self) -> SchedulerOutput:
        """Return the decision. If nobody can run, nobody gives way either: it would be for nothing."""
        preempt = self._view.running[:0] if self.is_empty else self._preempt
        chunks = np.array(self._chunk_rows, dtype=np.int32)
        rows = np.concatenate([self._decodes, chunks]) if chunks.size else self._decodes
        num_tokens = np.ones(rows.size, dtype=np.int32)
        num_tokens[self._decodes.size :] = self._chunk_tokens
        return SchedulerOutput(
            rows=rows,
            num_tokens=num_tokens,
            preempt=preempt,
            preempt_how=np.full(preempt.size, _RECOMPUTE),
            reason=self._reason(),
        )

    def _reason(self) -> str:
        if self.is_empty:
            return "nothing"
        if self._preempt.size:
            return "kv-full"
        if self._decodes.size:
            return "mixed" if self._chunk_rows else "decode"
        return "prefill"

    def _continue_prefill(self, i: int) -> None:
        row, computed = int(self._running[i]), int(self._computed[i])
        held = int(self._view.columns.held_blocks[row])
        slots = (held + self._free_blocks) * self._view.block_size - computed
        chunk = min(int(self._remaining[i]), self._tokens_left, slots)
        if chunk > 0:
            self._choose(row, chunk, computed, held)

    def _choose(self, row: int, num_tokens: int, computed: int, held: int) -> None:
        self._chunk_rows.append(row)
        self._chunk_tokens.append(num_tokens)
        self._free_blocks -= max(ceil_div(computed + num_tokens, self._view.block_size) - held, 0)
        self._tokens_left -= num_tokens
        self._rows_left -= 1

    def _give_way(self, kept: int) -> None:
        """Preempt all running rows after the first `kept`."""
        leaving = self._running[kept:]
        self._preempt = np.concatenate([leaving, self._preempt])
        self._free_blocks += int(self._freeable()[kept:].sum())
        self._running = self._running[:kept]
        self._computed, self._remaining = self._computed[:kept], self._remaining[:kept]

    def _freeable(self) -> I32:
        """Return the blocks that each row left frees, all after it gone, those that gave way before included."""
        if self._freeable_blocks is None:
            self._freeable_blocks = self._view.blocks.freeable(self._view.running)
        return self._freeable_blocks[: self._running.size]

    def _promised_blocks(self) -> int:
        """Return the blocks that the running rows need besides those that the plan has given out.

        One more for each of them, and for a prefill under way the rest of its known tokens.
        """
        view = self._view
        prefills = (self._remaining > 1).nonzero()[0]
        if not prefills.size:
            return int(self._running.size)
        rows, ends = self._running[prefills], (self._computed + self._remaining)[prefills]
        promised = int(missing_blocks(view, rows, ends).sum()) + int(self._running.size)
        for row, chunk in zip(self._chunk_rows, self._chunk_tokens, strict=True):
            end = int(view.columns.num_computed[row]) + chunk
            promised -= max(ceil_div(end, view.block_size) - int(view.columns.held_blocks[row]), 0)
        return promised
