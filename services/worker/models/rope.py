"""Rotary embedding: angles by position, computed once, and their application to heads.

Source: RoFormer (Su et al. 2021), section 3.4.2, in the half-rotated form of Llama checkpoints. Scaling: `linear`
divides all frequencies; `llama3` and `yarn` divide the slow ones, keep the fast ones and blend between, by wavelength
(parameters of Llama 3.1's configuration) or by dimension (YaRN, Peng et al. 2023, section 3.2); `longrope` divides each
by a factor of its own (LongRoPE, Ding et al. 2024).
"""

from __future__ import annotations

import math

import torch

from services.worker.models.rope_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2] float32: the angle by which each pair of dimensions turns per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, rotary_dim)
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.factors)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    wavelength = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((rope.original_max_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, rotary_dim: int) -> torch.Tensor:
    low, high = (_dimension(rope, turns, rotary_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    blend = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return blend * frequencies / rope.factor + (1.0 - blend) * frequencies


def _dimension(rope: RopeSpec, turns: float, rotary_dim: int) -> float:
    """Return the pair of dimensions that turns so often in the first context."""
    return rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class RopeTable:
    """cos and sin of every position that the model may see.

    Args:
        rotary_dim: dimensions of a head that turn; 0 for a model without a rotary embedding.
        max_positions: positions 0 to max_positions - 1 are held.
    """

    def __init__(
        self, rope: RopeSpec, rotary_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_positions = max_positions
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, rotary_dim))
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        """[max_positions, rotary_dim]"""
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)
        """[max_positions, rotary_dim]; the first half negated, so that a plain swap of halves serves as the rotation"""

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin at the positions [t], each [t, 1, rotary_dim]."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads [t, num_heads, head_dim], their first dimensions turned by the angles [t, 1, rotary_dim]."""
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :width], cos, sin), heads[..., width:]), dim=-1) if width else heads
    half = width // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + swapped * sin
