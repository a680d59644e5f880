"""Two requests in one KV block: whatever happens to either, every text is what the request says alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from services.worker.blocks.shared_blocks import SharedBlocks
from shared.api_keys import Tier
from tests.sim.test_engine_properties import chaotic_run
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.seeds import first_of

FULL = ["bros", "bros-whole", "chunked"]
"""Some that have best effort give way, and one that does not."""


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows open whatever they can, also while blocks are free: else it happens seldom."""
    monkeypatch.setattr(SharedBlocks, "_num_lacking", lambda _blocks, _held, ends: ends.size)


def crowd(scheduler: str, seed: int, *, num_host_blocks: int = 0, **engine: Any) -> EngineHarness:
    """Return an engine that has served conversations and documents, whose answers need more than its 22 blocks hold."""
    random = np.random.default_rng([seed, num_host_blocks])
    limits: dict[str, Any] = {
        "max_batch_tokens": 64,
        "max_batch_rows": 16,
        "max_model_len": 200,
        "max_sequences": 24,
        "num_blocks": 22,
    }
    limits |= {"block_size": 16, "shares_blocks": True, "num_host_blocks": num_host_blocks, "cost": per_token(1e-3)}
    harness = make_harness(scheduler, **{**limits, **engine})
    for name in range(24):
        tier = Tier.FLEX if random.random() < 0.5 else Tier.DEFAULT
        num_prompt, max_tokens = int(random.integers(4, 12)), int(random.integers(30, 90))
        harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens, seed=name, tier=tier))
        for _ in range(random.integers(0, 4)):
            harness.step()
    harness.finish()
    return harness


def shared(harness: EngineHarness) -> Counter[str]:
    blocks, totals = harness.engine.blocks, harness.engine.totals
    idle = not harness.engine.table.num_sequences
    assert not (idle and isinstance(blocks, SharedBlocks) and len(blocks.both_ends)), "somebody who is gone has a block"
    num_copied = harness.num_copies + harness.num_moved
    return Counter(opened=totals.num_opened_blocks, met=totals.num_met_blocks, copied=num_copied)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("depth", "num_host_blocks"), first_of([(1, 0), (2, 60), (2, 0), (1, 60)], in_ci=2))
@pytest.mark.parametrize("scheduler", FULL)
def test_requests_meet_in_blocks_and_nobody_loses_a_token(scheduler: str, depth: int, num_host_blocks: int) -> None:
    """No copy is made but where two meet: nobody forks, and prefixes are not kept."""
    found = Counter[str]()
    for seed in range(4):
        harness = crowd(scheduler, seed, num_host_blocks=num_host_blocks, depth=depth, prefix_caching=False)
        counts = shared(harness)
        assert counts["opened"] > 0, f"seed {seed}"
        assert counts["copied"] == counts["met"]
        found += counts
    assert found["met"] > 1


def test_other_ends_are_opened_when_no_block_is_free() -> None:
    assert shared(crowd("chunked", 0, prefix_caching=False))["opened"] > 2
    assert not shared(crowd("chunked", 0, num_blocks=200, prefix_caching=False))["opened"]


def test_without_sharing_blocks_there_is_none() -> None:
    """Nobody copies a block of another one, who forks nobody."""
    assert not shared(crowd("bros", 0, shares_blocks=False, prefix_caching=False)).total()


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("num_host_blocks", first_of([20, 0], in_ci=1))
@pytest.mark.parametrize("scheduler", first_of(["bros", "round-robin", "bros-whole", "chunked"], in_ci=2))
def test_texts_survive_any_order_of_operations(scheduler: str, num_host_blocks: int) -> None:
    """With prefixes, forks, copies to the host and back, failed steps, ends of blocks lost, limits that come and go."""
    found = Counter[str]()
    for seed in range(8):
        sizes: dict[str, Any] = {"block_size": (8, 16)[seed % 2], "num_blocks": (24, 14)[seed % 2]}
        case = chaotic_run(
            scheduler,
            1 + seed % 3 % 2,
            seed,
            prefix_caching=seed % 3 > 0,
            num_host_blocks=num_host_blocks,
            shares_blocks=True,
            whims=0.3,
            cost=per_token(1e-3),
            **sizes,
        )
        case.live_through()
        found += shared(case.harness)
        found += case.counts
    assert found["opened"] > 16, found
    assert found["met"] > 4, found
    assert found["fork"] > 0, found
