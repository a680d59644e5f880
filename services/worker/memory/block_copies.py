"""Copies of KV blocks in host memory, as bytes: what a worker keeps aside while its layers change, or sends to others.

    cache, blocks 9 4 7 ──copy_blocks──► BlockCopies ──bytes_of──► … ──write_block_bytes──► another cache, blocks 0 1 2

A block's bytes are its keys, or its values, in one layer: [block_size, num_kv_heads, head_dim] in the cache's type, as
they lie there. Nothing is converted, so they come back to the bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from services.worker.contract.arrays import I32, Bool
from services.worker.contract.kept_kv import as_host_id
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache
from shared.layers import LayerRange

NUM_SIDES: Final = 2
"""Keys (side 0) and values (side 1)."""
_PIECE_BYTES: Final = 4 * 1024**2
"""Device memory that a copy takes at a time."""


class BlockCopies:
    """See `copy_blocks`.

    Args:
        first_layer: of those that are copied.
        data: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], on the host.
    """

    def __init__(self, first_layer: int, data: torch.Tensor) -> None:
        self._first_layer = first_layer
        self._data = data

    @property
    def layers(self) -> LayerRange:
        """Those that were copied."""
        return LayerRange(self._first_layer, self._first_layer + len(self._data))

    def as_cache(self, num_layers: int) -> KVCache:
        """Return the copies as blocks of a cache, numbered in their order; other layers have none there.

        Args:
            num_layers: of the whole model.
        """
        nothing = self._data[0, 0, :0]
        keys, values = (
            [
                self._data[layer - self._first_layer, side] if layer in self.layers else nothing
                for layer in range(num_layers)
            ]
            for side in range(NUM_SIDES)
        )
        cache = KVCache.over(keys, values, 0)
        cache.resize(self._data.shape[2], self.layers)
        return cache

    def bytes_of(self, layer: int, side: int, first: int, end: int) -> memoryview:
        """Return the bytes of the copies [first, end) in a layer; not copied, valid as long as this is.

        Args:
            layer: numbered in the whole model.
            side: 0: keys, 1: values.
            first: in the order of the ids that were copied.
            end: one past the last.
        """
        part = self._data[layer - self._first_layer, side, first:end]
        data: memoryview = part.reshape(-1).view(torch.uint8).numpy().data
        return data


def block_bytes(cache: KVCache) -> int:
    """Return the bytes of a block's keys in one layer; its values have as many."""
    keys = cache.keys[cache.layers[0]]
    return cache.block_size * int(keys.shape[2]) * int(keys.shape[3]) * keys.element_size()


