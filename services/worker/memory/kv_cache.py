"""The KV tensors: per layer one pool of keys and one of values, in blocks. A stage of a pipeline has only its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from services.worker.memory.huge_pages import advise_huge_pages
from services.worker.models.spec import ModelSpec
from shared.layers import LayerRange


class KVCache:
    """Keys and values of all layers, or of those of a stage: the pools of the others have no block.

    Memory of the CPU is taken when a slot is first written, in huge pages where there are any; that of a GPU at once.
    Slots that were never written hold zeros, those of a freed block what its last owner wrote: readers must not look
    past the end of a sequence.

    Over tensors that are given (`over`), the number of blocks and the layers that have any may change, while the
    address of a block does not.
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
        held = LayerRange(0, spec.num_layers) if layers is None else layers
        shape = (block_size, spec.num_kv_heads, spec.head_dim)
        counts = 2 * [num_blocks if layer in held else 0 for layer in range(spec.num_layers)]
        pools = [torch.zeros((count, *shape), dtype=dtype, device=device) for count in counts]
        for pool in pools:
            advise_huge_pages(pool)
        self._lay_over(pools[: spec.num_layers], pools[spec.num_layers :], num_blocks, range(held.first, held.end))

    @classmethod
    def over(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_blocks: int) -> KVCache:
        """Return a cache over the first blocks of pools that somebody else owns.

        Args:
            keys: by layer: [max_blocks, block_size, num_kv_heads, head_dim]; memory may be missing behind blocks that
                are not used.
            values: the same.
            num_blocks: for a start.
        """
        cache = cls.__new__(cls)
        cls._lay_over(cache, keys, values, num_blocks, range(len(keys)))
        return cache

    def _lay_over(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_blocks: int, layers: Iterable[int]
    ) -> None:
        self._pools = (tuple(keys), tuple(values))
        self.block_size = int(keys[0].shape[1])
        self.resize(num_blocks, layers)

    def resize(self, num_blocks: int, layers: Iterable[int]) -> None:
        """Set how many blocks there are; those that stay keep place and contents.

        Args:
            num_blocks: of each layer that has any.
            layers: that have blocks. The pools of others are empty, so that a use of them fails instead of touching
                memory that is not there.

        Raises:
            ValueError: the pools are not as large.
        """
        layers = tuple(layers)
        smallest = min((int(self._pools[0][layer].shape[0]) for layer in layers), default=num_blocks)
        if not 0 <= num_blocks <= smallest:
            raise ValueError(f"there cannot be {num_blocks} blocks in pools for {smallest}")
        self.num_blocks = num_blocks
        self.layers = layers
        """Those that have blocks, ascending."""
        sizes = [num_blocks if layer in self.layers else 0 for layer in range(len(self._pools[0]))]
        self.keys, self.values = (
            tuple(pool[:size] for pool, size in zip(pools, sizes, strict=True)) for pools in self._pools
        )
        """By layer, each: [num_blocks, block_size, num_kv_heads, head_dim]"""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values [t, num_kv_heads, head_dim] in slots [t] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks [c] to others [c], in all layers that have any; no block is both source and target."""
        for pool in self.pools():
            pool.index_copy_(0, target, pool.index_select(0, source))

    def pools(self) -> Iterator[torch.Tensor]:
        """Yield the pools of keys of all layers that have blocks, then those of values."""
        for pools in (self.keys, self.values):
            for layer in self.layers:
                yield pools[layer]

    @property
    def num_bytes(self) -> int:
        """Memory of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools())
