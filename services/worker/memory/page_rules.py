"""Holds callers of every backend to the rules of mapping, before the system is asked.

CUDA refuses most of what breaks them, with an error number; `mmap` does not: it replaces what is mapped. So the rules
stand here, once, and a test on the CPU meets what a GPU would refuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from services.worker.memory.ranges import MappingError, PageId
from services.worker.memory.raw_tensor import tensor_at


class PageBook:
    """Which pages a memory has, and which of them are mapped.

    Args:
        page_bytes: size of a page.
        num_pages: pages of its own.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        if page_bytes <= 0 or num_pages <= 0:
            raise ValueError(f"{num_pages} pages of {page_bytes} bytes are no memory")
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.is_open = True
        self._adopted: set[PageId] = set()
        self._handed_over: set[PageId] = set()
        """Of its own, which are another memory's now."""
        self._next_adopted = num_pages
        self.mapped: set[PageId] = set()

    def check_open(self) -> None:
        """Raise `MappingError` if the memory is closed."""
        if not self.is_open:
            raise MappingError("the memory is closed")

    def check_known(self, page: PageId) -> None:
        """Raise `MappingError` if the memory is closed or has no such page."""
        self.check_open()
        is_own = 0 <= page < self.num_pages and page not in self._handed_over
        if not is_own and page not in self._adopted:
            raise MappingError(f"page {page} is not one of this memory's")

    def check_free(self, pages: Sequence[PageId]) -> None:
        """Raise `MappingError` if a page is not known, named twice or mapped somewhere."""
        for page in pages:
            self.check_known(page)
            if page in self.mapped:
                raise MappingError(f"page {page} is mapped already")
        if len(set(pages)) != len(pages):
            raise MappingError("a page cannot be mapped at two places")

    def adopt(self) -> PageId:
        """Return a number for a page that comes from another memory."""
        self.check_open()
        page = PageId(self._next_adopted)
        self._next_adopted += 1
        self._adopted.add(page)
        return page

    def disown(self, page: PageId) -> None:
        """Forget an adopted page.

        Raises:
            MappingError: it was not adopted, or is mapped.
        """
        self.check_open()
        if page not in self._adopted:
            raise MappingError(f"page {page} was not adopted")
        self.check_free([page])
        self._adopted.remove(page)

    def hand_over(self, page: PageId) -> None:
        """Forget a page of its own.

        Raises:
            MappingError: it is none, or is mapped.
        """
        self.check_free([page])
        if page in self._adopted:
            raise MappingError(f"page {page} was adopted")
        self._handed_over.add(page)


class CheckedRange(ABC):
    """A `VirtualRange` that keeps the rules; a backend adds how pages are mapped.

    Args:
        address: where it begins.
        num_bytes: reserved; a whole number of pages.
        book: of the memory that it belongs to.
        device: of the memory.
    """

    def __init__(self, address: int, num_bytes: int, book: PageBook, device: torch.device) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._book = book
        self._device = device
        self._tensor: torch.Tensor | None = None
        self._pages: dict[int, PageId] = {}
        """By place in the range, counted in pages."""

    def map(self, offset: int, page: PageId) -> None:
        """Back one page of addresses; see `VirtualRange`."""
        self.map_run(offset, [page])

    def unmap(self, offset: int) -> PageId:
        """Take one page away; see `VirtualRange`."""
        return self.unmap_run(offset, 1)[0]

    def map_run(self, offset: int, pages: Sequence[PageId]) -> None:
        """Back consecutive addresses; see `VirtualRange`."""
        first = self._place(offset, len(pages))
        for place in range(first, first + len(pages)):
            if place in self._pages:
                raise MappingError(f"page {self._pages[place]} is mapped at offset {place * self._book.page_bytes}")
        self._book.check_free(pages)
        self._map(self.address + offset, pages)
        self._pages.update(zip(range(first, first + len(pages)), pages, strict=True))
        self._book.mapped.update(pages)

    def unmap_run(self, offset: int, count: int) -> list[PageId]:
        """Take consecutive pages away; see `VirtualRange`."""
        places = range(first := self._place(offset, count), first + count)
        for place in places:
            if place not in self._pages:
                raise MappingError(f"nothing is mapped at offset {place * self._book.page_bytes}")
        pages = [self._pages[place] for place in places]
        self._unmap(self.address + offset, pages)
        for place in places:
            del self._pages[place]
        self._book.mapped.difference_update(pages)
        return pages

    def page_at(self, offset: int) -> PageId | None:
        """Return the page that is mapped at an offset, if one is."""
        return self._pages.get(self._place(offset, 1))

    def tensor(self) -> torch.Tensor:
        """Return the range as a tensor, always the same; see `VirtualRange`."""
        self._book.check_open()
        if self._tensor is None:
            self._tensor = tensor_at(self.address, self.num_bytes, self._device)
        return self._tensor

    def clear(self) -> None:
        """Unmap all that is mapped."""
        page_bytes = self._book.page_bytes
        for first, count in runs(sorted(self._pages)):
            self.unmap_run(first * page_bytes, count)

    @abstractmethod
    def _map(self, address: int, pages: Sequence[PageId]) -> None:
        """Map pages from an address on: all or none."""

    @abstractmethod
    def _unmap(self, address: int, pages: Sequence[PageId]) -> None:
        """Unmap the pages that lie from an address on: all or none."""

    def _place(self, offset: int, count: int) -> int:
        self._book.check_open()
        place, rest = divmod(offset, self._book.page_bytes)
        if rest:
            raise MappingError(f"offset {offset} is not a multiple of a page of {self._book.page_bytes} bytes")
        if count < 1 or not 0 <= place <= self.num_bytes // self._book.page_bytes - count:
            raise MappingError(f"{count} pages from offset {offset} on are not in a range of {self.num_bytes} bytes")
        return place


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a sequence into parts in which each number is one more than that before it; yield first number and length."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[begin], place - begin
            begin = place
