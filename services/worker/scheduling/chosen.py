"""What a step in the making has so far: rows, tokens, and room for more of both."""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.view import EMPTY_ROWS, I32


class Chosen:
    """Decodes, chunks of prompts, and rows whose KV is brought back.

    Args:
        tokens_left: of the step.
        rows_left: of the step.
    """

    def __init__(self, tokens_left: int, rows_left: int) -> None:
        self.tokens_left = tokens_left
        self.rows_left = rows_left
        self.decodes: I32 = EMPTY_ROWS
        self.prompts: dict[int, int] = {}
        """Tokens by row."""
        self.resume: list[int] = []
        """Parked rows whose KV is brought from the host."""

    @property
    def is_empty(self) -> bool:
        """The step has no row."""
        return not (self.decodes.size or self.prompts)

    @property
    def places(self) -> int:
        """Rows that it could have beside these, of a token each."""
        return min(self.tokens_left, self.rows_left)

    def decode(self, rows: I32) -> None:
        """Choose rows for a token each."""
        self.decodes = np.concatenate([self.decodes, rows])
        self._take(int(rows.size), int(rows.size))

    def compute(self, row: int, num_tokens: int) -> None:
        """Choose a chunk of a row's prompt."""
        self.prompts[row] = num_tokens
        self._take(1, num_tokens)

    def arrays(self) -> tuple[I32, I32, I32]:
        """Return `rows`, `num_tokens` and `resume` of `SchedulerOutput`."""
        rows, resume = self.decodes, np.array(self.resume, dtype=np.int32) if self.resume else EMPTY_ROWS
        if self.prompts:
            rows = np.concatenate([rows, np.fromiter(self.prompts, dtype=np.int32)])
        num_tokens = np.ones(rows.size, dtype=np.int32)
        num_tokens[self.decodes.size :] = list(self.prompts.values())
        return rows, num_tokens, resume

    def reason(self, *, preempts: bool) -> str:
        """Return `SchedulerOutput.reason`, given whether somebody gives way."""
        if preempts:
            return "kv-full"
        if self.is_empty:
            return "resume" if self.resume else "nothing"
        if not self.decodes.size:
            return "prefill"
        return "mixed" if self.prompts else "decode"

    def _take(self, num_rows: int, num_tokens: int) -> None:
        self.rows_left -= num_rows
        self.tokens_left -= num_tokens
