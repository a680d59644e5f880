"""The engine under random operations: its invariants hold after each one, and no surviving text is disturbed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from services.worker.engine.config import AddRefusal
from services.worker.policy.registry import SCHEDULERS, make_scheduler
from shared.types import FinishReason
from tests.support.engine_builders import engine_config, make_engine, new_sequence
from tests.support.engine_chaos import GUILTY_SEED, Chaos, UnrulyScheduler
from tests.support.engine_harness import EngineHarness

CASES = [(seed, prefix_caching) for prefix_caching, count in ((True, 12), (False, 6)) for seed in range(count)]
"""Seeds, with prefix caching and without."""


def chaotic_run(scheduler: str, depth: int, seed: int, *, prefix_caching: bool = True) -> tuple[Chaos, UnrulyScheduler]:
    random = np.random.default_rng([seed, depth, len(scheduler), prefix_caching])
    unruly = UnrulyScheduler(make_scheduler(scheduler), random)
    config = engine_config(
        max_batch_tokens=24,
        max_batch_rows=6,
        max_model_len=80,
        vocab_size=50,
        eos_token_ids=(1, 2),
        prefix_caching=prefix_caching,
    )
    engine = make_engine(unruly, num_blocks=int(random.integers(20, 40)), config=config)
    return Chaos(EngineHarness(engine, depth=depth), random), unruly


@pytest.mark.parametrize(("seed", "prefix_caching"), CASES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_survive_any_order_of_operations(scheduler: str, depth: int, seed: int, *, prefix_caching: bool) -> None:
    chaos, unruly = chaotic_run(scheduler, depth, seed, prefix_caching=prefix_caching)
    chaos.run(400)
    unruly.is_calm = True
    chaos.calm_down()
    harness = chaos.harness
    harness.judge()
    assert all(story.finish is not FinishReason.NONE for story in harness.stories.values())
    for story in harness.stories.values():
        if story.finish is FinishReason.ERROR:
            assert story.new.sampling.seed == GUILTY_SEED, "an innocent sequence was given up"
    assert harness.engine.blocks.num_free == harness.engine.blocks.num_usable
    assert harness.engine.log.num_used_chunks == 0


def test_the_random_operations_reach_every_kind_of_event() -> None:
    """Else the test above could pass because it does nothing."""
    counts: Counter[str] = Counter()
    for seed, prefix_caching in ((0, True), (1, True), (2, True), (3, True), (0, False), (1, False)):
        chaos, unruly = chaotic_run("chunked", 2, seed, prefix_caching=prefix_caching)
        chaos.run(400)
        unruly.is_calm = True
        chaos.calm_down()
        counts.update(chaos.counts)
        counts.update(story.finish.name for story in chaos.harness.stories.values())
        counts["preempted"] += chaos.harness.engine.stats.num_preemptions
        counts["tokens"] += chaos.harness.engine.stats.num_generated_tokens
        counts["found"] += chaos.harness.engine.stats.num_prefix_cache_hits
        counts["copies"] += chaos.harness.num_copies
    wanted = {
        "fork",
        "fork waits",
        "guilty",
        "bad luck",
        "cancel",
        "cancel in flight",
        "shrink held",
        "shrink free",
        "pin",
        "preempted",
    }
    assert wanted | {"STOP", "LENGTH", "CANCELLED", "ERROR"} <= set(counts)
    assert counts["preempted"] > 100
    assert counts["tokens"] > 1000
    assert counts["found"] > 300
    assert counts["copies"] > 8


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_everything_finishes_with_kv_for_only_one_request(scheduler: str) -> None:
    """9 blocks of 4 slots; each sequence needs KV for 20 + 16 - 1 = 35 tokens, so 9 blocks: all of them."""
    harness = EngineHarness(make_engine(scheduler, num_blocks=9))
    for name in range(8):
        assert not isinstance(harness.add(new_sequence(name, num_prompt=20, max_tokens=16)), AddRefusal)
    harness.drain(max_steps=8 * 40)
    harness.judge()
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(6))
def test_a_small_memory_delays_but_never_changes_a_text(scheduler: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    harness = EngineHarness(make_engine(scheduler, num_blocks=24, config=engine_config(max_model_len=96)))
    for name in range(16):
        num_prompt, max_tokens = int(random.integers(1, 50)), int(random.integers(1, 40))
        assert not isinstance(harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens)), AddRefusal)
    harness.drain()
    harness.judge()
    assert harness.engine.stats.num_finished == 16
