"""After a failed step: halves of its batch, until the guilty row stands alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32, Rows

MAX_LONE_FAILURES = 2
"""A row that fails this often in a step of its own is guilty."""


@dataclass(frozen=True, slots=True)
class RetryGroup:
    """Rows to try again together, with the tokens that the failed step was to compute."""

    rows: Rows
    num_tokens: I32

    def select(self, chosen: NDArray[np.bool_]) -> RetryGroup:
        """Return the group of the chosen rows."""
        return RetryGroup(self.rows[chosen], self.num_tokens[chosen])


class RetryQueue:
    """Groups that wait to be tried again, and how often each row failed alone."""

    def __init__(self) -> None:
        self._groups: deque[RetryGroup] = deque()
        self._lone_failures: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def pop(self) -> RetryGroup:
        """Take the next group."""
        return self._groups.popleft()

    def discard(self, row: int) -> None:
        """Forget a row that has ended."""
        self._lone_failures.pop(row, None)
        groups = (group.select(group.rows != row) for group in self._groups)
        self._groups = deque(group for group in groups if group.rows.size)

    def succeeded(self, rows: Iterable[int]) -> None:
        """Clear the rows of a step that went well of any suspicion."""
        for row in rows if self._lone_failures else ():
            self._lone_failures.pop(row, None)

    def failed(self, group: RetryGroup, guilty: NDArray[np.bool_]) -> list[int]:
        """Queue the rows of a failed step for their next try and return those that have none left.

        A group without a known culprit is halved. Known culprits are tried alone, after the others.

        Args:
            group: the failed step's rows that go on.
            guilty: [n] rows that the executor blames.
        """
        size = int(group.rows.size)
        if size == 1:
            row = int(group.rows[0])
            self._lone_failures[row] = self._lone_failures.get(row, 0) + 1
            if self._lone_failures[row] >= MAX_LONE_FAILURES:
                return [row]
            parts = [group]
        elif guilty.any():
            parts = [group.select(~guilty), *(group.select(np.arange(size) == i) for i in np.flatnonzero(guilty))]
        else:
            first = np.arange(size) < size // 2
            parts = [group.select(first), group.select(~first)]
        self._groups.extendleft(part for part in reversed(parts) if part.rows.size)
        return []

    @property
    def rows(self) -> list[int]:
        """Rows that wait to be tried again."""
        return [row for group in self._groups for row in group.rows.tolist()]
