"""Readers that do not read: when what they take says that nobody is there. Pure numbers, no sockets."""

from __future__ import annotations

from dataclasses import dataclass


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

    __slots__ = ("_moved_s", "_num_taken")

    def __init__(self, now_s: float) -> None:
        self._num_taken = 0
        self._moved_s = now_s
        """When it was last seen to have taken something, or to have nothing to take."""

    def is_stalled(self, num_taken: int, num_unsent: int, now_s: float, stall_s: float) -> bool:
        """Return whether the reader has taken nothing for too long while something waited for it.

        Args:
            num_taken: bytes that it took since the beginning.
            num_unsent: bytes that wait for it.
            now_s: the event loop's clock.
            stall_s: how long it may take nothing; who takes little is slow, but reads.
        """
        if num_unsent == 0 or num_taken > self._num_taken:
            self._moved_s = now_s
        self._num_taken = num_taken
        return now_s - self._moved_s >= stall_s
