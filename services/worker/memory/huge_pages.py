"""Asks the system to back large tensors of the CPU with huge pages.

A decode touches blocks all over the KV pools; with pages of 4 KiB a good part of its time goes into looking up
addresses, above all inside a virtual machine. This is advice: without huge pages to give, nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Advise for the whole huge pages inside a contiguous tensor that nobody has written to yet."""
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu":
        return
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end:
        madvise(begin, end - begin, _MADV_HUGEPAGE)
