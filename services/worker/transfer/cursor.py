"""A place in a list of buffers, for gathering what is sent and scattering what is received without copying it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from services.worker.transfer.link import Buffer

MAX_VIEWS: Final = 512
"""Most views at once; half of what one system call takes."""
_WASTE: Final = memoryview(bytearray(256 * 1024))
"""Where bytes go that nobody wants; shared by all, never read."""


class Cursor:
    """A list of buffers as one run of bytes, and how far one has come in it."""

    def __init__(self, parts: Sequence[Buffer], *, writable: bool = False) -> None:
        """Begin at the first byte.

        Args:
            parts: contiguous buffers; they are not copied.
            writable: they will be written to.

        Raises:
            ValueError: a part is not contiguous, or read-only where it has to be written to.
        """
        self._parts: list[memoryview] = []
        for part in parts:
            view = memoryview(part)
            if not view.c_contiguous or (writable and view.readonly):
                raise ValueError("a buffer has to be contiguous" + (" and writable" if writable else ""))
            if view.nbytes:
                self._parts.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        self.total = sum(map(len, self._parts))
        """Bytes of all parts."""
        self.left = self.total
        """Bytes from here to the end."""
        self._index = 0
        self._offset = 0

    @classmethod
    def to_waste(cls, num_bytes: int) -> Cursor:
        """Return a place for as many bytes that nobody will read."""
        count, rest = divmod(num_bytes, len(_WASTE))
        return cls([*repeat(_WASTE, count), _WASTE[:rest]])

    def peek(self, num_bytes: int, max_views: int = MAX_VIEWS) -> list[memoryview]:
        """Return at most so many of the next bytes, in at most so many views."""
        views: list[memoryview] = []
        index, offset = self._index, self._offset
        while num_bytes > 0 and index < len(self._parts) and len(views) < max_views:
            part = self._parts[index]
            size = min(len(part) - offset, num_bytes)
            views.append(part[offset : offset + size] if size < len(part) else part)
            num_bytes -= size
            index, offset = index + 1, 0
        return views

    def advance(self, num_bytes: int) -> None:
        """Go on by so many bytes."""
        assert 0 <= num_bytes <= self.left, f"{num_bytes} of {self.left} bytes that are left"
        self.left -= num_bytes
        self._offset += num_bytes
        while self._index < len(self._parts) and self._offset >= len(self._parts[self._index]):
            self._offset -= len(self._parts[self._index])
            self._index += 1

    def take(self, num_bytes: int) -> list[memoryview]:
        """Return the next bytes, at most so many, and go on behind them."""
        views: list[memoryview] = []
        while num_bytes > 0 and self.left:
            some = self.peek(num_bytes)
            size = sum(map(len, some))
            self.advance(size)
            num_bytes -= size
            views += some
        return views
