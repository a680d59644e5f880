# ruff: noqa: N802, N815  the names are the driver's own
"""A stand-in for `cuda.bindings.driver`: its virtual memory calls over main memory, with the rules it documents.

A handle is a memory file. Mapping gives no access (a touch would end the process) before `cuMemSetAccess`; unmapping
takes exactly what one call mapped, and if it had access only after the context was waited for; memory that is released
while it is mapped stays until it is unmapped. `fail(name, after)` makes a later call fail as the driver would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from services.worker.memory.posix import MAP_FIXED, RESERVED, mmap_at, munmap

GRANULARITY = 16384
_mprotect = ctypes.CDLL(None).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass
class _Location:
    type: int = 0
    id: int = 0


@dataclass
class _Properties:
    type: int = 0
    location: _Location = field(default_factory=_Location)
    requestedHandleTypes: int = 0


@dataclass
class _Access:
    location: _Location = field(default_factory=_Location)
    flags: int = 0


DONE = (CUresult.CUDA_SUCCESS,)
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE,)
SHORT = (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)


class FakeDriver:
    """One device with so many bytes."""

    CUresult = CUresult
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationProp = _Properties
    CUmemAccessDesc = _Access

    def __init__(self, num_bytes: int = 2**24) -> None:
        self.num_bytes = num_bytes
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        """By address: size and handle."""
        self.handles: dict[int, tuple[int, int]] = {}
        """Handle to file and size."""
        self.accessible: set[int] = set()
        self.num_contexts = 0
        self._current: list[int] = []
        self._is_idle = False
        self._failing: dict[str, int] = {}
        self._next = 7

    def fail(self, name: str, after: int = 0) -> None:
        """Let a function fail, once, after so many calls of it that do not."""
        self._failing[name] = after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self._failing:
                if self._failing[name] == 0:
                    del self._failing[name]
                    return SHORT
                self._failing[name] -= 1
            if name not in ("cuMemUnmap", "cuCtxSynchronize", "cuCtxPopCurrent"):
                self._is_idle = False
            return found(*arguments)

        return called

    def cuInit(self, flags: int) -> Any:
        assert flags == 0
        return DONE

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (*DONE, 100 + ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.num_contexts += 1
        return (*DONE, device + 1000)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.num_contexts -= 1
        return DONE if device >= 100 else INVALID

    def cuCtxPushCurrent(self, context: int) -> Any:
        self._current.append(context)
        return DONE

    def cuCtxPopCurrent(self) -> Any:
        return (*DONE, self._current.pop())

    def cuCtxSynchronize(self) -> Any:
        if not self._current:
            return INVALID
        self._is_idle = True
        return DONE

    def cuMemGetAllocationGranularity(self, prop: _Properties, flags: int) -> Any:
        return (*DONE, GRANULARITY) if self._is_right(prop) and flags == 0 else INVALID

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        if size <= 0 or size % GRANULARITY or (alignment, address, flags) != (0, 0, 0):
            return INVALID
        begin = mmap_at(None, size, 0, RESERVED)
        self.reserved[begin] = size
        return (*DONE, begin)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        if self.reserved.get(address) != size or any(address <= at < address + size for at in self.mapped):
            return INVALID
        munmap(address, size)
        del self.reserved[address]
        return DONE

    def cuMemCreate(self, size: int, prop: _Properties, flags: int) -> Any:
        if size <= 0 or size % GRANULARITY or not self._is_right(prop) or flags:
            return INVALID
        if sum(held for _, held in self.handles.values()) + size > self.num_bytes:
            return SHORT
        file = os.memfd_create("fake-cuda")
        os.ftruncate(file, size)
        return (*DONE, self._handle(file))

    def cuMemRelease(self, handle: int) -> Any:
        if handle not in self.handles:
            return INVALID
        os.close(self.handles.pop(handle)[0])
        return DONE

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        if handle not in self.handles or self.handles[handle][1] != size or offset or flags:
            return INVALID
        if not any(base <= address and address + size <= base + length for base, length in self.reserved.items()):
            return INVALID
        if address % GRANULARITY % mmap.PAGESIZE or any(
            at < address + size and address < at + length for at, (length, _) in self.mapped.items()
        ):
            return INVALID
        mmap_at(address, size, 0, mmap.MAP_SHARED | MAP_FIXED, self.handles[handle][0])
        self.mapped[address] = (size, handle)
        return DONE

    def cuMemSetAccess(self, address: int, size: int, descriptions: list[_Access], count: int) -> Any:
        inside = {at: length for at, (length, _) in self.mapped.items() if address <= at < address + size}
        if len(descriptions) != count or count != 1 or sum(inside.values()) != size or size == 0:
            return INVALID
        if descriptions[0].location.type != 1 or descriptions[0].flags != 3:
            return INVALID
        _mprotect(address, size, 3)
        self.accessible.update(inside)
        return DONE

    def cuMemUnmap(self, address: int, size: int) -> Any:
        if address not in self.mapped or self.mapped[address][0] != size:
            return INVALID
        assert self._is_idle or address not in self.accessible, "pages were unmapped that kernels may be using"
        mmap_at(address, size, 0, RESERVED | MAP_FIXED)
        del self.mapped[address]
        self.accessible.discard(address)
        return DONE

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Any:
        if handle not in self.handles or kind != 1 or flags:
            return INVALID
        return (*DONE, os.dup(self.handles[handle][0]))

    def cuMemImportFromShareableHandle(self, file: int, kind: int) -> Any:
        return (*DONE, self._handle(os.dup(file))) if kind == 1 else INVALID

    def _handle(self, file: int) -> int:
        self._next += 1
        self.handles[self._next] = (file, os.fstat(file).st_size)
        return self._next

    def _is_right(self, prop: _Properties) -> bool:
        return (prop.type, prop.location.type, prop.requestedHandleTypes) == (1, 1, 1)
