"""KV blocks of a CUDA device, copied to main memory and scattered to others: what is copied ahead goes this way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.memory.block_copies import copy_blocks, move_blocks, scatter_block_bytes, settle
from services.worker.memory.kv_cache import KVCache
from tests.support.gpu import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_through_main_memory_to_other_places_to_the_bit(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    keys, values = ([torch.randn((64, 16, 2, 64), device=device).to(dtype) for _ in range(3)] for _ in range(2))
    cache = KVCache.over(keys, values, 64)
    before = [[pool.clone() for pool in pools] for pools in (keys, values)]
    source, target = np.array([40, 3, 17], np.int32), np.array([5, 60, 9], np.int32)
    copies = copy_blocks(cache, source)
    for layer in range(3):
        for side in range(2):
            scatter_block_bytes(cache, layer, side, target, copies.bytes_of(layer, side, 0, 3))
    settle(cache)
    for pools, old in zip((keys, values), before, strict=True):
        for pool, was in zip(pools, old, strict=True):
            was[target] = was[source].clone()
            assert torch.equal(pool, was)


def test_blocks_change_places_on_the_device_at_once() -> None:
    device = torch.device("cuda", 0)
    keys, values = ([torch.randn((64, 16, 2, 64), device=device) for _ in range(3)] for _ in range(2))
    cache = KVCache.over(keys, values, 64)
    before = [pool.clone() for pool in (*keys, *values)]
    ids, places = np.array([40, 3, 17, 9], np.int32), np.array([3, 40, 17, 60], np.int32)
    move_blocks(cache, ids, places)
    settle(cache)
    for pool, was in zip((*keys, *values), before, strict=True):
        was[places] = was[ids].clone()
        assert torch.equal(pool, was)