def copy_blocks(cache: KVCache, ids: I32, host: HostKV | None = None) -> BlockCopies:
    """Copy some blocks, in all layers that have any, into new host memory.

    Args:
        cache: of contiguous layers.
        ids: [n], as in `KeptKv`.
        host: of the cache; None: no block is on the host.

    Raises:
        ValueError: there are no such blocks.
        MemoryError, RuntimeError: the memory cannot be had.
    """
    num_host_blocks = 0 if host is None else host.num_blocks
    if len(ids) and not -num_host_blocks <= int(ids.min()) <= int(ids.max()) < cache.num_blocks:
        there = f"{cache.num_blocks}, and {num_host_blocks} on the host"
        raise ValueError(f"blocks {ids.min()} to {ids.max()} are not all among {there}")
    layers = cache.layers
    like = cache.keys[layers[0]]
    shape = (len(layers), NUM_SIDES, len(ids), *like.shape[1:])
    with torch.inference_mode():
        data = torch.empty(shape, dtype=like.dtype)
        step = max(_PIECE_BYTES // block_bytes(cache), 1)
        for place, layer in enumerate(layers):
            for side, pool in enumerate((cache.keys[layer], cache.values[layer])):
                _gather(pool, ids, ids >= 0, data[place, side], step)
                if host is not None:
                    _gather(host.pool(layer, side), as_host_id(ids), ids < 0, data[place, side], step)
    return BlockCopies(layers[0], data)


def _gather(pool: torch.Tensor, ids: I32, chosen: Bool, into: torch.Tensor, step: int) -> None:
    """Let those of the blocks [n] of `into` that are chosen hold what a pool's blocks do, so many at a time."""
    places = np.flatnonzero(chosen)
    if not len(places):
        return
    source = torch.from_numpy(ids[places].astype(np.int64)).to(pool.device)
    in_order = len(places) == len(ids)
    target = torch.from_numpy(places)
    for first in range(0, len(places), step):
        piece = pool.index_select(0, source[first : first + step])
        if in_order:
            into[first : first + step].copy_(piece)
        else:
            into.index_copy_(0, target[first : first + step], piece.to(into.device))


def write_block_bytes(cache: KVCache, layer: int, side: int, first: int, data: memoryview) -> None:
    """Let consecutive blocks of a layer hold what the bytes say; on a GPU `settle` waits for it.

    Args:
        cache: that has the layer.
        layer: numbered in the whole model.
        side: 0: keys, 1: values.
        first: id of the first block.
        data: of whole blocks; may be used again at once.

    Raises:
        ValueError: the bytes are no blocks, or there are not as many.
    """
    pool = (cache.keys, cache.values)[side][layer]
    count, rest = divmod(len(data), block_bytes(cache))
    if rest or not 0 <= first <= first + count <= len(pool):
        raise ValueError(f"{len(data)} bytes are not blocks {first} and following of {len(pool)} in layer {layer}")
    if not count:
        return
    with torch.inference_mode():
        given = torch.frombuffer(data, dtype=torch.uint8)
        pool[first : first + count].copy_(given.view(pool.dtype).view(count, *pool.shape[1:]))


def scatter_block_bytes(cache: KVCache, layer: int, side: int, ids: I32, data: memoryview) -> None:
    """Let blocks of a layer, wherever they lie, hold what the bytes say; on a GPU `settle` waits for it.

    Args:
        cache: that has the layer.
        layer: numbered in the whole model.
        side: 0: keys, 1: values.
        ids: [n] different ones, in the order of the bytes.
        data: of n blocks; may be used again at once.

    Raises:
        ValueError: the bytes are not n blocks, or there are no such blocks.
    """
    pool = (cache.keys, cache.values)[side][layer]
    if len(data) != len(ids) * block_bytes(cache):
        raise ValueError(f"{len(data)} bytes are not {len(ids)} blocks")
    if not len(ids):
        return
    if not 0 <= int(ids.min()) <= int(ids.max()) < len(pool):
        raise ValueError(f"blocks {ids.min()} to {ids.max()} are not all among the {len(pool)} of layer {layer}")
    with torch.inference_mode():
        given = torch.frombuffer(data, dtype=torch.uint8).view(pool.dtype).view(len(ids), *pool.shape[1:])
        pool.index_copy_(0, torch.from_numpy(ids.astype(np.int64)).to(pool.device), given.to(pool.device))


def move_blocks(cache: KVCache, ids: I32, places: I32) -> None:
    """Let some blocks hold what others did before, in all layers that have any; on a GPU `settle` waits for it.

    Takes memory of the device for the blocks of one layer that change their place.

    Args:
        cache: where they lie.
        ids: [n] whose contents go, below `cache.num_blocks`.
        places: [n] different ones, below it too, where they go.

    Raises:
        ValueError: there are no such blocks.
        MemoryError, RuntimeError: the memory cannot be had.
    """
    named = np.concatenate([ids, places])
    if len(named) and not 0 <= int(named.min()) <= int(named.max()) < cache.num_blocks:
        raise ValueError(f"blocks {named.min()} to {named.max()} are not all among {cache.num_blocks}")
    goes = np.flatnonzero(ids != places)
    if not len(goes):
        return
    device = cache.keys[cache.layers[0]].device
    with torch.inference_mode():
        source, target = (torch.from_numpy(which[goes].astype(np.int64)).to(device) for which in (ids, places))
        for layer in cache.layers:
            for pool in (cache.keys[layer], cache.values[layer]):
                pool.index_copy_(0, target, pool.index_select(0, source))


def settle(cache: KVCache) -> None:
    """Wait until everything that was written is there."""
    device = cache.keys[cache.layers[0]].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
