"""The KV tensors: per layer one pool of keys and one of values, in blocks. A stage of a pipeline has only its own."""

from __future__ import annotations

import torch

from services.worker.memory.huge_pages import advise_huge_pages
from services.worker.models.spec import ModelSpec
from shared.layers import LayerRange


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype, layers: LayerRange | None = None) -> int:
    """Return the memory of one block: keys and values of `block_size` tokens in some layers; None: in all."""
    num_layers = spec.num_layers if layers is None else len(layers)
    return 2 * num_layers * block_size * spec.kv_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers, or of those of a stage: the pools of the others have no block.

    Memory of the CPU is taken when a slot is first written, in huge pages where there are any; that of a GPU at once.
    Slots that were never written hold zeros, those of a freed block what its last owner wrote: readers must not look
    past the end of a sequence.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: LayerRange | None = None,
    ) -> None:
        self.layers = LayerRange(0, spec.num_layers) if layers is None else layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        counts = [num_blocks if layer in self.layers else 0 for layer in range(spec.num_layers)]
        shape = (block_size, spec.num_kv_heads, spec.head_dim)
        self.keys = tuple(torch.zeros((count, *shape), dtype=dtype, device=device) for count in counts)
        """By layer, numbered in the whole model: [num_blocks, block_size, num_kv_heads, head_dim]"""
        self.values = tuple(torch.zeros((count, *shape), dtype=dtype, device=device) for count in counts)
        """By layer, numbered in the whole model: [num_blocks, block_size, num_kv_heads, head_dim]"""
        held = slice(self.layers.first, self.layers.end)
        self.pools = (*self.keys[held], *self.values[held])
        """Those with blocks: keys by layer, then values."""
        for pool in self.pools:
            advise_huge_pages(pool)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values [t, num_kv_heads, head_dim] in slots [t] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks [c] to others [c], in all layers; no block is both source and target."""
        for pool in self.pools:
            pool.index_copy_(0, target, pool.index_select(0, source))

    @property
    def num_bytes(self) -> int:
        """Memory of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools)
