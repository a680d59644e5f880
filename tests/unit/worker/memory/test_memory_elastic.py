"""Memory that drops and restores layers: nothing is lost, nothing is counted twice, and faults change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.worker.memory.change import MemoryLostError
from services.worker.memory.cuda import CudaMemory
from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.posix import PosixMemory
from services.worker.memory.spans import Spans
from tests.support.elastic_cases import CPU, SHAPES, Contents, Faults, MadeUpError, open_elastic, snapshot
from tests.support.elastic_story import CHANGES, Story
from tests.support.fake_cuda_driver import GRANULARITY, FakeDriver
from tests.support.seeds import first_of

PAGE = 4096
Act = Callable[[], object]
Opener = Callable[..., tuple[ElasticMemory, KVCache, Faults]]


def facts_of(
    kv: KvShape = SHAPES[0], num_pages: int = 40, layers: tuple[int, ...] = (5000, 8192, 3000), max_blocks: int = 400
) -> MemoryFacts:
    return MemoryFacts(layers, 3 * PAGE, PAGE, PAGE, kv.block_bytes, PAGE, num_pages, max_blocks)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Return what opens a memory with so many blocks: it, its cache and its faults; closed at the end."""
    with ExitStack() as memories:

        def opening(num_blocks: int, kv: KvShape = SHAPES[0], **facts: Any) -> tuple[ElasticMemory, KVCache, Faults]:
            memory, faults = open_elastic(facts_of(kv, **facts), kv)
            memories.callback(memory.close)
            return memory, memory.open_kv(num_blocks, 0), faults

        yield opening


@pytest.mark.parametrize("seed", first_of(range(40), 5))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    Story(seed).live(25)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_nothing_is_lost_behind_the_calls_of_a_gpus_driver(seed: int) -> None:
    Story(seed, GRANULARITY, lambda count: CudaMemory(GRANULARITY, count, CPU, FakeDriver(2**30))).live(12)


@pytest.mark.slow
def test_random_lives_meet_faults_and_every_kind_of_change() -> None:
    """The two tests above would say little otherwise."""
    stories = [Story(seed) for seed in range(5)]
    for story in stories:
        story.live(25)
    assert set.union(*(story.done for story in stories)) == set(CHANGES)
    assert sum(story.num_faults for story in stories) > 10
    assert max(story.most_leaving for story in stories) >= 2


