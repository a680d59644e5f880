"""Pages of a GPU's memory by the driver's virtual memory calls: one handle for each page.

    cuMemAddressReserve   addresses for a range, for good
    cuMemCreate           a page, when it is first mapped: until then torch may use the memory
    cuMemMap, cuMemSetAccess, cuMemUnmap   a page to an address, and away

Written from what the driver documents, and seen on an H200 (docs/gpu.md); a stand-in of the driver proves order and
arguments of the calls on the CPU. What is relied on: mapping gives no access before it is set; access can be set for
neighbouring mappings in one call; unmapping takes exactly what one call mapped, and does not wait for kernels, so that
the device is waited for before; a handle exports as a descriptor only if it was created for that.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from services.worker.memory.ranges import MappingError, PageHandle, PageId, VirtualMemory

_NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaError(OSError):
    """The driver refuses a call; nothing was changed.

    Args:
        function: that was called.
        code: its result.
    """

    def __init__(self, function: str, code: Any) -> None:
        super().__init__(f"{function}: {getattr(code, 'name', code)}")
        self.function = function
        self.is_memory_short = getattr(code, "name", "") == _NO_MEMORY


class CudaMemory(VirtualMemory):
    """A `VirtualMemory` of one GPU.

    Args:
        page_bytes: a multiple of the device's granularity, which is 2 MiB as a rule.
        num_pages: the budget.
        device: whose memory it is.
        driver: the module `cuda.bindings.driver`; None: import it.

    Raises:
        ValueError: sizes that are not possible on this device.
        CudaError: the driver refuses.
        ImportError: `driver` is None and the module is not installed.
    """

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device, driver: Any = None) -> None:
        super().__init__(page_bytes, num_pages, device)
        self._driver = _Driver(driver or importlib.import_module("cuda.bindings.driver"), device.index or 0)
        granularity = self._driver.granularity()
        if page_bytes % granularity:
            self._driver.close()
            raise ValueError(f"pages of {page_bytes} bytes are not a multiple of the device's {granularity}")
        self._handles: dict[PageId, Any] = {}

    def _reserve(self, num_bytes: int) -> int:
        return self._driver.reserve(num_bytes)

    def _export(self, page: PageId) -> PageHandle:
        return PageHandle(self._driver.export(self._handle(page)), 0)

    def _take_in(self, page: PageId, handle: PageHandle) -> None:
        """Have an exported page, whose size is the exporter's to say: the driver does not."""
        if handle.offset:
            raise MappingError("a page of a GPU fills its descriptor")
        self._handles[page] = self._driver.import_handle(handle.descriptor)

    def _forget(self, page: PageId) -> None:
        """Have a page no more; its memory stays for as long as another process has it."""
        self._driver.release(self._handles.pop(page))

    def _close(self) -> None:
        for reserved in self._ranges:
            reserved.clear()
        self._is_open = False
        for reserved in self._ranges:
            self._driver.free(reserved.address, reserved.num_bytes)
        for handle in self._handles.values():
            self._driver.release(handle)
        self._driver.close()

    def put(self, address: int, pages: Sequence[PageId]) -> None:
        """Map pages; see `VirtualMemory`."""
        size, done = self.page_bytes, 0
        try:
            for page in pages:
                self._driver.map(address + done * size, size, self._handle(page))
                done += 1
            self._driver.give_access(address, done * size)
        except CudaError:
            for place in range(done):
                self._driver.unmap(address + place * size, size)
            raise

    def take_away(self, address: int, pages: Sequence[PageId]) -> None:
        """Unmap pages when the device is done with them; see `VirtualMemory`."""
        size, done = self.page_bytes, 0
        self._driver.synchronize()
        try:
            for _ in pages:
                self._driver.unmap(address + done * size, size)
                done += 1
        except CudaError:
            if done:
                self.put(address, pages[:done])
            raise

    def _handle(self, page: PageId) -> Any:
        """Return a page's handle; its memory is taken the first time."""
        if page not in self._handles:
            self._handles[page] = self._driver.create(self.page_bytes)
        return self._handles[page]


class _Driver:
    """The driver's calls for one device; every one of them raises `CudaError` if it is refused.

    Args:
        driver: the module. Its functions return a tuple: the result code, then values.
        ordinal: of the device.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)  # the one that torch uses
        self._handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = ordinal
        self._properties.requestedHandleTypes = self._handle_type
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity(self) -> int:
        """Return of what mapped sizes and offsets must be multiples."""
        flags = self._driver.CUmemAllocationGranularity_flags
        found = self._call("cuMemGetAllocationGranularity", self._properties, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        return int(found)

    def reserve(self, num_bytes: int) -> int:
        """Return the first of so many addresses."""
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free(self, address: int, num_bytes: int) -> None:
        """Give reserved addresses back; nothing is mapped there."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Any:
        """Take memory, and return its handle."""
        return self._call("cuMemCreate", num_bytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Give memory back."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Map the whole of a handle."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def give_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write what is mapped."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap what one call mapped."""
        self._call("cuMemUnmap", address, num_bytes)

    def export(self, handle: Any) -> int:
        """Return a new descriptor of a handle."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._handle_type, 0))

    def import_handle(self, descriptor: int) -> Any:
        """Return a handle of what another process exported."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._handle_type)

    def synchronize(self) -> None:
        """Wait until the device has nothing to do, in whatever stream."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._call("cuCtxSynchronize")
        finally:
            self._call("cuCtxPopCurrent")

    def close(self) -> None:
        """Let go of the context, which stays torch's."""
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._driver, name)(*arguments)
        if int(result):
            raise CudaError(name, result)
        return values[0] if values else None
