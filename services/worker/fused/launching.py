"""Starts Triton's kernels: the one place where they are called, on the device of what they are given."""

from __future__ import annotations

from typing import Any, Final

import torch

OPTIONS: Final = {"enable_fp_fusion": False}
"""Of the compiler, for every kernel: a product is rounded before it is added to something, as by torch's operators."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: torch.Tensor | float, **constants: Any) -> None:
    """Start a kernel, without waiting for it.

    Args:
        kernel: of Triton.
        grid: number of programs, by up to three dimensions; nothing is started if one is 0.
        arguments: tensors, of which the first says on which device, and numbers.
        constants: for which the kernel is compiled, and Triton's options, such as `num_warps`.
    """
    if 0 in grid:
        return
    constants = {**OPTIONS, **constants}
    device = next(each.device for each in arguments if isinstance(each, torch.Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)


def block_of(width: int) -> int:
    """Return the smallest power of two that is not below `width`, which is at least 1: blocks have such sizes."""
    return 1 << (width - 1).bit_length()


def warps_of(block: int) -> int:
    """Return how many warps work on a block of numbers: some sixteen numbers for each thread."""
    return min(max(block // 512, 1), 16)
