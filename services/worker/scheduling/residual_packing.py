"""Which requests make up BROS's next batch: who is nearest to its limit first, then best effort, which may replace.

    real time, by residual  ──► added until it is full, blocks run out, or it lasts longer than the least residual
    best effort, by what of ──► added likewise; if one does not fit, the last one of real time is taken out for it, and
    it lies on the host         if that does not help either, he comes back, and the batch is complete

A residual is what is left of a request's time, less all but one of the tokens of its group. Pure: times are arguments.

Source: BROS, section 4.2, algorithm 1; the least residual is that of the text (the listing takes it from the limit once
more). Deviations, without which the listing stands still or lets requests starve:

- Somebody is replaced only if his residual lasts for this step and one more: constraint (6) with x = 0.
- Who cannot be in time any more says nothing about how long a step may last, comes after those who can, and one of them
  has a place in each batch. Where nobody can be in time, a step may last for a limit per token.
- Replacing ends when nobody is left, and a batch is never empty.
- A prompt that alone takes longer than the least residual is cut to what fits, and then the batch is complete; while
  somebody is late his is, and no other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

import numpy as np

from services.worker.scheduling.view import F64, Bool
from shared.phase_cost import StepCost

MANY: Final = 2**30
"""Tokens: no bound."""
LEAST_CUT: Final = 64
"""Tokens of a prompt that a batch takes at least, whatever it lasts, if it is somebody's turn."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """What requests of one class would have computed, [n] each, who comes first first."""

    is_decode: Bool
    num_tokens: F64
    """To compute: 1 of a decode, else what is left of the prompt."""
    num_context: F64
    """Length of the context with them."""
    num_blocks: F64
    """Of KV that it lacks for that."""
    num_on_host: F64
    """Blocks that are brought back for it."""

    def columns(self) -> F64:
        """Return [6, n] what each adds to the totals of a batch: those of `_Batch`."""
        decodes, prompts = self.is_decode, ~self.is_decode
        tokens, context = self.num_tokens, self.num_context
        parts = [tokens * prompts, context * prompts, tokens * decodes, context * decodes]
        return np.array([*parts, self.num_on_host, self.num_blocks])


@dataclass(frozen=True, slots=True)
class BatchRoom:
    """What a batch may take."""

    num_rows: int
    num_free_blocks: int
    """Of KV."""
    num_lent_blocks: int
    """That best effort gives up for real time."""
    block_copy_s: float
    """To bring one block back from the host."""
    period_s: float
    """Of the steps of late."""
    late_step_s: float
    """How long it may last where all are late."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The choice, by places."""

    real_time: list[int]
    """Of real time, in order."""
    best_effort: list[int]
    """Likewise."""
    num_cut: int | None
    """Tokens of the last one's prompt that are computed now; None: nobody's is cut."""
    lasts_s: float
    """How long the step is to last."""
    is_too_long: bool
    """With one more of real time it would have lasted longer than the least residual."""


def pack(real_time: RowWork, residual_s: F64, best_effort: RowWork, cost: StepCost, room: BatchRoom) -> Packed:
    """Return the batch; it is empty if there is nobody.

    Args:
        real_time: by residual, the least first.
        residual_s: [n] seconds that each has for its next token.
        best_effort: by blocks on the host, the fewest first.
        cost: of a step.
        room: of the batch.
    """
    batch, each = _Batch(cost, room), real_time.columns()
    is_late = residual_s < batch.lasts_s(each)
    early, late = np.flatnonzero(~is_late), np.flatnonzero(is_late)
    if is_late.size:
        batch.limit_s = float(residual_s[early[0]]) if early.size else room.late_step_s
    num_blocks = room.num_free_blocks + room.num_lent_blocks
    num_early, stop = batch.take(each[:, early], room.num_rows - bool(late.size), num_blocks, cuts=not late.size)
    is_too_long = stop is _Stop.TIME
    num_late, stop = batch.take(each[:, late], room.num_rows - num_early, num_blocks)
    is_too_long |= stop is _Stop.TIME
    if late.size and not num_late:
        num_late = batch.force(each[:, late[0]])
    chosen = [*early[:num_early].tolist(), *late[:num_late].tolist()]
    if not chosen and early.size:
        num_early = batch.force(each[:, early[0]])
        chosen = [int(early[0])]
    replaceable = residual_s[chosen[:num_early]] - room.period_s
    added, num_left = _add_best_effort(batch, best_effort.columns(), each[:, chosen[:num_early]], replaceable, room)
    left = [*chosen[:num_left], *chosen[num_early:]]
    return Packed(left, added, batch.num_cut, float(batch.lasts_s(batch.totals)), is_too_long)


