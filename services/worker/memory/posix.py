"""Pages of main memory: a sealed memory file is the budget, and its pages are mapped into reserved addresses.

    file     | p0 | p1 | p2 | p3 |        memfd, sealed against growing and shrinking
    range    | p0 | .  | p2 | .  |        reserved: no access, no memory; mapped: MAP_SHARED | MAP_FIXED over it

The system gives a page its memory when it is first touched (with huge pages, when it is first mapped), and keeps it
then, wherever the page is mapped. A process that is forked shares the pages, it gets no copies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.memory.ranges import MappingError, PageHandle, PageId, VirtualMemory, runs

HUGE_PAGE_BYTES = 2 * 2**20
MAP_FIXED = 0x10
_PROT_NONE, _MAP_NORESERVE, _MADV_COLLAPSE = 0, 0x4000, 25
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
"""Flags of addresses without memory."""
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * (ctypes.c_int,)), ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PosixMemory(VirtualMemory):
    """A `VirtualMemory` of the CPU, on Linux.

    Args:
        page_bytes: a multiple of the system's pages (4 KiB).
        num_pages: the budget.
        huge: ask for huge pages of the system, for pages of a multiple of 2 MiB; all memory is taken when it is mapped.
            Where the system gives none, nothing is lost.

    Raises:
        ValueError: sizes that are not possible.
        OSError: the system refuses.
    """

    def __init__(self, page_bytes: int, num_pages: int, *, huge: bool = False) -> None:
        super().__init__(page_bytes, num_pages, torch.device("cpu"))
        unit = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
        if page_bytes % unit:
            raise ValueError(f"pages of {page_bytes} bytes are not a multiple of the system's {unit}")
        self._huge = huge
        self._taken: set[int] = set()
        """Own pages that were mapped once."""
        self._places: dict[PageId, tuple[_File, int]] = {}
        """Where an adopted page lies: file, and offset in it."""
        self._files: dict[tuple[int, int], _File] = {}
        """Of adopted pages, by device and inode: as many descriptors as there are files."""
        descriptor = os.memfd_create("sluice-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file = _File(descriptor)
        try:
            os.ftruncate(descriptor, page_bytes * num_pages)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(descriptor)
            raise

    def _reserve(self, num_bytes: int) -> int:
        """Reserve addresses, aligned to a page."""
        page_bytes = self.page_bytes
        begin = mmap_at(None, num_bytes + page_bytes, _PROT_NONE, RESERVED)
        address = -(-begin // page_bytes) * page_bytes
        munmap(begin, address - begin)
        munmap(address + num_bytes, begin + page_bytes - address)
        return address

    def _export(self, page: PageId) -> PageHandle:
        """Return a new descriptor of the file that holds a page."""
        file, offset = self._held(page)
        return PageHandle(os.dup(file.descriptor), offset)

    def _take_in(self, page: PageId, handle: PageHandle) -> None:
        """Have a page of a sealed file, where it begins on a border of pages.

        A file that ends before the page does or could become shorter is refused: whoever reads behind its end is
        killed.
        """
        found = os.fstat(handle.descriptor)
        if handle.offset % self.page_bytes or not 0 <= handle.offset <= found.st_size - self.page_bytes:
            raise MappingError(f"the file has no page of {self.page_bytes} bytes at {handle.offset}")
        if not _seals(handle.descriptor) & fcntl.F_SEAL_SHRINK:
            raise MappingError("the file is not sealed against shrinking")
        key = (found.st_dev, found.st_ino)
        if key not in self._files:
            self._files[key] = _File(os.dup(handle.descriptor))
        self._files[key].num_pages += 1
        self._places[page] = (self._files[key], handle.offset)

    def _forget(self, page: PageId) -> None:
        """Have a page no more. One of its own stays in the file, for whoever has it."""
        if page not in self._places:
            return
        file, _ = self._places.pop(page)
        file.num_pages -= 1
        if not file.num_pages:
            os.close(file.descriptor)
            self._files = {key: kept for key, kept in self._files.items() if kept is not file}

    def _close(self) -> None:
        self._is_open = False
        for reserved in self._ranges:
            munmap(reserved.address, reserved.num_bytes)
        for file in (self._file, *self._files.values()):
            os.close(file.descriptor)

    def put(self, address: int, pages: Sequence[PageId]) -> None:
        """Map pages; see `VirtualMemory`."""
        done = 0
        try:
            for first, count in self._runs(pages):
                self._put_run(address + done * self.page_bytes, first, count)
                done += count
        except OSError:
            self.take_away(address, pages)  # also where the system failed half-way
            raise

    def take_away(self, address: int, pages: Sequence[PageId]) -> None:
        """Make addresses reserved ones again; see `VirtualMemory`."""
        mmap_at(address, len(pages) * self.page_bytes, _PROT_NONE, RESERVED | MAP_FIXED)

    def _runs(self, pages: Sequence[PageId]) -> list[tuple[PageId, int]]:
        """Return the parts that lie side by side in one file: each is one call of the system, not one per page."""
        if self._places:
            return [(page, 1) for page in pages]
        return [(PageId(first), count) for first, count in runs(pages)]

    def _put_run(self, address: int, first: PageId, count: int) -> None:
        (file, offset), num_bytes = self._held(first), count * self.page_bytes
        mmap_at(address, num_bytes, _READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, file.descriptor, offset)
        if self._huge:
            self._take_huge(address, range(first, first + count))

    def _take_huge(self, address: int, pages: range) -> None:
        """Ask for huge pages for those of a run that are mapped for the first time; wherever they go, they stay huge.

        It is advice: without huge pages to give, nothing changes.
        """
        for first, count in runs([page for page in pages if page not in self._taken]):
            begin = address + (first - pages[0]) * self.page_bytes
            for place in range(begin, begin + count * self.page_bytes, HUGE_PAGE_BYTES):
                ctypes.c_uint8.from_address(place).value  # noqa: B018  an empty page would not be made huge
            _libc.madvise(begin, count * self.page_bytes, _MADV_COLLAPSE)
        self._taken.update(pages)

    def _held(self, page: PageId) -> tuple[_File, int]:
        """Return where a page lies."""
        return self._places.get(page) or (self._file, page * self.page_bytes)


@dataclass(slots=True, eq=False)
class _File:
    """A file that holds pages."""

    descriptor: int
    """Ours."""
    num_pages: int = 0
    """That were adopted from it."""


def mmap_at(
    address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int = -1, offset: int = 0
) -> int:
    """Call mmap.

    Raises:
        OSError: it refuses; ENOMEM also when a process has too many mappings (vm.max_map_count).
    """
    found: int | None = _libc.mmap(address, num_bytes, protection, flags, descriptor, offset)
    if found == _FAILED or found is None:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {num_bytes} bytes: {os.strerror(number)}")
    return found


def munmap(address: int, num_bytes: int) -> None:
    """Call munmap, unless there is nothing to unmap.

    Raises:
        OSError: it refuses.
    """
    if num_bytes and _libc.munmap(address, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, f"munmap of {num_bytes} bytes: {os.strerror(number)}")


def _seals(descriptor: int) -> int:
    """Return what a file is sealed against; nothing, if it is none of memory."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0
