"""Lookahead scheduling for a pipeline: every step computes as much as its neighbours, cut from one line of prompts.

    step        0        1        2        3        4             what a step holds: the decodes of the lane, and
    decodes     a b c    d e      a b c    d e      a b c         the next piece of the line, worth the same work as
    prefill     R0 ..... R0 ..... R0 R1 .. R1 R2 .. R3 ...        the one before (`shares.py`)

Everything that is queued and fits the memory stands in one line, first come first; what this call hands out is the next
piece of it. Chunks of one prompt may be in neighbouring steps: stages work first in, first out. When nothing is queued
the decodes alone are split. With one lane it is `chunked-flex-last`: best effort comes behind
all others (`flex_last.py`).

Source: KunServe, version 2, section 4.3; deviations of the formation: `shares.py`. Memory is given, and taken, as
in `chunked`. Of a prompt that waits the whole work counts, as if none of it was cached.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.chunked import ChunkedScheduler
from services.worker.scheduling.flex_last import FlexLast
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.shares import Line, Room, Shares
from services.worker.scheduling.view import I32, SchedulerOutput, SchedulerView
from shared.cost import CostModel

BY_TOKENS: Final = CostModel(g0_s=0, b0_s=0, g1_s=0, b1_s=1, d_s=0, a_s=0)
"""A step costs its tokens."""


class LookaheadScheduler:
    """Keeps, from call to call, how large the pieces of the line are and how many are left."""

    reorders: Final = False
    best_effort_gives_way: Final = True

    def __init__(self) -> None:
        """Begin with nothing cut."""
        self._single = ChunkedScheduler(best_effort_gives_way=True)
        self._shares = Shares(1)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step. Of `view.cost` only proportions matter: that of the whole model will do for its stages.

        Where it is unknown, pieces have as many tokens as each other.
        """
        num_lanes = view.limits.num_lanes
        if num_lanes == 1:
            return self._single.schedule(view)
        if self._shares.num_lanes != num_lanes:
            self._shares = Shares(num_lanes)
        output = self._next(view, view.cost if view.cost is not None and view.cost.token_s > 0 else BY_TOKENS)
        if view.num_in_flight or output.rows.size:
            return output
        return self._single.schedule(view)  # only memory can be in the way, so lanes do not matter

    def _next(self, view: SchedulerView, cost: CostModel) -> SchedulerOutput:
        in_turn = FlexLast(view)
        plan = in_turn.plan
        decode_lane(plan, cost, in_turn.served)
        parked = _fitting(view, in_turn.line, plan.unpromised_blocks)
        line, room = _line(view, cost, parked, in_turn), Room.beside(plan.num_decodes, view.limits, cost)
        plan.budget = _Share(cost, self._shares.next_s(line, room, is_alone=not _any_decodes(view)))
        plan.prefill(in_turn.begun)
        in_turn.admit()
        return plan.output()


class _Share:
    """Takes prompts up to the work that is due in a step."""

    def __init__(self, cost: CostModel, due_s: float) -> None:
        self._cost = cost
        self._left_s = due_s
        self._is_untouched = True

    def most(self, begin: int) -> int:
        """See `Budget`."""
        chunk = self._cost.largest(begin, self._left_s)
        if not chunk and self._is_untouched and self._left_s > 0:
            chunk = 1  # a share may be less than a token
        if not chunk:
            self._left_s = 0.0  # nobody behind is cheaper to begin with
        return chunk

    def take(self, begin: int, num_tokens: int, *, is_cut: bool) -> None:
        """See `Budget`."""
        self._left_s -= self._cost.chunk_s(begin, num_tokens)
        self._is_untouched = False
        if is_cut:
            self._left_s = 0.0  # what it is cut to is all that is due


def _any_decodes(view: SchedulerView) -> bool:
    """Return whether somebody decodes, now or once its batch is back."""
    columns = view.columns
    if np.count_nonzero(num_known(columns, view.running) - columns.num_computed[view.running] == 1):
        return True
    return bool(np.count_nonzero(num_known(columns, view.in_flight) <= view.in_flight_ends))


def _line(view: SchedulerView, cost: CostModel, parked: I32, in_turn: FlexLast) -> Line:
    """Return what is left of the prompts that were begun and of those that fit the memory.

    Args:
        view: the moment.
        cost: of a step.
        parked: those that fit.
        in_turn: who may be in the step.
    """
    columns, running = view.columns, view.running
    computed = columns.num_computed[running]
    begun = num_known(columns, running) - computed > 1
    rows = np.concatenate([view.extensible, running[begun], parked])
    done = np.zeros(rows.size)
    done[: rows.size - parked.size] = np.concatenate([view.extensible_begins, computed[begun]])
    takes_part = in_turn.takes_part(rows)
    rows, done = rows[takes_part], done[takes_part]
    left = num_known(columns, rows) - done
    works = left * (cost.token_s + cost.a_s * (done + (left + 1) / 2))
    return Line(float(works.sum()), int(left.sum()), int(rows.size))


def _fitting(view: SchedulerView, parked: I32, room_blocks: int) -> I32:
    """Return the parked rows without KV on the host whose tokens fit the memory together, and the first in any case.

    Args:
        view: the moment.
        parked: who comes in first first.
        room_blocks: that nobody has been promised.
    """
    parked = parked[view.columns.host_tokens[parked] == 0]
    blocks = -(-(num_known(view.columns, parked) + 1) // view.block_size) + 1  # one for the headroom of each
    fitting: I32 = parked[: max(int(np.searchsorted(blocks.cumsum(), room_blocks, side="right")), 1)]
    return fitting
