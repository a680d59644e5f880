"""What the planner claims a stage has room for is what a worker's memory has, to the block: after a drop, and beside
parameters that come back."""

from __future__ import annotations

import numpy as np
import pytest

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ModelFacts
from services.worker.memory import holdings
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.spans import Spans
from shared.layers import LayerRange
from tests.support.elastic_cases import open_elastic, random_facts
from tests.support.seeds import first_of

PAGE_BYTES = 4096


def model_of(facts: MemoryFacts, block_size: int) -> ModelFacts:
    """Return the same sizes as the planner has them."""
    return ModelFacts(
        layer_bytes=facts.layer_bytes,
        outer_bytes=facts.outer_bytes,
        first_stage_end=facts.first_stage_end,
        last_stage_begin=facts.last_stage_begin,
        block_bytes=facts.block_bytes,
        block_size=block_size,
        page_bytes=facts.page_bytes,
    )


def check_ahead(rng: np.random.Generator, rule: CapacityRule, memory: ElasticMemory, kept: LayerRange) -> None:
    """Check that of just so many blocks all layers can be had beside some of those that the stage computes with."""
    facts = memory.layout.facts
    beside = [layer for layer in range(facts.num_layers) if layer not in kept]
    all_layers = LayerRange(0, facts.num_layers)
    whole = rule.blocks(all_layers, facts.num_pages, facts.max_blocks)
    most = rule.blocks(kept, facts.num_pages, facts.max_blocks, all_layers)
    if not beside or not most:
        return
    memory.reside(beside, 0)
    memory.grow()
    num_blocks = int(rng.integers(1, most + 1))
    claimed = rule.blocks_ahead(kept, facts.num_pages, num_blocks, facts.max_blocks)
    assert holdings.room_ahead(memory.layout, kept, num_blocks) == claimed <= min(num_blocks, whole)
    memory.reside(beside, num_blocks, Spans.of((0, claimed)))
    memory.shrink(num_blocks)
    if claimed < min(num_blocks, whole):
        with pytest.raises(NotEnoughPagesError):
            memory.reside(beside, num_blocks, Spans.of((0, claimed + 1)))


@pytest.mark.parametrize("seed", first_of(range(40), 12))
def test_every_range_of_layers_gets_the_blocks_that_were_claimed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts, kv = random_facts(rng, PAGE_BYTES)
    rule = CapacityRule(model_of(facts, kv.block_size))
    ranges = [LayerRange(a, b) for a in range(facts.num_layers) for b in range(a + 1, facts.num_layers + 1)]
    for kept in ranges:
        memory, _ = open_elastic(facts, kv)
        try:
            memory.open_kv(0, 0)
            dropped = [layer for layer in range(facts.num_layers) if layer not in kept]
            if dropped:
                memory.drop(dropped)
            else:
                memory.grow()
            claimed = rule.blocks(kept, facts.num_pages, facts.max_blocks)
            assert memory.num_blocks == claimed, f"layers {kept} of {facts}"
            for resident in (layers for layers in ranges if layers.covers(kept)):
                memory.reside([layer for layer in resident if layer not in kept], 0)
                memory.grow()
                claimed = rule.blocks(kept, facts.num_pages, facts.max_blocks, resident)
                assert memory.num_blocks == claimed, f"layers {kept} beside the parameters of {resident} of {facts}"
            check_ahead(rng, rule, memory, kept)
            memory.check_invariants()
        finally:
            memory.close()
