"""Kernels, operators and whole models over memory whose pages change hands: none of them notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.attention.base import Attention, RaggedRows
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy
from services.worker.executor.model_runner import ModelRunner
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.model_memory import ModelSizes, memory_facts, open_memory
from services.worker.models.spec import ModelSpec, read_spec
from services.worker.models.weights import layer_bytes, outer_parts, outer_split
from shared.errors import StartupError
from tests.support.attention_cases import attention_spec
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.elastic_runners import elastic, texts_with_drops
from tests.support.native import built_library
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, MIB, open_runner

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
PAGE = 4096
BLOCK_SIZE = 8
SHAPE = CheckpointShape(num_layers=3, seed=11)
OPT = CheckpointShape(family="opt", num_layers=3, num_kv_heads=4, tied=True, seed=5)


ATTENTIONS: dict[str, Callable[[ModelSpec, KVCache], Attention[Any]]] = {
    "native": lambda spec, cache: NativePagedAttention(built_library(), spec, cache),
    "torch": TorchPagedAttention,
    "fixed splits": FixedSplitAttention,
}


def spec_of(heads: tuple[int, int, int]) -> ModelSpec:
    return replace(attention_spec(heads, (None, None, 30)), hidden_size=64, intermediate_size=160, vocab_size=40)


def dropped_memory(spec: ModelSpec, dtype: torch.dtype) -> tuple[ElasticMemory, KVCache]:
    """Return a memory without layer 0, in which parameters and KV of that layer back the tails of the others."""
    memory = open_memory(ModelSizes(spec, BLOCK_SIZE, dtype), CPU, 190 * PAGE, PAGE)
    assert isinstance(memory, ElasticMemory)
    memory.parameters(0, layer_bytes(spec, dtype)[0]).fill_(0xFF)  # NaN, whatever the type
    cache = memory.open_kv(6, 0)
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    first = memory.num_blocks
    memory.drop([0])
    assert memory.num_blocks > first + 4
    return memory, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(ATTENTIONS))
def test_attention_over_pages_that_were_parameters_is_that_over_plain_memory(kind: str, dtype: torch.dtype) -> None:
    """Written before the KV moves to other ids, read after it; beside it the same in plain memory."""
    spec = spec_of((4, 2, 24))
    memory, cache = dropped_memory(spec, dtype)
    plain = KVCache(spec, memory.num_blocks, BLOCK_SIZE, dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    starts, counts = np.array([30, 0, 17], np.int32), np.array([1, 20, 9], np.int32)
    order = torch.randperm(memory.num_blocks, generator=generator).to(torch.int32).numpy()
    tables = np.zeros((3, 4), np.int32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        blocks = -(-int(start + count) // BLOCK_SIZE)
        tables[row, :blocks], order = np.split(order, [blocks])
        slots = torch.from_numpy(tables[row, :blocks, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE))
        shape = (int(start + count), 2, 24)
        for layer in (1, 2):
            keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            for target in (cache, plain):
                target.write(layer, slots.flatten()[: shape[0]], keys, values)
    unit = memory.layout.unit_blocks
    memory.leave([], memory.usable, 3 * unit)
    moved = np.where(np.arange(4) < -(-(starts + counts) // BLOCK_SIZE)[:, None], tables + 3 * unit, 0)
    queries = torch.randn((int(counts.sum()), 4, 24), generator=generator).to(dtype)
    for layer in (1, 2):
        results = []
        for target, ids in ((cache, moved.astype(np.int32)), (plain, tables)):
            attention = ATTENTIONS[kind](spec, target)
            plan = attention.plan(RaggedRows(counts, starts, ids))
            results.append(attention.attend(plan, layer, queries))
        assert torch.isfinite(results[0]).all()
        assert torch.equal(results[0], results[1])
    memory.close()


def open_elastic_runner(shape: CheckpointShape, **changes: object) -> ModelRunner:
    return open_runner(shape, **{"page_bytes": PAGE, "memory_bytes": 16 * MIB, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kernels", sorted({KERNELS, "torch"}))
def test_a_model_says_the_same_whose_layers_came_and_went(kernels: str) -> None:
    plain = open_runner(SHAPE, deterministic=True, kernels=kernels)
    runner = open_elastic_runner(SHAPE, deterministic=True, kernels=kernels)
    assert plain.info.kernels.startswith("torch") == (kernels == "torch")
    calm = texts_with_drops(plain, [])
    assert texts_with_drops(runner, [[1], [0, 2], [0], [2, 1]]) == calm
    assert all(len(set(text)) > 3 for text in calm)
    runner.close()


def test_a_runner_in_pages_has_its_budget_divided_like_any_other() -> None:
    runner = open_elastic_runner(SHAPE)
    memory, info = elastic(runner), runner.info
    facts = memory.layout.facts
    reserved = -(-info.reserve_bytes // PAGE)
    assert facts.num_pages == 16 * MIB // PAGE - reserved
    assert memory.layout.num_pages(memory.holding) + memory._pool.num_free == facts.num_pages
    assert memory._pool.num_free < 2 * info.num_layers * -(-facts.block_bytes // PAGE)
    assert info.capacity.num_blocks == memory.num_blocks == runner.cache.num_blocks
    assert info.param_bytes == PAGE * (memory.layout.num_pages(memory.holding) - 2 * 3 * memory.holding.kv.total)
    assert info.kv_bytes == memory.num_blocks * info.bytes_per_block
    runner.close()


def test_too_little_memory_for_pages_is_refused_like_any_other() -> None:
    with pytest.raises(StartupError, match=r"a memory budget of 1\.00 MiB is too small"):
        open_elastic_runner(SHAPE, memory_bytes=MIB)
    with pytest.raises(StartupError, match=r"cannot be had: pages of 5000 bytes are not a multiple"):
        open_elastic_runner(SHAPE, page_bytes=5000)


@pytest.mark.parametrize("kernels", sorted({KERNELS, "torch"}))
def test_blocks_that_are_gone_are_refused_and_come_back(kernels: str) -> None:
    """A step, and a copy to the host, of a block behind the last one: before growth refused, after it not."""
    runner = open_elastic_runner(SHAPE, kernels=kernels, host_memory_bytes=MIB)
    memory = elastic(runner)
    memory.shrink(4)
    assert runner.cache.num_blocks == memory.num_blocks == 4
    driver = Driver(runner)
    driver._free = [3, 30]
    sequence = driver.add(list(range(2, 20)))
    copy = HostCopy(1, np.array([30], np.int32), np.array([0], np.int32), to_host=True)
    with pytest.raises(BatchFailedError, match=r"IndexError|out of range|out of bounds"):
        driver.step([(sequence, 18)])
    with pytest.raises(CopyFailedError):
        runner.copy(copy)
    memory.grow()
    again = driver.add(list(range(2, 20)), row=3)
    driver._free = [3, 30]
    driver.step([(again, 18)])
    runner.copy(copy)
    assert len(again.output) == 1
    runner.close()


def test_the_outer_buffer_has_the_first_stages_parts_first() -> None:
    for shape in (SHAPE, OPT):
        spec = read_spec(stored_checkpoint(shape)[0])
        parts = {part.name: part for part in outer_parts(spec)}
        end, begin = outer_split(spec, torch.float32)
        first = sum(parts[name].numel * 4 for name in ("positions", "embedding") if name in parts)
        assert end == first  # sizes here are multiples of the alignment
        assert begin == (end - parts["embedding"].numel * 4 if spec.tied_embeddings else end)
        facts = memory_facts(ModelSizes(spec, 16, torch.float32), PAGE, 1000)
        assert (facts.first_stage_end, facts.last_stage_begin) == (end, begin)
        assert sum(facts.layer_bytes) + facts.outer_bytes == sum(
            -(-part.numel * 4 // 64) * 64 for part in parts.values()
        ) + sum(layer_bytes(spec, torch.float32))


def test_a_cache_over_given_pools_changes_its_size_in_place() -> None:
    pools = [torch.arange(2.0 * 3 * 4).reshape(6, 2, 2, 1) + 100 * i for i in range(4)]
    cache = KVCache.over(pools[:2], pools[2:], 2)
    assert (cache.num_blocks, cache.block_size, cache.keys[1].shape) == (2, 2, (2, 2, 2, 1))
    address = cache.keys[1].data_ptr()
    cache.resize(6, [0, 1])
    assert cache.keys[1].data_ptr() == address == pools[1].data_ptr()
    assert torch.equal(cache.values[0], pools[2])
    assert cache.num_bytes == 4 * 6 * 4 * 4
    for count in (7, -1):
        with pytest.raises(ValueError, match=f"cannot be {count} blocks in pools for 6"):
            cache.resize(count, [0, 1])


@pytest.mark.parametrize("staged", [False, True])
def test_a_layer_without_blocks_is_left_alone_and_not_touched(staged: bool) -> None:
    """Its memory is not there: a copy of blocks leaves it out, a use of it is an error, not the end of the process."""
    memory, cache = dropped_memory(spec_of((4, 2, 24)), torch.float32)
    host = HostKV(cache, 4, staged=staged)
    for layer in (1, 2):
        for pool, first in ((cache.keys[layer], 100), (cache.values[layer], 1000)):
            pool[:] = torch.arange(memory.num_blocks, dtype=torch.float32)[:, None, None, None] + first * layer
    cache.copy_blocks(torch.tensor([3, 4]), torch.tensor([0, 1]))
    assert cache.values[2][:3, 0, 0, 0].tolist() == [2003, 2004, 2002]
    host.store(torch.tensor([5, 6]), torch.tensor([1, 0]))
    host.fetch(torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert cache.keys[1][:3, 0, 0, 0].tolist() == [106, 104, 105]
    assert cache.values[2][:3, 0, 0, 0].tolist() == [2006, 2004, 2005]
    assert list(cache.layers) == [1, 2]
    assert len(list(cache.pools())) == 4
    with pytest.raises(IndexError):
        cache.write(0, torch.tensor([0]), torch.zeros(1, 2, 24), torch.zeros(1, 2, 24))
    memory.restore([0], 0)
    assert list(cache.layers) == [0, 1, 2]
    cache.write(0, torch.tensor([0]), torch.ones(1, 2, 24), torch.ones(1, 2, 24))
    assert cache.keys[0][0, 0, 0, 0] == 1
    memory.close()
