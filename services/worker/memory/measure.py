"""How much memory an action takes at its peak, beyond what was taken before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""
_LARGE_BYTES: Final = 128 * 1024
"""What is larger is a tensor: one that is mapped by itself is gone when it is freed."""
_MAX_LARGE_BYTES: Final = 32 * 2**20
"""To which glibc raises that bound by itself as tensors are freed: then most come from memory that is kept."""


def peak_bytes(device: torch.device, action: Callable[[], None]) -> int | None:
    """Run the action and return its peak of memory beyond the start, in bytes.

    On a GPU this is what torch's allocator reserved at the peak. On the CPU it is the process's resident memory, so
    nothing else large may happen at the same time; None where the system does not let a process reset its peak.
    """
    if device.type == "cuda":
        return _cuda_peak(device, action)
    gc.collect()
    _return_free_memory()
    if not _reset_peak():
        action()
        return None
    before, files, swapped = (_status_bytes(field) for field in ("VmRSS", "RssFile", "VmSwap"))
    action()
    # pages that the system took meanwhile, of files or into swap, hide as much of the peak
    taken = max(files - _status_bytes("RssFile"), 0) + max(_status_bytes("VmSwap") - swapped, 0)
    return max(_status_bytes("VmHWM") - before, 0) + taken


@contextmanager
def large_apart() -> Iterator[None]:
    """Have every large tensor mapped by itself on the CPU, around measurements that are compared.

    Else tensors leave holes in which later ones find room or not, and the same step's peak differs by half of it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _MAX_LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _MAX_LARGE_BYTES)


def release_free_memory(device: torch.device) -> None:
    """Give back what torch's allocator keeps of freed tensors on a GPU, which else counts against the budget."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _cuda_peak(device: torch.device, action: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    action()
    torch.cuda.synchronize(device)
    return max(torch.cuda.max_memory_reserved(device) - before, 0)


def _return_free_memory() -> None:
    """Give freed memory back to the system, so that its reuse counts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        _CLEAR_REFS.write_text("5")  # 5 resets VmHWM to VmRSS, see proc(5)
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    """Return a field of the process's status; 0 if this kernel has none of that name."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
