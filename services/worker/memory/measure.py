"""How much memory an action takes at its peak, beyond what was taken before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
    before = _status_bytes("VmRSS")
    action()
    return max(_status_bytes("VmHWM") - before, 0)


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
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{_STATUS} has no {field}")
