"""Pages of one worker that another on the same machine reads: they are lent by descriptor, and stay where they are.

    owner     LentPages       address of KV ──► page, offset │ descriptor, for reading only
    reader    BorrowedPages   page, offset  ──► bytes, at an address of its own

    its memory   p0 p1 p2 p3          lent: p1, p3
    window       .  p1 .  p3          the reader's addresses: a place for each page of the owner

The rules are those of `services/worker/memory/ranges.py`, so both work with pages of main memory and of a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import torch

from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import MappingError, PageHandle, PageId, VirtualMemory, VirtualRange
from services.worker.transfer.fd_frames import Loan, Place
from services.worker.transfer.frames import FrameError

MAX_WINDOW_BYTES: Final = 2**45
"""Most addresses that are reserved for one owner's pages."""


class LentPages:
    """What this worker may lend: the pages of its memory that are mapped at some ranges. Any thread.

    Args:
        memory: whose own pages are lent; adopted ones are not.
        ranges: of that memory, where there are bytes to move.
    """

    def __init__(self, memory: VirtualMemory, ranges: Iterable[VirtualRange]) -> None:
        self._memory = memory
        self._page_bytes, self._num_pages = memory.page_bytes, memory.num_pages
        self._ranges = sorted(ranges, key=lambda reserved: reserved.address)
        self._begins = [reserved.address for reserved in self._ranges]
        self._lock = threading.Lock()
        self._watchers: list[Callable[[Sequence[PageId]], None]] = []
        memory.watch(self._tell)

    def watch(self, on_unmapped: Callable[[Sequence[PageId]], None]) -> None:
        """Have it called with pages that were unmapped, in whatever thread; until `forget`."""
        with self._lock:
            self._watchers.append(on_unmapped)

    def forget(self, on_unmapped: Callable[[Sequence[PageId]], None]) -> None:
        """Call it no more. Idempotent."""
        with self._lock, suppress(ValueError):
            self._watchers.remove(on_unmapped)

    def find(self, views: Sequence[memoryview]) -> list[Place] | None:
        """Return where some bytes lie, in order; None unless all of them lie in pages that can be lent.

        Args:
            views: of bytes, none empty.
        """
        places: list[Place] = []
        for view in views:
            if not self._find(_address(view), len(view), places):
                return None
        return places

    def loan(self, page: PageId) -> tuple[Loan, PageHandle]:
        """Return what a peer is told of a page, and its descriptor, which the caller closes.

        Raises:
            MappingError: the memory is closed.
            OSError: the system refuses.
        """
        handle = self._memory.lend(page)
        return Loan(self._page_bytes, handle.offset, self._num_pages, page), handle

    def _find(self, address: int, num_bytes: int, places: list[Place]) -> bool:
        """Add where consecutive bytes lie to the places; return whether that is known."""
        index = bisect_right(self._begins, address) - 1
        if index < 0:
            return False
        reserved, page_bytes = self._ranges[index], self._page_bytes
        offset = address - reserved.address
        if offset + num_bytes > reserved.num_bytes:
            return False
        while num_bytes:
            within = offset % page_bytes
            page = reserved.page_at(offset - within)
            if page is None or page >= self._num_pages:
                return False
            length = min(page_bytes - within, num_bytes)
            last = places[-1] if places else None
            if last is not None and (last.page, last.offset + last.length) == (page, within):
                places[-1] = Place(page, last.offset, last.length + length)
            else:
                places.append(Place(page, within, length))
            offset, num_bytes = offset + length, num_bytes - length
        return True

    def _tell(self, pages: Sequence[PageId]) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for on_unmapped in watchers:
            on_unmapped(pages)


