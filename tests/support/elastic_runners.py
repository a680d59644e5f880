"""Runners in memory that can drop layers, and texts that are generated while layers go and come back."""

from __future__ import annotations

import torch

from services.worker.executor.model_runner import ModelRunner
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.spans import Spans
from tests.support.runner_driver import Driver

PROMPTS = ([*range(10, 60)], [*range(200, 230)])


def elastic(runner: ModelRunner) -> ElasticMemory:
    """Return the memory of a runner that can drop layers."""
    assert isinstance(runner.memory, ElasticMemory)
    return runner.memory


def spoil(memory: ElasticMemory, cache: KVCache, kept: int) -> None:
    """Write what is no number into the blocks that nobody uses."""
    others = torch.tensor(list(memory.usable - Spans.of((0, kept))), device=memory.device)
    for layer in memory.holding.layers:
        for pool in (cache.keys[layer], cache.values[layer]):
            pool.index_fill_(0, others, torch.nan)


def drop_and_restore(runner: ModelRunner, layers: list[int], num_used: int) -> None:
    """Let the layers go and come back, while the KV of their blocks stays."""
    memory = elastic(runner)
    facts = memory.layout.facts
    outer = memory.parameters(None, facts.outer_bytes)
    saved = {layer: memory.parameters(layer, facts.layer_bytes[layer]).clone() for layer in layers}
    saved_outer, before = outer.clone(), memory.num_blocks
    memory.leave(layers, Spans.of((0, num_used)), 0)
    memory.grow()
    assert memory.num_blocks > before
    spoil(memory, runner.cache, num_used)
    missing = memory.restore(layers, num_used)
    for layer, parameters in saved.items():
        memory.parameters(layer, facts.layer_bytes[layer]).copy_(parameters)
    for first, end in missing.ranges:
        outer[first:end] = saved_outer[first:end]
    memory.shrink(num_used)
    memory.grow()
    spoil(memory, runner.cache, num_used)
    memory.check_invariants()
    assert memory.num_blocks == before


def texts_with_drops(runner: ModelRunner, drops: list[list[int]]) -> list[list[int]]:
    """Return what the prompts say, with a drop and a restore after every few tokens."""
    driver = Driver(runner, seed=3, num_blocks=24)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    done = 3
    driver.run(done, chunk=30, max_tokens=96)
    for dropped in drops:
        drop_and_restore(runner, dropped, 24)
        done += 4
        driver.run(done, chunk=30, max_tokens=96)
    driver.run(16, chunk=30, max_tokens=96)
    return [sequence.output[:16] for sequence in sequences]
