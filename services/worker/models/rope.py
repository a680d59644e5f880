"""Rotary embedding: angles by position, computed once, and their application to heads.

Source: RoFormer (Su et al. 2021), section 3.4.2, in the half-rotated form of Llama checkpoints. Scaling: `linear`
divides all frequencies, `llama3` divides the slow ones and blends between (parameters of Llama 3.1's configuration).
"""

from __future__ import annotations

import math

import torch

from services.worker.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return [head_dim / 2] float32: the angle by which each pair of dimensions turns per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    wavelength = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((rope.original_max_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


class RopeTable:
    """cos and sin of every position that the model may see.

    Args:
        max_positions: positions 0 to max_positions - 1 are held.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
        """[max_positions, head_dim]"""
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)
        """[max_positions, head_dim]; the first half negated, so that a plain swap of halves serves as the rotation"""

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return 2 * self.cos.numel() * self.cos.element_size()

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin at the positions [t], each [t, 1, head_dim]."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads [t, num_heads, head_dim] turned by the angles [t, 1, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + swapped * sin
