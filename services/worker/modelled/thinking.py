"""Thinking of modelled rows: what is said is drawn, but for the tag behind a budget, which is forced."""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, RowInit
from shared.types import Thinking

_NEVER = -1


class ThinkingBudgets:
    """Of one executor's rows: where in each the closing tag is forced. A row that has none costs nothing."""

    def __init__(self) -> None:
        self._may_think: dict[int, tuple[Thinking, int]] = {}
        """Rows whose first output decides, and where that is."""
        self._limit: I32 = np.full(0, _NEVER, dtype=np.int32)
        """[rows] position of the closing tag; -1: none is forced."""
        self._closing_id: I32 = np.zeros(0, dtype=np.int32)
        self._num_limits = 0

    def take_in(self, batch: Batch) -> None:
        """Take what comes before a step: rows that go and come."""
        if self._may_think or self._num_limits:
            for row in batch.drops.tolist():
                self._drop(row)
        for init in batch.admits:
            self._admit(init)

    def force(self, batch: Batch, tokens: I32) -> None:
        """Put closing tags in the place of what was drawn, [n] tokens of a step."""
        if not (self._may_think or self._num_limits):
            return
        rows = batch.rows
        positions = np.where(batch.sample, batch.start + batch.num_tokens, _NEVER)
        if self._may_think:
            self._decide(rows, positions, tokens)
        self._make_rows(int(rows.max()) + 1)
        limits, closing_ids = self._limit[rows], self._closing_id[rows]
        by_itself = (positions != _NEVER) & (positions < limits) & (tokens == closing_ids)
        for row in rows[by_itself].tolist():
            self._drop(row)
        forced = (limits == positions) & (limits != _NEVER)
        tokens[forced] = closing_ids[forced]

    def _admit(self, init: RowInit) -> None:
        thinking = init.sampling.thinking
        if thinking is None or thinking.budget is None:
            return
        outputs = init.tokens[init.num_prompt :].tolist()
        if thinking.count(outputs) is not None:
            return
        if outputs or thinking.is_open:
            self._begin(init.row, thinking, init.num_prompt + int(not thinking.is_open))
        else:
            self._may_think[init.row] = thinking, init.num_prompt

    def _drop(self, row: int) -> None:
        self._may_think.pop(row, None)
        if row < self._limit.size and self._limit[row] != _NEVER:
            self._limit[row] = _NEVER
            self._num_limits -= 1

    def _decide(self, rows: I32, positions: I32, tokens: I32) -> None:
        for row, position, token in zip(rows.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            thinking, first = self._may_think.get(row, (None, _NEVER))
            if thinking is not None and position == first:
                del self._may_think[row]
                if token == thinking.opening_id:
                    self._begin(row, thinking, first + 1)

    def _begin(self, row: int, thinking: Thinking, first: int) -> None:
        """Have a row think from a position on."""
        assert thinking.budget is not None, "only a budget has an end"
        self._make_rows(row + 1)
        self._limit[row], self._closing_id[row] = first + thinking.budget, thinking.closing_id
        self._num_limits += 1

    def _make_rows(self, num_rows: int) -> None:
        more = np.full(max(num_rows - self._limit.size, 0), _NEVER, dtype=np.int32)
        if more.size:
            self._limit = np.concatenate([self._limit, more])
            self._closing_id = np.concatenate([self._closing_id, more])
