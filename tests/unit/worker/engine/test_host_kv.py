"""KV of a real model that goes to host memory and comes back into other blocks: the text goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from services.worker.contract.executor import CopyFailedError, HostCopy
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import EngineStats, take_stats
from services.worker.executor import model_runner
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.thread import ThreadExecutor
from services.worker.memory import host_kv
from services.worker.memory.host_kv import STAGED_BLOCKS, HostKV
from services.worker.memory.kv_cache import KVCache
from services.worker.sequences.config import NewSequence
from shared.errors import StartupError
from tests.support.attention_cases import attention_spec
from tests.support.checkpoints import CheckpointShape
from tests.support.engine_builders import engine_config, make_engine, new_sequence
from tests.support.overlap import answers_of
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner

pytestmark = pytest.mark.kernels

PROMPT = list(range(5, 55))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return open_runner(CheckpointShape(), host_memory_bytes=MIB)


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


@pytest.mark.parametrize("count", [1, STAGED_BLOCKS - 1, STAGED_BLOCKS, 2 * STAGED_BLOCKS + 3])
def test_blocks_are_gathered_and_sent_as_on_a_gpu(count: int) -> None:
    """In both directions at once, from a thread each, to the bit and to no other block."""
    num_blocks, random = 60, np.random.default_rng(count)
    cache = KVCache(attention_spec((2, 1, 8), (None, None)), num_blocks, 4, torch.bfloat16, torch.device("cpu"))
    for pool in cache.pools():
        pool.copy_(torch.from_numpy(random.standard_normal(pool.shape)))
    before = [pool.clone() for pool in cache.pools()]
    host = HostKV(cache, num_blocks, staged=True)
    assert host.is_beside
    places = torch.from_numpy(random.permutation(num_blocks))
    mine, other = places[:count], torch.from_numpy(random.permutation(num_blocks))[:count]
    host.store(mine, other)
    later, elsewhere = torch.arange(num_blocks), torch.from_numpy(random.permutation(num_blocks))
    with ThreadPoolExecutor(2) as threads:
        kept = [int(block) for block in range(num_blocks) if block not in other.tolist()]
        stored = threads.submit(host.store, later[: len(kept)], torch.tensor(kept, dtype=torch.int64))
        fetched = threads.submit(host.fetch, other, elsewhere[:count])
        stored.result()
        fetched.result()
    untouched = elsewhere[count:]
    for pool, was in zip(cache.pools(), before, strict=True):
        assert torch.equal(pool[elsewhere[:count]], was[mine])
        assert torch.equal(pool[untouched], was[untouched])
    assert host.measure_copy_s() > 0


@pytest.mark.slow
def test_the_runner_says_how_much_host_memory_there_is(runner: ModelRunner) -> None:
    host = runner.capacity.host
    assert host is not None
    assert host.block_kv_bytes == runner.info.bytes_per_block
    assert host.num_blocks == MIB // host.block_kv_bytes
    assert 0 < host.block_copy_s < 1
    assert open_runner(CheckpointShape()).capacity.host is None


def test_kv_comes_back_into_other_blocks_and_the_text_goes_on(runner: ModelRunner) -> None:
    whole = Driver(runner)
    expected = whole.add(PROMPT)
    whole.run(12, chunk=50, max_tokens=96)
    driver = Driver(runner, seed=3)
    sequence = driver.add(PROMPT, row=2)
    driver.step([(sequence, len(PROMPT))])
    for _ in range(4):
        driver.step([(sequence, 1)])
    old, host = list(sequence.blocks), list(range(2, 2 + len(sequence.blocks)))[::-1]
    runner.copy(HostCopy(0, ids(old), ids(host), to_host=True))
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[old] = torch.nan
    computed = sequence.num_computed
    driver.preempt(sequence)
    new = [block for block in range(min(runner.capacity.num_blocks, 4096) - 1, 0, -1) if block not in old][: len(old)]
    runner.copy(HostCopy(1, ids(new), ids(host), to_host=False))
    driver.give(sequence, new, computed)
    for _ in range(7):
        driver.step([(sequence, 1)])
    assert sequence.output == expected.output
    assert len(expected.output) == 12


def test_a_copy_that_torch_refuses_is_a_failed_copy(runner: ModelRunner) -> None:
    with pytest.raises(CopyFailedError, match="copy 7 failed: "):
        runner.copy(HostCopy(7, ids([0]), ids([10**6]), to_host=True))


def test_too_little_host_memory_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(StartupError, match=r"host_memory holds no KV block of [0-9]+ bytes"):
        open_runner(CheckpointShape(), host_memory_bytes=1)


def engine_of(runner: ModelRunner, num_blocks: int) -> Engine:
    host = runner.capacity.host
    assert host is not None
    limits = engine_config(max_batch_tokens=96, max_sequences=8, vocab_size=384, block_size=16, prefix_caching=False)
    return make_engine(num_blocks=num_blocks, host=host, config=limits)


def six() -> list[NewSequence]:
    return [new_sequence(name, num_prompt=20 + 3 * name, max_tokens=40) for name in range(6)]


def texts(num_blocks: int) -> tuple[dict[int, list[int]], EngineStats]:
    """Serve six prompts with so many KV blocks and some host memory; return the texts and the engine's counts."""
    runner = open_runner(CheckpointShape(), host_memory_bytes=MIB, deterministic=True)
    engine = engine_of(runner, num_blocks)
    for new in six():
        engine.registry.add(new)
    said: dict[int, list[int]] = {1000 + name: [] for name in range(6)}
    while engine.table.num_sequences:
        batch = engine.next_batch(0.0)
        for copy in engine.take_copies():
            runner.copy(copy)
            engine.copied(copy.copy_id, done=True)
        if batch is not None:
            events = engine.absorb(batch, runner.run(batch), 0.0)
            for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
                said[stream].append(token)
    check_engine(engine)
    runner.close()
    return said, take_stats(engine)


