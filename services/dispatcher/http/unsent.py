"""Readers that do not read: when a connection's unsent bytes say that nobody takes them. Pure numbers, no sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FULL_BUFFER_BYTES: Final = 64 * 1024
"""Unsent bytes from which a reader counts as not keeping up."""


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """See `DispatcherSettings.write_limit_s` and `max_unsent`."""

    stall_s: float
    max_bytes: int


class Reading:
    """How one reader takes what is written to it.

    Args:
        now_s: when it began, on the event loop's clock.
    """

    __slots__ = ("_low_s", "_moved_s", "_num_taken")

    def __init__(self, now_s: float) -> None:
        self._num_taken = 0
        self._moved_s = now_s
        """When it last took something, or had nothing to take."""
        self._low_s = now_s
        """When little was waiting for the last time."""

    def is_stalled(self, num_written: int, num_unsent: int, now_s: float, limits: ReaderLimits) -> bool:
        """Return whether the reader is to be cut.

        Args:
            num_written: bytes that were written for it since the beginning.
            num_unsent: bytes of these (and of what was written before the beginning) that wait.
            now_s: the event loop's clock.
            limits: how long it may take nothing, or leave a full buffer; how much may wait at all.
        """
        num_taken = num_written - num_unsent
        if num_unsent == 0 or num_taken > self._num_taken:
            self._moved_s = now_s
        self._num_taken = num_taken
        if num_unsent < FULL_BUFFER_BYTES:
            self._low_s = now_s
        return num_unsent > limits.max_bytes or now_s - min(self._moved_s, self._low_s) >= limits.stall_s
