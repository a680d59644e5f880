"""Copies of KV blocks as bytes: written back to the bit, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.memory.block_copies import copy_blocks, move_blocks, scatter_block_bytes, write_block_bytes
from services.worker.memory.kv_cache import KVCache


def drawn_cache(rng: np.random.Generator, dtype: torch.dtype) -> tuple[KVCache, list[torch.Tensor]]:
    """Return a cache of whose three layers the last two have 8 blocks, and its pools of 9, keys then values."""
    pools = [torch.empty((9, 4, 2, 3), dtype=dtype) for _ in range(6)]
    for pool in pools:
        flat = pool.view(-1).view(torch.uint8)
        flat.copy_(torch.from_numpy(rng.integers(0, 256, flat.numel(), dtype=np.uint8)))
    cache = KVCache.over(pools[:3], pools[3:], 9)
    cache.resize(8, (1, 2))
    return cache, pools


def bits(pools: list[torch.Tensor]) -> list[torch.Tensor]:
    return [pool.view(torch.uint8).clone() for pool in pools]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_written_and_scattered_to_the_bit_and_nowhere_else(dtype: torch.dtype) -> None:
    cache, pools = drawn_cache(np.random.default_rng(5), dtype)
    before = bits(pools)
    copies = copy_blocks(cache, np.array([7, 2, 5], np.int32))
    assert copies._data.nbytes == 2 * 2 * 3 * 4 * 2 * 3 * dtype.itemsize
    write_block_bytes(cache, 1, 1, 0, copies.bytes_of(1, 1, 1, 3))
    write_block_bytes(cache, 2, 0, 6, copies.bytes_of(2, 0, 0, 2))
    write_block_bytes(cache, 2, 0, 8, copies.bytes_of(2, 0, 1, 1))
    before[4][0], before[4][1] = before[4][2].clone(), before[4][5].clone()
    before[2][6], before[2][7] = before[2][7].clone(), before[2][2].clone()
    scatter_block_bytes(cache, 2, 1, np.array([6, 0], np.int32), copies.bytes_of(2, 1, 1, 3))
    scatter_block_bytes(cache, 1, 0, np.array([], np.int32), copies.bytes_of(1, 0, 0, 0))
    before[5][6], before[5][0] = before[5][2].clone(), before[5][5].clone()
    assert all(map(torch.equal, bits(pools), before))


def test_blocks_that_are_not_there_and_bytes_that_are_no_blocks_are_refused() -> None:
    cache = KVCache.over([torch.zeros((4, 2, 1, 2))], [torch.zeros((4, 2, 1, 2))], 4)
    for ids in ([4], [-1, 2]):
        with pytest.raises(ValueError, match="are not all among 4"):
            copy_blocks(cache, np.array(ids, np.int32))
    for first, size in ((3, 32), (-1, 16), (0, 15)):
        with pytest.raises(ValueError, match="bytes are not blocks"):
            write_block_bytes(cache, 0, 0, first, memoryview(bytearray(size)))
    for ids, size, reason in (([1, 2], 16, "are not 2 blocks"), ([4], 16, "not all among the 4"), ([-1], 16, "among")):
        with pytest.raises(ValueError, match=reason):
            scatter_block_bytes(cache, 0, 0, np.array(ids, np.int32), memoryview(bytearray(size)))
    assert not any(pool.any() for pool in cache.pools())


@pytest.mark.parametrize("seed", range(5))
def test_blocks_change_places_at_once_in_the_layers_that_have_any(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, pools = drawn_cache(rng, torch.float32)
    before = bits(pools)
    ids, places = (rng.permutation(8)[: 5 + seed % 4].astype(np.int32) for _ in range(2))  # some swap, or go round
    move_blocks(cache, ids, places)
    for layer, (pool, old) in enumerate(zip(bits(pools), before, strict=True)):
        if layer % 3:
            old[places.tolist()] = old[ids.tolist()].clone()
        assert torch.equal(pool, old)
    with pytest.raises(ValueError, match="not all among 8"):
        move_blocks(cache, np.array([1, 2], np.int32), np.array([3, 8], np.int32))