@pytest.mark.slow
def test_a_model_says_the_same_whether_its_kv_was_on_the_host_or_not() -> None:
    """Six of up to 74 tokens, 5 blocks each, in 12 blocks: most of them are away for a while."""
    swapped, stats = texts(12)
    whole, calm = texts(60)
    assert stats.totals.num_swap_outs == stats.totals.num_swap_ins >= 3
    assert stats.totals.num_recomputed_tokens == 0
    assert calm.totals.num_preemptions == 0
    assert swapped == whole
    assert all(len(text) == 40 for text in whole.values())


def delayed(copy: Callable[..., None], random: np.random.Generator, *, spoils: bool) -> Callable[..., None]:
    """Return a copy that is late; what it is to write has no numbers until then, if it spoils."""

    def late(lane: host_kv._Lane, device_or_host: torch.Tensor, other: torch.Tensor) -> None:
        if spoils:
            for pool in lane._cache.pools():
                pool[other] = torch.nan
        time.sleep(float(random.uniform(0, 0.02)))
        copy(lane, device_or_host, other)

    return late


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_texts_are_the_same_when_copies_run_beside_the_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a thread each way, each copy some steps late. What is on its way has no numbers meanwhile."""
    random = np.random.default_rng(seed)
    monkeypatch.setattr(host_kv._Lane, "store", delayed(host_kv._Lane.store, random, spoils=False))
    monkeypatch.setattr(host_kv._Lane, "fetch", delayed(host_kv._Lane.fetch, random, spoils=True))
    monkeypatch.setattr(model_runner, "HostKV", partial(HostKV, staged=True))
    said = []
    for num_blocks in (12, 60):
        runner = open_runner(CheckpointShape(), host_memory_bytes=MIB, deterministic=True)
        assert runner.copies_beside
        engine, executor = engine_of(runner, num_blocks), ThreadExecutor(runner, asyncio.get_running_loop())
        said.append(await answers_of(engine, executor, [six()], lambda _: None))
        await executor.close()
        assert (engine.totals.num_swap_ins > 0) == (num_blocks == 12)
    assert said[0] == said[1]
    assert all(len(text) == 40 for text, _, _ in said[0].values())