class BorrowedPages:
    """Pages of one peer, mapped here. Used by one thread.

    Args:
        open_memory: returns a memory with pages of so many bytes, to map them with; its own pages are not used.
    """

    def __init__(self, open_memory: Callable[[int], VirtualMemory]) -> None:
        self._open_memory = open_memory
        self._memory: VirtualMemory | None = None
        self._window: VirtualRange | None = None
        self._bytes: memoryview | None = None
        """The window, where it is of main memory."""
        self._num_pages = self._page_bytes = 0
        """Of the owner's memory."""
        self._pages: dict[PageId, PageId] = {}
        """The owner's number of a page, and that of the memory here."""

    @property
    def num_pages(self) -> int:
        """Pages that are mapped."""
        return len(self._pages)

    def views(self, places: Iterable[Place]) -> list[memoryview]:
        """Return the bytes at some places, which are only read, on the host: where they lie, or copies from a GPU.

        Raises:
            FrameError: nothing is lent there.
        """
        if self._bytes is None:
            return [self.tensor(place).cpu().numpy().data for place in places]
        return [self._bytes[(begin := self._begin(place)) : begin + place.length] for place in places]

    def take(self, loan: Loan, descriptor: int) -> None:
        """Map a page that is lent; the descriptor stays the caller's.

        Raises:
            FrameError: the descriptor is not of such a page, or the loan does not fit those before it.
        """
        if loan.page in self._pages:
            raise FrameError(f"page {loan.page} is lent already")
        try:
            memory, window = self._opened(loan)
            page = memory.adopt(PageHandle(descriptor, loan.offset))
            try:
                window.map(loan.page * memory.page_bytes, page)
            except (MappingError, OSError, MemoryError):
                memory.disown(page)
                raise
        except (MappingError, OSError, MemoryError, ValueError) as error:
            raise FrameError(f"page {loan.page} cannot be borrowed: {error}") from error
        self._pages[loan.page] = page

    def give_back(self, pages: Iterable[PageId]) -> None:
        """Unmap pages; they may be lent again.

        Raises:
            FrameError: one is not lent.
        """
        for page in pages:
            if page not in self._pages or self._memory is None or self._window is None:
                raise FrameError(f"page {page} is taken back and was not lent")
            self._window.unmap(page * self._memory.page_bytes)
            self._memory.disown(self._pages.pop(page))

    def tensor(self, place: Place) -> torch.Tensor:
        """Return [length] uint8, the bytes at a place, which are only read; valid until the page is given back.

        Raises:
            FrameError: nothing is lent there.
        """
        begin = self._begin(place)
        assert self._window is not None, "where a page is lent there is a window"
        return self._window.tensor()[begin : begin + place.length]

    def _begin(self, place: Place) -> int:
        """Return where in the window a place begins."""
        if place.page not in self._pages:
            raise FrameError(f"page {place.page} was not lent")
        if place.offset + place.length > self._page_bytes:
            raise FrameError(f"a place in page {place.page} goes over its end")
        return place.page * self._page_bytes + place.offset

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._pages.clear()
        self._bytes = None
        if self._memory is not None:
            self._memory.close()

    def _opened(self, loan: Loan) -> tuple[VirtualMemory, VirtualRange]:
        """Return memory and window, which the first loan opens."""
        if self._memory is None or self._window is None:
            if loan.num_pages * loan.page_bytes > MAX_WINDOW_BYTES:
                raise MappingError(f"a window of {loan.num_pages} pages of {loan.page_bytes} bytes")
            self._memory = self._open_memory(loan.page_bytes)
            self._window = self._memory.reserve(loan.num_pages * loan.page_bytes)
            self._num_pages, self._page_bytes = loan.num_pages, loan.page_bytes
            seen = self._window.tensor()
            self._bytes = seen.numpy().data if seen.device.type == "cpu" else None
        if (loan.page_bytes, loan.num_pages) != (self._page_bytes, self._num_pages):
            raise MappingError("loans of one link are of one memory")
        return self._memory, self._window


def _address(view: memoryview) -> int:
    if view.readonly:
        return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def main_memory(page_bytes: int) -> VirtualMemory:
    """Return a memory that maps borrowed pages of main memory."""
    return PosixMemory(page_bytes, num_pages=1)
