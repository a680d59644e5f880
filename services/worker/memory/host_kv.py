"""Host memory for KV blocks that left the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from services.worker.memory.kv_cache import KVCache

STAGED_BLOCKS: Final = 16
"""Blocks that are gathered on a GPU before they are sent, in each direction."""
_TRIAL_BLOCKS = 16


class HostKV:
    """Blocks of host memory beside a cache, pinned where the cache lies on a GPU.

    Which layers the cache has may change: then all blocks are without contents.

    Memory of the CPU is taken when a block is first written; pinned memory at once. On a GPU either direction has a
    stream of its own, so that copies run beside steps and beside each other, each called from one thread; all layers of
    a block lie together on the host, and a block is one transfer.

    Args:
        cache: whose blocks are copied here and back.
        num_blocks: of the same size as the cache's.
        staged: as on a GPU, wherever the cache lies; None: if it lies on one.
    """

    def __init__(self, cache: KVCache, num_blocks: int, *, staged: bool | None = None) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._device = cache.keys[0].device
        on_gpu = self._device.type == "cuda"
        self.is_beside = on_gpu if staged is None else staged
        """Copies run beside steps; whoever copies waits for the steps before that wrote the blocks."""
        self._plain: tuple[torch.Tensor, ...] = ()
        """By layer, keys then values: [num_blocks, block_size, num_kv_heads, head_dim]"""
        self._lanes: dict[bool, _Lane] = {}
        """By whether they lead to the host."""
        if not self.is_beside:
            counts = 2 * [num_blocks if layer in cache.layers else 0 for layer in range(len(cache.keys))]
            self._plain = tuple(
                torch.empty((count, *pool.shape[1:]), dtype=pool.dtype)
                for count, pool in zip(counts, (*cache.keys, *cache.values), strict=True)
            )
            return
        pools = list(cache.pools())
        shape = (num_blocks, len(pools), *pools[0].shape[1:])
        host = torch.empty(shape, dtype=pools[0].dtype, pin_memory=on_gpu)
        self._lanes = {to_host: _Lane(cache, host, self._device) for to_host in (True, False)}

    def store(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Copy device blocks [c] into host blocks [c], in all layers that have any; done when this returns."""
        if self.is_beside:
            self._lanes[True].store(device, host)
            return
        self._check(device, host)
        runs = _runs(device, host)
        for pool, kept in self._pairs():
            _copy(pool, kept, runs)

    def fetch(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy host blocks [c] into device blocks [c], in all layers that have any; done when this returns."""
        if self.is_beside:
            self._lanes[False].fetch(host, device)
            return
        self._check(device, host)
        runs = _runs(host, device)
        for pool, kept in self._pairs():
            _copy(kept, pool, runs)

    def pool(self, layer: int, side: int) -> torch.Tensor:
        """Return a layer's part of the host blocks, not copied.

        Args:
            layer: that has blocks in the cache, numbered in the whole model.
            side: 0: keys, 1: values.

        Returns:
            [num_blocks, block_size, num_kv_heads, head_dim]
        """
        if self.is_beside:
            layers = self._cache.layers
            return self._lanes[True].pool(side * len(layers) + layers.index(layer))
        return self._plain[side * (len(self._plain) // 2) + layer]

    def measure_copy_s(self) -> float:
        """Return the seconds that one block takes, one way, from a trial; the first blocks lose what they hold."""
        count = min(_TRIAL_BLOCKS, self.num_blocks, self._cache.num_blocks)
        blocks = torch.arange(count)
        self.store(blocks, blocks)  # memory is taken, and code loaded, by the first one
        began_s = time.perf_counter()
        self.store(blocks, blocks)
        self.fetch(blocks, blocks)
        return (time.perf_counter() - began_s) / (2 * count)

    def _check(self, device: torch.Tensor, host: torch.Tensor) -> None:
        for ids, num_blocks in ((device, self._cache.num_blocks), (host, self.num_blocks)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
                raise IndexError(f"blocks {int(ids.min())} to {int(ids.max())} are not all among {num_blocks}")

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the cache's pools as they are now, each with its blocks on the host."""
        layers, half = self._cache.layers, len(self._plain) // 2
        host = (*(self._plain[layer] for layer in layers), *(self._plain[half + layer] for layer in layers))
        return zip(self._cache.pools(), host, strict=True)


class _Lane:
    """One direction between a device and its host: blocks are gathered on the device, then sent one by one.

    Args:
        cache: on the device.
        host: [num_blocks, pools, block_size, num_kv_heads, head_dim], pinned if the device is a GPU; the first ones of
            each block are those of the layers that the cache has.
        device: of the cache.
    """

    def __init__(self, cache: KVCache, host: torch.Tensor, device: torch.device) -> None:
        self._cache = cache
        self._host = host
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged = torch.empty((STAGED_BLOCKS, *host.shape[1:]), dtype=host.dtype, device=device)

    def store(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """See `HostKV.store`."""
        with self._on_stream():
            for on_device, on_host in zip(device.split(STAGED_BLOCKS), host.split(STAGED_BLOCKS), strict=True):
                blocks, pools = on_device.to(self._device), list(self._cache.pools())
                for index, pool in enumerate(pools):
                    self._staged[: len(blocks), index].copy_(pool.index_select(0, blocks))
                for place, block in enumerate(on_host.tolist()):
                    self._host[block, : len(pools)].copy_(self._staged[place, : len(pools)], non_blocking=True)
        self._wait()

    def fetch(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """See `HostKV.fetch`."""
        with self._on_stream():
            for on_device, on_host in zip(device.split(STAGED_BLOCKS), host.split(STAGED_BLOCKS), strict=True):
                blocks, pools = on_device.to(self._device), list(self._cache.pools())
                for place, block in enumerate(on_host.tolist()):
                    self._staged[place, : len(pools)].copy_(self._host[block, : len(pools)], non_blocking=True)
                for index, pool in enumerate(pools):
                    pool.index_copy_(0, blocks, self._staged[: len(blocks), index])
        self._wait()

    def pool(self, index: int) -> torch.Tensor:
        """Return what lies on the host of one of the cache's pools, by its number among them."""
        return self._host[:, index]

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _runs(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return blocks [c] to copy to blocks [c] as runs that lie together on both sides: first of either, and how many.

    Pieces are copied three times as fast as by `index_copy_`, which copies element by element.
    """
    steps = (source.diff() != 1) | (target.diff() != 1)
    begins = [0, *(steps.nonzero().flatten() + 1).tolist()] if len(source) else []
    sizes = [end - begin for begin, end in zip(begins, [*begins[1:], len(source)], strict=True)]
    return list(zip(source[begins].tolist(), target[begins].tolist(), sizes, strict=True))


def _copy(source: torch.Tensor, target: torch.Tensor, runs: list[tuple[int, int, int]]) -> None:
    """Copy runs of blocks from one pool to another."""
    pieces = [source[first : first + count] for first, _, count in runs]
    torch._foreach_copy_([target[first : first + count] for _, first, count in runs], pieces)


def staged_bytes(bytes_per_block: int) -> int:
    """Return the memory of a GPU that copies between it and its host take, both directions together."""
    return 2 * 2 * STAGED_BLOCKS * bytes_per_block  # what is gathered; a pool's blocks on their way there are less
