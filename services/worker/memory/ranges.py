"""Pages of physical memory, and ranges of addresses into which they are mapped: what every backend offers.

    pages    p0 p1 p2 p3 p4 p5            `num_pages` of `page_bytes` each: the budget, which nothing exceeds
    range    | p1 | p4 | p0 | .. | .. |   reserved at one address for good; unmapped parts must not be touched
             ^ address of the tensor

The rules are those of CUDA's virtual memory: a page is mapped whole, at one place at a time, where nothing is mapped
yet, and unmapped whole. What a page holds stays in it while it moves from place to place.

Callers are held to the rules before the system is asked. CUDA refuses most of what breaks them, with an error number;
`mmap` does not: it replaces what is mapped. So the rules stand here, once, and a test on the CPU meets what a GPU would
refuse. A backend (`posix.py`, `cuda.py`) adds how the system does it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NewType

import torch

from services.worker.memory.raw_tensor import tensor_at

PageId = NewType("PageId", int)
"""A page of one `VirtualMemory`: 0 to num_pages - 1, above that those that were adopted."""


class MappingError(Exception):
    """A rule of mapping would have been broken; nothing was changed."""


class PageHandle(NamedTuple):
    """A page on its way to another process of the same machine; the descriptor travels by SCM_RIGHTS."""

    descriptor: int
    """Of a file; whoever has it closes it."""
    offset: int
    """Where in the file the page begins, in bytes."""


class VirtualRange:
    """Consecutive addresses of one memory, some of them backed by pages. Offsets are multiples of a page's bytes.

    Args:
        address: where it begins.
        num_bytes: reserved; a whole number of pages.
        memory: that it belongs to.
    """

    def __init__(self, address: int, num_bytes: int, memory: VirtualMemory) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._memory = memory
        self._tensor: torch.Tensor | None = None
        self._pages: dict[int, PageId] = {}
        """By place in the range, counted in pages."""

    def map_run(self, offset: int, pages: Sequence[PageId]) -> None:
        """Back consecutive addresses by pages, in this order: all of them, or none if one fails.

        Raises:
            MappingError: the offset is not a multiple of a page or lies outside, something is mapped there, a page is
                not known, named twice or mapped elsewhere, or the memory is closed.
            OSError, MemoryError: the system refuses.
        """
        places = self._places(offset, len(pages))
        for place in places:
            if place in self._pages:
                raise MappingError(f"page {self._pages[place]} is mapped at offset {place * self._memory.page_bytes}")
        self._memory.check_free(pages)
        self._memory.put(self.address + offset, pages)
        self._pages.update(zip(places, pages, strict=True))
        self._memory.mapped.update(pages)

    def unmap_run(self, offset: int, count: int) -> list[PageId]:
        """Take consecutive pages away, and return them in order: all of them, or none if one fails.

        What runs on the device has to be done with them; a GPU is waited for.

        Raises:
            MappingError: the offset is not a multiple of a page or lies outside, some of it is not mapped, or the
                memory is closed.
            OSError, MemoryError: the system refuses.
        """
        places = self._places(offset, count)
        for place in places:
            if place not in self._pages:
                raise MappingError(f"nothing is mapped at offset {place * self._memory.page_bytes}")
        pages = [self._pages[place] for place in places]
        self._memory.take_away(self.address + offset, pages)
        for place in places:
            del self._pages[place]
        self._memory.mapped.difference_update(pages)
        return pages

    def page_at(self, offset: int) -> PageId | None:
        """Return the page that is mapped at an offset, if one is."""
        return self._pages.get(self._places(offset, 1)[0])

    def tensor(self) -> torch.Tensor:
        """Return [num_bytes] uint8 over the whole range, always the same tensor.

        Valid until the memory is closed; does not keep it open. Whoever touches an address that is not mapped dies:
        SIGSEGV on the CPU, an illegal access on a GPU.
        """
        self._memory.check_open()
        if self._tensor is None:
            self._tensor = tensor_at(self.address, self.num_bytes, self._memory.device)
        return self._tensor

    def clear(self) -> None:
        """Unmap all that is mapped."""
        for first, count in runs(sorted(self._pages)):
            self.unmap_run(first * self._memory.page_bytes, count)

    def _places(self, offset: int, count: int) -> range:
        """Return the places of so many pages from an offset on, counted in pages."""
        self._memory.check_open()
        page_bytes = self._memory.page_bytes
        place, rest = divmod(offset, page_bytes)
        if rest:
            raise MappingError(f"offset {offset} is not a multiple of a page of {page_bytes} bytes")
        if count < 1 or not 0 <= place <= self.num_bytes // page_bytes - count:
            raise MappingError(f"{count} pages from offset {offset} on are not in a range of {self.num_bytes} bytes")
        return range(place, place + count)


class VirtualMemory(ABC):
    """A budget of pages of one device, and ranges to map them into. Used by one thread at a time.

    Args:
        page_bytes: size of a page.
        num_pages: pages of its own: the budget.
        device: whose memory it is.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device) -> None:
        if page_bytes <= 0 or num_pages <= 0:
            raise ValueError(f"{num_pages} pages of {page_bytes} bytes are no memory")
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.device = device
        self.mapped: set[PageId] = set()
        self._is_open = True
        self._ranges: list[VirtualRange] = []
        self._next_adopted = num_pages
        self._adopted: set[PageId] = set()
        self._handed_over: set[PageId] = set()
        """Of its own, which are another memory's now."""

    def reserve(self, num_bytes: int) -> VirtualRange:
        """Reserve addresses for so many bytes, rounded up to pages. Takes no memory.

        Raises:
            MappingError: less than one byte, or the memory is closed.
            OSError, MemoryError: the system refuses.
        """
        self.check_open()
        if num_bytes < 1:
            raise MappingError(f"a range of {num_bytes} bytes cannot be reserved")
        num_bytes = -(-num_bytes // self.page_bytes) * self.page_bytes
        self._ranges.append(VirtualRange(self._reserve(num_bytes), num_bytes, self))
        return self._ranges[-1]

    def export(self, page: PageId) -> PageHandle:
        """Return a new descriptor by which another process can adopt a page. Both then see the same bytes."""
        self._check_known(page)
        return self._export(page)

    def adopt(self, handle: PageHandle) -> PageId:
        """Take in a page that another memory of the same page size exported; the descriptor may be closed then.

        Raises:
            MappingError: the descriptor has no such page, or its owner could take it away from under a reader.
            OSError: the system refuses.
        """
        self.check_open()
        page = PageId(self._next_adopted)
        self._take_in(page, handle)
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
        self._forget(page)

    def hand_over(self, page: PageId) -> None:
        """Forget a page for good that another memory has adopted, an own or an adopted one, which is mapped nowhere.

        Raises:
            MappingError: it is not known, or mapped.
        """
        if page >= self.num_pages:
            self.disown(page)
            return
        self.check_free([page])
        self._handed_over.add(page)
        self._forget(page)

    def close(self) -> None:
        """Unmap everything and give back all pages and addresses; tensors must not be touched any more. Idempotent."""
        if self._is_open:
            self._close()

    def check_open(self) -> None:
        """Raise `MappingError` if the memory is closed."""
        if not self._is_open:
            raise MappingError("the memory is closed")

    def check_free(self, pages: Sequence[PageId]) -> None:
        """Raise `MappingError` if a page is not known, named twice or mapped somewhere."""
        for page in pages:
            self._check_known(page)
            if page in self.mapped:
                raise MappingError(f"page {page} is mapped already")
        if len(set(pages)) != len(pages):
            raise MappingError("a page cannot be mapped at two places")

    def _check_known(self, page: PageId) -> None:
        self.check_open()
        is_own = 0 <= page < self.num_pages and page not in self._handed_over
        if not is_own and page not in self._adopted:
            raise MappingError(f"page {page} is not one of this memory's")

    @abstractmethod
    def put(self, address: int, pages: Sequence[PageId]) -> None:
        """Map pages that are known to be free from an address on that is known to be reserved: all or none."""

    @abstractmethod
    def take_away(self, address: int, pages: Sequence[PageId]) -> None:
        """Unmap the pages that lie from an address on: all or none."""

    @abstractmethod
    def _reserve(self, num_bytes: int) -> int:
        """Return the first of so many addresses."""

    @abstractmethod
    def _export(self, page: PageId) -> PageHandle:
        """Return a new descriptor of a page that is known."""

    @abstractmethod
    def _take_in(self, page: PageId, handle: PageHandle) -> None:
        """Have an exported page under a number."""

    @abstractmethod
    def _forget(self, page: PageId) -> None:
        """Have a page no more, an own or an adopted one."""

    @abstractmethod
    def _close(self) -> None:
        """Unmap everything, be closed, and give all back."""


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a sequence into parts in which each number is one more than that before it; yield first number and length."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[begin], place - begin
            begin = place
