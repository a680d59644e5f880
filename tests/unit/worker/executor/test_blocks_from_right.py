"""Whole steps over blocks that are filled from the right: the same logits and tokens, and no other slot is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.arrays import I32, I64
from services.worker.executor import inputs as inputs_module
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.selftest import prove_deterministic
from shared.errors import StartupError
from shared.types import SamplingParams
from tests.support.attention_cases import slot_written_out
from tests.support.checkpoints import CheckpointShape
from tests.support.live_groups import tokens_of
from tests.support.runner_driver import Driven, Driver
from tests.support.runners import MIB, open_runner, soil

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(max_positions=768)
WINDOWED = CheckpointShape(family="phi3", max_positions=768, extra={"sliding_window": 37})
KINDS: dict[str, dict[str, Any]] = {
    "best": {},
    "torch": {"kernels": "torch"},
    "torch, fixed shapes": {"kernels": "torch", "deterministic": True},
}
SLOW_LAST = [*list(KINDS)[:2], pytest.param("torch, fixed shapes", marks=pytest.mark.slow)]


def clean_runner(shape: CheckpointShape, **changes: Any) -> ModelRunner:
    """Return a runner whose KV is no number wherever nothing was written."""
    runner = open_runner(shape, memory_bytes=16 * MIB, **changes)
    soil(runner)
    return runner


def pools(runner: ModelRunner) -> list[torch.Tensor]:
    return [pool.flatten(0, 1).clone() for pool in runner.cache.pools()]


def random_steps(driver: Driver, seed: int, num_steps: int) -> list[Driven]:
    """Decode and prefill random sequences, in chunks; the same ones for a seed."""
    random = np.random.default_rng(seed)
    vocab = SHAPE.vocab_size
    sequences = [driver.add(random.integers(3, vocab, int(random.integers(1, 60))).tolist()) for _ in range(5)]
    for _ in range(num_steps):
        picked = random.permutation(5)[: int(random.integers(1, 6))].tolist()
        left = [len(sequences[i].tokens) - sequences[i].num_computed for i in picked]
        counts = [int(random.integers(1, min(each, 15) + 1)) for each in left]
        follows = [int(random.integers(3, vocab)) if n == each else None for n, each in zip(counts, left, strict=True)]
        driver.step_logits([(sequences[i], n) for i, n in zip(picked, counts, strict=True)], follows)
    return sequences


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPE, WINDOWED], ids=["all keys", "window"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_blocks_filled_from_the_left(kind: str, shape: CheckpointShape, dtype: str) -> None:
    """Half of the blocks are filled from the right; a sequence has blocks of both kinds."""
    found = []
    for share in (0.0, 0.5):
        runner = clean_runner(shape, dtype=dtype, **KINDS[kind])
        found.append(random_steps(Driver(runner, seed=3, num_blocks=64, from_right=share), seed=3, num_steps=40))
    assert any(entry < 0 for sequence in found[1] for entry in sequence.blocks)
    for ordinary, other in zip(*found, strict=True):
        assert [max(entry, ~entry) for entry in other.blocks] == ordinary.blocks
        assert len(ordinary.logits) > 3
        for expected, logits in zip(ordinary.logits, other.logits, strict=True):
            assert torch.equal(logits, expected)


def both_ways(runner: ModelRunner, entries: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[Driven]]:
    """Let two sequences of 22 and 23 tokens generate side by side in these entries; return their tokens too."""
    driver = Driver(runner)
    drawn = SamplingParams(max_tokens=9, temperature=1.0, seed=5)
    sequences = [driver.add(tokens_of(1, 22), drawn), driver.add(tokens_of(2, 23), drawn)]
    for sequence, table in zip(sequences, entries, strict=True):
        driver.give(sequence, table, 0)
    driver.step([(sequences[0], 22), (sequences[1], 9)])
    driver.step([(sequences[1], 14)])
    for _ in range(num_tokens - 1):
        driver.step([(sequence, 1) for sequence in sequences])
    return [sequence.output for sequence in sequences], sequences


@pytest.mark.parametrize("kind", SLOW_LAST)
def test_two_sequences_share_a_block_from_both_ends_until_it_is_full(kind: str) -> None:
    """Blocks of 16: 6 tokens from the left and 7 from the right, then one more of each, and one slot stays free.

    The last token of either is not computed yet. Everything outside of their own slots stays what it was.
    """
    ordinary, shared = (clean_runner(SHAPE, **KINDS[kind]) for _ in range(2))
    expected, _ = both_ways(ordinary, [[3, 7], [4, 9]], 2)
    found, sequences = both_ways(shared, [[3, 7], [~4, ~7]], 2)
    assert found == expected
    own = [
        slot_written_out(sequence.blocks[p // 16], p, 16)
        for sequence in sequences
        for p in range(sequence.num_computed)
    ]
    assert len(own) == len(set(own)) == 23 + 24
    assert set(range(7 * 16, 8 * 16)) - set(own) == {7 * 16 + 7}
    for pool in pools(shared):
        is_written = ~pool.flatten(1).isnan().any(dim=1)
        assert is_written.nonzero().flatten().tolist() == sorted(own)


@pytest.mark.parametrize("kind", SLOW_LAST)
def test_every_slot_holds_what_it_holds_from_the_left(kind: str) -> None:
    """The KV of a sequence, gathered by its positions, has the same bits."""
    kept = []
    for entries in ([[3, 7], [4, 9]], [[~3, 7], [4, ~7]]):
        runner = clean_runner(SHAPE, **KINDS[kind])
        _, sequences = both_ways(runner, entries, 1)
        for sequence in sequences:
            slots = [slot_written_out(sequence.blocks[p // 16], p, 16) for p in range(sequence.num_computed)]
            kept.append([pool[slots] for pool in pools(runner)])
    for first, second in zip(kept[:2], kept[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.slow
def test_the_proof_at_the_start_finds_a_platform_that_writes_such_blocks_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if new keys of a block from the right went to its slots from the left."""
    runner = open_runner(SHAPE, deterministic=True, kernels="torch")
    prove_deterministic(runner, 96)

    def wrong(entries: I32, positions: I64, size: int) -> I64:
        return np.asarray(np.where(entries < 0, ~entries, entries) * size + positions % size, dtype=np.int64)

    monkeypatch.setattr(inputs_module, "slots_of", wrong)
    with pytest.raises(StartupError, match="deterministic"):
        prove_deterministic(runner, 96)
