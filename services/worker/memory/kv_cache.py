"""The KV tensors: per layer one pool of keys and one of values, in blocks."""

from __future__ import annotations

import torch

from services.worker.memory.huge_pages import advise_huge_pages
from services.worker.models.spec import ModelSpec


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the memory of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * spec.num_layers * block_size * spec.kv_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers.

    Memory of the CPU is taken when a slot is first written, in huge pages where there are any; that of a GPU at once.
    Slots that were never written hold zeros, those of a freed block what its last owner wrote: readers must not look
    past the end of a sequence.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers))
        """By layer: [num_blocks, block_size, num_kv_heads, head_dim]"""
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers))
        """By layer: [num_blocks, block_size, num_kv_heads, head_dim]"""
        for pool in (*self.keys, *self.values):
            advise_huge_pages(pool)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values [t, num_kv_heads, head_dim] in slots [t] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks [c] to others [c], in all layers; no block is both source and target."""
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, target, pool.index_select(0, source))

    @property
    def num_bytes(self) -> int:
        """Memory of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in (*self.keys, *self.values))
