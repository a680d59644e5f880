"""Pages of physical memory, and ranges of addresses into which they are mapped: what every backend offers.

    pages    p0 p1 p2 p3 p4 p5            `num_pages` of `page_bytes` each: the budget, which nothing exceeds
    range    | p1 | p4 | p0 | .. | .. |   reserved at one address for good; unmapped parts must not be touched
             ^ address of the tensor

The rules are those of CUDA's virtual memory, and both backends (`posix.py`, `cuda.py`) hold callers to them: a page is
mapped whole, at one place at a time, where nothing is mapped yet, and unmapped whole. What a page holds stays in it
while it moves from place to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol

if TYPE_CHECKING:
    import torch

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


class VirtualRange(Protocol):
    """Consecutive addresses of one memory, some of them backed by pages. Offsets are multiples of a page's bytes."""

    def map(self, offset: int, page: PageId) -> None:
        """Back one page of addresses. As `map_run`."""
        ...

    def unmap(self, offset: int) -> PageId:
        """Take one page away, and return it. As `unmap_run`."""
        ...

    def map_run(self, offset: int, pages: Sequence[PageId]) -> None:
        """Back consecutive addresses by pages, in this order: all of them, or none if one fails.

        Raises:
            MappingError: the offset is not a multiple of a page or lies outside, something is mapped there, a page is
                not known, named twice or mapped elsewhere, or the memory is closed.
            OSError, MemoryError: the system refuses.
        """
        ...

    def unmap_run(self, offset: int, count: int) -> list[PageId]:
        """Take consecutive pages away, and return them in order: all of them, or none if one fails.

        What runs on the device has to be done with them; a GPU is waited for.

        Raises:
            MappingError: the offset is not a multiple of a page or lies outside, some of it is not mapped, or the
                memory is closed.
            OSError, MemoryError: the system refuses.
        """
        ...

    def page_at(self, offset: int) -> PageId | None:
        """Return the page that is mapped at an offset, if one is."""
        ...

    def tensor(self) -> torch.Tensor:
        """Return [num_bytes] uint8 over the whole range. Valid until the memory is closed; does not keep it open.

        Whoever touches an address that is not mapped dies: SIGSEGV on the CPU, an illegal access on a GPU.
        """
        ...


class VirtualMemory(Protocol):
    """A budget of pages of one device, and ranges to map them into. Used by one thread at a time."""

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of its own."""
        ...

    def reserve(self, num_bytes: int) -> VirtualRange:
        """Reserve addresses for so many bytes, rounded up to pages. Takes no memory.

        Raises:
            MappingError: less than one byte, or the memory is closed.
            OSError, MemoryError: the system refuses.
        """
        ...

    def export(self, page: PageId) -> PageHandle:
        """Return a descriptor by which another process can adopt a page. Both then see the same bytes."""
        ...

    def adopt(self, handle: PageHandle) -> PageId:
        """Take in a page that another memory of the same page size exported; the descriptor may be closed then.

        Raises:
            MappingError: the descriptor has no such page, or its owner could take it away from under a reader.
            OSError: the system refuses.
        """
        ...

    def disown(self, page: PageId) -> None:
        """Forget an adopted page, which is mapped nowhere."""
        ...

    def hand_over(self, page: PageId) -> None:
        """Forget a page for good that another memory has adopted, an own or an adopted one, which is mapped nowhere.

        Raises:
            MappingError: it is not known, or mapped.
        """
        ...

    def close(self) -> None:
        """Unmap everything and give back all pages and addresses; tensors must not be touched any more. Idempotent."""
        ...
