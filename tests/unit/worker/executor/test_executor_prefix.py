"""Engine and torch together in deterministic mode: cached prefixes and forks do not change a byte of any text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.executor.model_runner import ModelRunner
from services.worker.sequences.config import AddRefusal, NewSequence
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

BLOCK_SIZE = 8
MAX_ROWS = 48


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    shape = CheckpointShape(max_positions=256)
    return open_runner(shape, deterministic=True, block_size=BLOCK_SIZE, max_rows=MAX_ROWS, max_batch_rows=MAX_ROWS)


def engine_for(runner: ModelRunner, *, prefix_caching: bool, num_blocks: int = 400) -> Engine:
    return make_engine(
        num_blocks=min(num_blocks, runner.capacity.num_blocks),
        max_sequences=MAX_ROWS,
        max_batch_tokens=96,
        max_batch_rows=MAX_ROWS,
        max_model_len=runner.info.max_model_len,
        vocab_size=runner.info.vocab_size,
        block_size=BLOCK_SIZE,
        finished_kept=256,
        prefix_caching=prefix_caching,
    )


def texts(engine: Engine, runner: ModelRunner, sequences: list[NewSequence]) -> dict[str, list[int]]:
    """Run the sequences, all added at once, to their ends; return what each said."""
    for new in sequences:
        assert not isinstance(engine.registry.add(new), AddRefusal)
    while engine.table.num_sequences:
        batch = engine.next_batch(0.0)
        assert batch is not None
        engine.absorb(batch, runner.run(batch), 0.0)
        check_engine(engine)
    found = {new.request_id: engine.registry.replay(new.request_id, new.attempt, 0) for new in sequences}
    return {name: replayed[0].tolist() for name, replayed in found.items() if replayed is not None}


def sampled(name: int, prompt: list[int], **changes: object) -> NewSequence:
    new = new_sequence(name, prompt=prompt, **changes)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=new.sampling.max_tokens, temperature=0.8 * (name % 2), top_p=0.9, seed=name)
    return replace(new, sampling=sampling)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 384) for _ in range(count)]


def test_forty_at_once_with_a_common_beginning_say_the_same_with_and_without_the_cache(runner: ModelRunner) -> None:
    beginning = tokens(43, 0)
    sequences = [sampled(i, beginning + tokens(i % 12, i), max_tokens=6) for i in range(40)]
    plain = texts(engine_for(runner, prefix_caching=False), runner, sequences)
    engine = engine_for(runner, prefix_caching=True)
    assert texts(engine, runner, sequences) == plain
    assert engine.totals.num_prefix_cache_hits >= 39 * 40, "all but the first find 5 blocks"
    assert len({tuple(text) for text in plain.values()}) > 20


def test_the_same_prompt_again_a_next_turn_and_a_small_memory_say_the_same(runner: ModelRunner) -> None:
    """The second run of each request finds what the first one left; 24 blocks also bring preemptions."""
    prompts = [tokens(30, 1), tokens(30, 1) + tokens(21, 2), tokens(57, 3)]
    sequences = [sampled(i, prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    again = [sampled(i + 3, prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    plain = texts(engine_for(runner, prefix_caching=False), runner, sequences + again)
    turn = sampled(9, prompts[0] + plain["r0"] + tokens(5, 4), max_tokens=20)
    plain |= texts(engine_for(runner, prefix_caching=False), runner, [turn])
    for num_blocks in (400, 24):
        engine = engine_for(runner, prefix_caching=True, num_blocks=num_blocks)
        cached = texts(engine, runner, sequences) | texts(engine, runner, again)
        assert cached | texts(engine, runner, [turn]) == plain
        assert engine.totals.num_prefix_cache_hits > 0
        assert (engine.totals.num_preemptions > 0) == (num_blocks == 24)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forks_say_what_they_say_alone(runner: ModelRunner, *, prefix_caching: bool) -> None:
    """45 tokens: 5 full blocks are shared, and 4 tokens of the sixth are copied for each child."""
    prompt = tokens(45, 5)
    alone = [sampled(i, prompt, max_tokens=12) for i in (1, 3, 5, 7)]
    family = [sampled(i, prompt, max_tokens=12, fork_of=None if i == 1 else 1) for i in (1, 3, 5, 7)]
    plain = texts(engine_for(runner, prefix_caching=False), runner, alone)
    engine = engine_for(runner, prefix_caching=prefix_caching)
    assert texts(engine, runner, family) == plain
    assert len({tuple(text) for text in plain.values()}) == 4
    assert engine.totals.num_steps == 12 + 1, "the prompt, a step in which the children begin, and the rest of theirs"
