"""Rows that go on at another worker, each as soon as it is in no batch and no copy; from then on it comes into none.

The bit `Hold.LEAVING`; what steps are under way bring a row is still delivered. The engine lets them leave whenever a
batch or a copy is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.worker.sequences.table import Hold, SequenceTable

_NOT_YET: Final = Hold.CANCELLED | Hold.ENDED | Hold.IN_FLIGHT | Hold.SWAPPING


class LeavingRows:
    """Of one engine; the only writer of `Hold.LEAVING`.

    Args:
        table: of the rows.
        release: ends a row, to go on at the worker of this name.
    """

    def __init__(self, table: SequenceTable, release: Callable[[int, str], None]) -> None:
        self._table = table
        self._release = release
        self._rows: dict[int, tuple[str, Callable[[int | None], None]]] = {}
        """Where each goes, and who is told once it has gone, or does not go."""

    @property
    def rows(self) -> list[int]:
        """Rows that are about to be released."""
        return list(self._rows)

    def begin(self, row: int, moved_to: str, on_over: Callable[[int | None], None]) -> bool:
        """Release a row as soon as it may leave.

        Args:
            row: goes on at another worker.
            moved_to: at which one.
            on_over: told once it is released, with its tokens whose KV was computed; None: it has ended, or stays.

        Returns:
            False if it leaves already, for whoever came first; nobody is told then.
        """
        if row in self._rows:
            return False
        self._table.hold[row] |= Hold.LEAVING
        self._rows[row] = moved_to, on_over
        self.go_on()
        return True

    def stay(self, row: int) -> None:
        """Let a row that was to leave go on here. Idempotent; the caller wakes the step loop."""
        if row in self._rows:
            self._table.hold[row] &= ~Hold.LEAVING
            self._rows.pop(row)[1](None)

    def go_on(self) -> None:
        """Release those that may leave by now."""
        for row in [row for row in self._rows if not self._table.hold[row] & _NOT_YET]:
            (moved_to, on_over), num_computed = self._rows.pop(row), int(self._table.num_computed[row])
            self._release(row, moved_to)
            on_over(num_computed)