ACTS: dict[str, Callable[[ElasticMemory], object]] = {
    "drop": lambda memory: memory.drop([1]),
    "leave": lambda memory: memory.leave([1], Spans.of((0, 3)), 2),
    "restore": lambda memory: memory.restore([1], 2),
    "reside": lambda memory: memory.reside([1, 2], 2),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_fault_at_any_step_is_undone(name: str, opened: Opener) -> None:
    memory, cache, faulty = opened(6)
    contents = Contents(memory, cache, np.random.default_rng(0))
    if name in ("restore", "reside"):
        gone = [1] if name == "restore" else [1, 2]
        usable = memory.usable
        memory.leave(gone, usable, 0)
        contents.leave(gone, usable, 0)
        memory.grow()
        contents.fill()
    before, step = snapshot(memory), 0
    while True:
        faulty.fail_after(step)
        try:
            ACTS[name](memory)
        except MadeUpError:
            assert snapshot(memory) == before
            contents.check()
            step += 1
        else:
            break
    assert step >= 5  # so many calls there are at least
    assert snapshot(memory) != before


def test_a_memory_whose_change_could_not_be_undone_is_not_used_again(opened: Opener) -> None:
    memory, _, faulty = opened(6)
    faulty.fail_after(5, 2)
    with pytest.raises(MemoryLostError, match="MadeUpError"):
        memory.drop([1])
    with pytest.raises(AssertionError, match="must start anew"):
        memory.grow()


def test_dropped_parameters_back_blocks_of_the_layers_that_stay(opened: Opener) -> None:
    """40 pages of 4 KiB, blocks of 2 KiB on each side.

    Parameters: 3 pages outside, 2 + 2 + 1 for the layers; 4 blocks take 2 pages on each of 6 sides, 12. 20 are free.
    Without layer 1 its 2 pages and all 4 of its KV go to 4 sides: 26 / 4 = 6 pages more, 8 in all, 16 blocks; 2 are
    left. With its KV of 3 blocks still being read (2 pages on each side) it is 22 / 4: 5 more, 14 blocks.
    """
    memory, cache, _ = opened(4)
    assert (memory.num_blocks, memory._pool.num_free, memory.holding.layers) == (4, 20, (0, 1, 2))
    memory.drop([1])
    assert (memory.num_blocks, memory._pool.num_free, memory.holding.layers) == (16, 2, (0, 2))
    assert (cache.num_blocks, cache.keys[0].shape) == (16, (16, 16, 2, 16))
    memory, *_ = opened(4)
    memory.leave([1], Spans.of((0, 3)), 0)
    memory.grow()
    assert (memory.num_blocks, memory._pool.num_free) == (14, 2)
    memory.fill()
    assert (memory.num_blocks, memory._pool.num_free) == (16, 2)


def test_embedding_and_head_go_with_the_first_and_the_last_layer(opened: Opener) -> None:
    """Outside of the layers: 1 page for the first stage, 2 for the last."""
    memory, *_ = opened(0)
    outer = memory.parameters(None, 3 * PAGE)
    outer[:] = torch.arange(3 * PAGE, dtype=torch.uint8)
    free = memory._pool.num_free
    memory.drop([2])
    memory.shrink(0)
    assert memory._pool.num_free == free + 1 + 2
    assert memory.restore([2], 0) == Spans.of((PAGE, 3 * PAGE))
    assert outer[PAGE - 1] == (PAGE - 1) % 256
    memory.drop([0, 2])
    memory.shrink(0)
    assert memory._pool.num_free == free + 3 + 1 + 2
    assert memory.restore([0], 0) == Spans.of((0, PAGE))


def test_parameters_lie_beside_blocks_and_become_blocks_again(opened: Opener) -> None:
    """40 pages of 4 KiB, blocks of 2 KiB on each side, as above: layer 1 is dropped, 8 pages on each of 4 sides.

    Its 2 pages come back beside: 40 - 3 - 5 = 32 pages for 4 sides are 8 each, as 2 were left. All three beside layer 0
    alone: 32 / 2 = 16 pages on each side, 32 blocks, of 36 that layer 0 has with (40 - 1 - 2) / 2 = 18 pages.
    """
    memory, cache, _ = opened(4)
    memory.drop([1])
    assert memory.reside([1], 16) == Spans()
    assert (memory.num_blocks, memory._pool.num_free) == (16, 0)
    assert (memory.holding.layers, memory.holding.resident) == ((0, 2), (0, 1, 2))
    memory.reside([], 16)
    memory.drop([2])
    assert (memory.num_blocks, memory._pool.num_free) == (36, 1)
    assert memory.reside([1, 2], 32) == Spans.of((PAGE, 3 * PAGE))
    assert (memory.num_blocks, cache.num_blocks, cache.layers) == (32, 32, (0,))
    memory.parameters(1, 8192)[:] = 7
    assert memory.restore([1], 4) == Spans(), "what the last stage needs is there already"
    assert (memory.num_blocks, memory.holding.layers, memory.holding.resident) == (16, (0, 1), (0, 1, 2))
    assert (memory.parameters(1, 8192) == 7).all()


def test_what_is_not_possible_is_refused_and_changes_nothing(opened: Opener) -> None:
    memory, *_ = opened(6)
    memory.drop([1])
    before = snapshot(memory)
    refusals: list[tuple[type[Exception], str, Act]] = [
        (ValueError, "not among those held", lambda: memory.drop([1])),
        (ValueError, "not among those held", lambda: memory.drop([7])),
        (ValueError, "has to keep a layer", lambda: memory.drop([0, 2])),
        (ValueError, "multiples of 2, not by 3", lambda: memory.leave([0], memory.usable, 3)),
        (ValueError, "there are 400", lambda: memory.leave([0], memory.usable, 390)),
        (ValueError, "cannot be kept", lambda: memory.shrink(memory.num_blocks + 1)),
        (ValueError, "cannot be kept", lambda: memory.shrink(-1)),
        (ValueError, "cannot come back", lambda: memory.restore([0], 0)),
        (ValueError, "cannot come back", lambda: memory.restore([3], 0)),
        (ValueError, "cannot come back", lambda: memory.restore([], 0)),
        (NotEnoughPagesError, "the budget is 40", lambda: memory.restore([1], memory.num_blocks)),
        (ValueError, "cannot lie beside", lambda: memory.reside([0], 0)),
        (ValueError, "cannot lie beside", lambda: memory.reside([3], 0)),
        (ValueError, "cannot be kept", lambda: memory.reside([1], memory.num_blocks + 1)),
    ]
    for kind, message, act in refusals:
        with pytest.raises(kind, match=message):
            act()
        assert snapshot(memory) == before


def test_a_budget_that_does_not_hold_the_model_is_refused() -> None:
    with pytest.raises(NotEnoughPagesError, match="8 pages are needed, the budget is 7"):
        open_elastic(facts_of(num_pages=7), SHAPES[0])
    memory, _ = open_elastic(facts_of(num_pages=20), SHAPES[0])
    with pytest.raises(NotEnoughPagesError, match="8 pages are needed, the budget is 7"):
        memory.open_kv(1, 12 * PAGE + 1)
    with pytest.raises(NotEnoughPagesError):
        memory.open_kv(5, 0)
    with pytest.raises(ValueError, match="beyond the 400 that could"):
        memory.open_kv(401, 0)
    cache = memory.open_kv(4, 0)
    assert cache.num_blocks == 4
    memory.close()


def test_facts_that_contradict_each_other_are_refused() -> None:
    backend = PosixMemory(PAGE, 40)
    with pytest.raises(ValueError, match="not those of the memory"):
        ElasticMemory(facts_of(num_pages=41), SHAPES[0], backend)
    with pytest.raises(ValueError, match="are not of 2048"):
        ElasticMemory(facts_of(), SHAPES[1], backend)
    memory = ElasticMemory(facts_of(), SHAPES[0], backend)
    with pytest.raises(ValueError, match="are not the 5000 of these"):
        memory.parameters(0, 4999)
    memory.close()


def test_a_large_drop_is_few_calls() -> None:
    """What was mapped side by side moves as runs, not page by page: calls depend on layers, not on memory."""
    counts = []
    for scale in (1, 8):
        layers = (64 * PAGE * scale,) * 8
        facts = MemoryFacts(layers, PAGE, PAGE, 0, 2048, PAGE, 1 + 512 * scale + 256 * scale, 4096 * scale)
        memory, faulty = open_elastic(facts, SHAPES[0])
        memory.open_kv(32 * scale, 0)
        faulty.on_call = on_call = Mock()
        memory.drop(range(4))
        counts.append(on_call.call_count)
        memory.close()
    assert counts[1] <= counts[0] + 2
    assert counts[0] < 60
