"""Host memory for KV blocks that left the device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from services.worker.memory.kv_cache import KVCache

_TRIAL_BLOCKS = 16


class HostKV:
    """Blocks of host memory beside a cache, pinned where the cache lies on a GPU.

    Memory of the CPU is taken when a block is first written; pinned memory at once.

    Args:
        cache: whose blocks are copied here and back.
        num_blocks: of the same size as the cache's.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._device = cache.keys[0].device
        on_gpu = self._device.type == "cuda"
        layers = range(len(cache.keys))
        counts = 2 * [num_blocks if layer in cache.layers else 0 for layer in layers]
        self._host = tuple(
            torch.empty((count, *pool.shape[1:]), dtype=pool.dtype, pin_memory=on_gpu)
            for count, pool in zip(counts, (*cache.keys, *cache.values), strict=True)
        )
        """By layer, keys then values: [num_blocks, block_size, num_kv_heads, head_dim]"""

    def store(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Copy device blocks [c] into host blocks [c], in all layers that have any; done when this returns."""
        on_device = device.to(self._device)
        for pool, kept in self._pairs():
            kept.index_copy_(0, host, pool.index_select(0, on_device).cpu())

    def fetch(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy host blocks [c] into device blocks [c], in all layers that have any; done when this returns."""
        on_device = device.to(self._device)
        for pool, kept in self._pairs():
            pool.index_copy_(0, on_device, kept.index_select(0, host).to(self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def measure_copy_s(self) -> float:
        """Return the seconds that one block takes, one way, from a trial; the first blocks lose what they hold."""
        count = min(_TRIAL_BLOCKS, self.num_blocks, self._cache.num_blocks)
        blocks = torch.arange(count)
        self.store(blocks, blocks)  # memory is taken, and code loaded, by the first one
        began_s = time.perf_counter()
        self.store(blocks, blocks)
        self.fetch(blocks, blocks)
        return (time.perf_counter() - began_s) / (2 * count)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the cache's pools as they are now, each with its blocks on the host."""
        layers, half = self._cache.layers, len(self._host) // 2
        host = (*(self._host[layer] for layer in layers), *(self._host[half + layer] for layer in layers))
        return zip(self._cache.pools(), host, strict=True)