def _add_best_effort(batch: _Batch, others: F64, early: F64, spare_s: F64, room: BatchRoom) -> tuple[list[int], int]:
    """Add best effort to a batch, in place of the last ones of real time where need be.

    Args:
        batch: with all of real time.
        others: [6, m] of best effort.
        early: [6, n] those of real time that may be replaced, the last one first.
        spare_s: [n] how long a step may last without each.
        room: of the batch.

    Returns:
        Places of those who were added, and how many of `early` are left.
    """
    num_blocks = max(room.num_free_blocks, int(batch.totals[_BLOCKS]))
    added, num_left, place = list[int](), early.shape[1], 0
    while batch.num_cut is None and place < others.shape[1]:
        count, stop = batch.take(others[:, place:], room.num_rows - batch.num_rows, num_blocks)
        added += range(place, place + count)
        place += count
        if place == others.shape[1] or stop is _Stop.BLOCKS or batch.num_cut is not None:
            break
        if not num_left:
            break
        without = batch.totals - early[:, num_left - 1] + others[:, place]
        if without[_BLOCKS] > num_blocks or batch.lasts_s(without) > min(batch.limit_s, spare_s[num_left - 1]):
            break
        batch.totals, num_left = without, num_left - 1
        added.append(place)
        place += 1
    if not batch.num_rows and others.size and batch.num_cut is None:
        added = [0][: batch.force(others[:, 0])]
    return added, num_left


_BLOCKS: Final = 5
"""Column of the totals."""


class _Stop(Enum):
    """Why a batch took no more."""

    TIME = auto()
    BLOCKS = auto()
    ROWS = auto()


class _Batch:
    """Totals [6] of a batch in the making: tokens and context of prompts, of decodes, blocks on the host, and lacking.

    Args:
        cost: of a step.
        room: of the batch.
    """

    def __init__(self, cost: StepCost, room: BatchRoom) -> None:
        self._cost, self._block_copy_s = cost, room.block_copy_s
        self.totals: F64 = np.zeros(6)
        self.num_rows = 0
        self.limit_s = inf
        """The least residual."""
        self.num_cut: int | None = None

    def lasts_s(self, totals: F64) -> F64:
        """Return how long steps of these totals last: [k] of [6, k], one of [6]."""
        prompts, prompt_context, decodes, decode_context, on_host, _ = totals
        taken_s: F64 = self._cost.of(prompts, prompt_context, decodes, decode_context)
        lasts_s: F64 = np.maximum(taken_s, self._block_copy_s * on_host)
        return lasts_s

    def take(self, each: F64, num_rows: int, num_blocks: int, *, cuts: bool = True) -> tuple[int, _Stop | None]:
        """Add the first ones that fit, and cut the prompt of the next one if it fits no step.

        Args:
            each: [6, k] in order.
            num_rows: most of them.
            num_blocks: that all of the batch may lack.
            cuts: whether a prompt may be cut.

        Returns:
            How many, and why no more.
        """
        some = each[:, : max(num_rows, 0)]
        if not (size := some.shape[1]):
            return 0, _Stop.ROWS if each.size else None
        sums = self.totals[:, None] + some.cumsum(axis=1)
        too_long, lack = self.lasts_s(sums) > self.limit_s, sums[_BLOCKS] > num_blocks
        bad = (too_long | lack).nonzero()[0]
        count = int(bad[0]) if bad.size else size
        if count:
            self.totals, self.num_rows = sums[:, count - 1], self.num_rows + count
        if count == size:
            return count, _Stop.ROWS if size < each.shape[1] else None
        if lack[count]:
            return count, _Stop.BLOCKS
        one = some[:, count]
        if (
            cuts
            and one[0] > 0
            and self.lasts_s(one) > self.limit_s
            and (fits := self._fitting()) >= min(LEAST_CUT, one[0])
        ):
            self._cut(one, fits)
            count += 1
        return count, _Stop.TIME

    def force(self, one: F64) -> int:
        """Add somebody although the step lasts too long, with little of its prompt; return 1."""
        if one[0] > LEAST_CUT:
            self._cut(one, max(self._fitting(), LEAST_CUT))
        else:
            self.totals, self.num_rows = self.totals + one, self.num_rows + 1
        return 1

    def _fitting(self) -> int:
        if self.limit_s == inf:
            return MANY
        prompts, prompt_context, decodes, decode_context, on_host, _ = self.totals.tolist()
        if self._block_copy_s * on_host > self.limit_s:
            return 0
        left_s = self.limit_s - self._cost.decode.of(decodes, decode_context)
        return self._cost.prefill.largest(prompts, prompt_context, left_s)

    def _cut(self, one: F64, num_tokens: int) -> None:
        self.num_cut = int(min(num_tokens, one[0]))
        self.totals, self.num_rows = self.totals + one * (1, 1, 0, 0, 1, 1), self.num_rows + 1
