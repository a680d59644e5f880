"""KV whose first blocks have no memory behind them, as in a group before its members' KV has come."""

from __future__ import annotations

import torch

from services.worker.fused.operators import FusedOperators
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.ranges import PageId, VirtualMemory
from services.worker.models.operators import LayerOperators
from services.worker.models.rope import RopeTable
from services.worker.models.spec import read_spec
from services.worker.models.weights import ParameterBuffer
from tests.support.checkpoints import CheckpointShape, stored_checkpoint

SHAPE = CheckpointShape(num_layers=1)


def stored_behind_nothing(memory: VirtualMemory, device: torch.device) -> list[torch.Tensor]:
    """Have heads turned by the fused operators into the second page of a memory, and by torch's into plain memory.

    Args:
        memory: of at least two pages; closed then.
        device: of it.

    Returns:
        [2, t, num_kv_heads, head_dim], keys and values, of the fused operators and of torch's.
    """
    spec = read_spec(stored_checkpoint(SHAPE)[0])
    rope = RopeTable(spec.rope, spec.rotary_dim, 64, torch.float32, device)
    block_numel = 16 * spec.kv_size
    blocks_per_page = memory.page_bytes // (4 * block_numel)
    pools = []
    for page in range(2):
        reserved = memory.reserve(2 * memory.page_bytes)
        reserved.map_run(memory.page_bytes, [PageId(page)])
        numbers = reserved.tensor().view(torch.float32)[: 2 * blocks_per_page * block_numel]
        pools.append(numbers.view(2 * blocks_per_page, 16, spec.num_kv_heads, spec.head_dim))
    late = KVCache.over(pools[:1], pools[1:], 2 * blocks_per_page)
    plain = KVCache(spec, 2 * blocks_per_page, 16, torch.float32, device)
    positions = torch.tensor([3, 7, 9], device=device)
    slots = torch.tensor([0, 5, 17], device=device) + (2 * blocks_per_page - 4) * 16
    found = []
    for operators, cache in ((FusedOperators, late), (LayerOperators, plain)):
        shape = (3, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        heads = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        weights = ParameterBuffer((), torch.float32, torch.zeros(0, dtype=torch.uint8))
        operators(spec, rope, cache).rotation(positions, slots)(0, heads, weights)
        found.append(torch.stack([pool.flatten(0, 1)[slots] for pool in cache.pools()]).cpu())
    memory.close()
    return found
