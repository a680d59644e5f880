"""A modelled pipeline on the virtual clock: its time to the microsecond, texts under disturbance, broken stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from services.worker.contract.batch import Batch, BatchOutput, RowInit, TableDelta
from services.worker.contract.executor import BatchFailedError
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.engine.stats import take_stats
from services.worker.modelled.executor import FailureInjector
from services.worker.modelled.shadow_kv import TokenDraw
from services.worker.pipeline.pipeline import PipelineExecutor, PipelineStats
from services.worker.pipeline.stage_messages import StepDone
from services.worker.scheduling.registry import SCHEDULERS
from services.worker.sequences.config import NewSequence
from shared.cost import CostModel, load_profile
from shared.layers import LayerRange, check_tiling, even_split
from shared.types import FinishReason, SamplingParams
from sim.devices.channel import ModelledLink
from sim.devices.modelled_pipeline import ModelledStages, PipelineParams, modelled_stages
from tests.support.engine_builders import engine_config, new_sequence
from tests.support.engine_live import STEP_S, LivePipeline, live_pipeline
from tests.support.seeds import first_of

pytestmark = pytest.mark.virtual_time

DRAW = TokenDraw.of_vocabulary(1000, (), 3)
A800 = load_profile("qwen2.5-14b-tp1-a800").cost


# Layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"), [(7, 2, [4, 3]), (7, 3, [3, 2, 2]), (48, 3, [16] * 3), (5, 5, [1] * 5)]
)
def test_an_even_split_gives_the_longer_ranges_to_the_first(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    ranges = even_split(num_layers, num_stages)
    check_tiling(ranges, num_layers)
    assert [len(layers) for layers in ranges] == sizes


@pytest.mark.parametrize(
    "ranges", [[LayerRange(0, 2), LayerRange(3, 6)], [LayerRange(0, 6), LayerRange(2, 6)], [LayerRange(0, 5)], []]
)
def test_ranges_that_are_not_all_layers_once_are_no_pipeline(ranges: list[LayerRange]) -> None:
    with pytest.raises(ValueError, match="layer"):
        check_tiling(ranges, 6)
    with pytest.raises(ValueError, match="no range"):
        LayerRange(3, 3)


# Time


def prefill(step_id: int, num_tokens: int) -> Batch:
    """A prompt of its own row, in a block of its own."""
    row = np.array([step_id], dtype=np.int32)
    return Batch(
        step_id=step_id,
        rows=row,
        num_tokens=np.array([num_tokens], dtype=np.int32),
        start=row * 0,
        tokens=np.arange(num_tokens, dtype=np.int32),
        sample=np.array([True]),
        table_delta=TableDelta(row, row * 0, row),
        admits=(RowInit(step_id, SamplingParams(max_tokens=9)),),
    )


def flat_stages(step_s: float, link: ModelledLink | None = None) -> ModelledStages:
    """Two stages that take half of that for any step."""
    cost = CostModel(g0_s=step_s, b0_s=0, g1_s=0, b1_s=0, d_s=0, a_s=0)
    return modelled_stages(PipelineParams(cost, 6, even_split(6, 2), 8, 16, DRAW, link or ModelledLink()))


def executor_of(stages: ModelledStages) -> PipelineExecutor:
    return PipelineExecutor(stages, asyncio.get_running_loop().time)


def recurrence(durations: list[list[float]], hop_s: list[float]) -> list[list[float]]:
    """Return when each step leaves each stage: F[k][s] = max(F[k-1][s], F[k][s-1] + hop) + duration."""
    done: list[list[float]] = []
    for k, steps in enumerate(durations):
        line: list[float] = []
        for stage, duration_s in enumerate(steps):
            arrives_s = line[-1] + hop_s[k] if stage else 0.0
            line.append(max(done[-1][stage] if done else 0.0, arrives_s) + duration_s)
        done.append(line)
    return done


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
async def test_steps_leave_the_pipeline_when_the_recurrence_says(seed: int, num_stages: int) -> None:
    """Eight prompts at once; each activation takes its bytes by the bandwidth, then the latency.

    The wire is never the bottleneck here, so that it appears as a hop only. Messages to and from the leader take the
    latency too: the stages behind have their batches before the activations arrive, but the tokens come back later.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 2000, 8).tolist()
    link = ModelledLink(latency_s=0.0005, bytes_per_s=1e9, token_bytes=1024)
    params = PipelineParams(A800, 48, even_split(48, num_stages), 16, 2048, DRAW, link, head_layers=2.8)
    loop, executor, ended = asyncio.get_running_loop(), executor_of(modelled_stages(params)), list[float]()
    futures = [executor.submit(prefill(k, size)) for k, size in enumerate(sizes)]
    for future in futures:
        future.add_done_callback(lambda _: ended.append(loop.time()))
    outputs = [await future for future in futures]
    await executor.close()
    durations = [[stage.step_s(prefill(0, size)) for stage in modelled_stages(params).devices] for size in sizes]
    done = recurrence(durations, [0.0005 + size * 1024 / 1e9 for size in sizes])
    back_s = 0.0005 if num_stages > 1 else 0.0
    assert ended == pytest.approx([line[-1] + back_s for line in done])
    assert [output.duration_s for output in outputs] == pytest.approx([sum(line) for line in durations])
    stats, span_s = executor.stats, done[-1][-1] + back_s
    busy_s = [sum(line[stage] for line in durations) for stage in range(num_stages)]
    assert stats.span_s == pytest.approx(span_s)
    assert stats.busy_s == pytest.approx(busy_s)


def bubble_ratio(stats: PipelineStats) -> float:
    return 1 - sum(stats.busy_s) / (len(stats.busy_s) * stats.span_s)


async def test_a_slow_wire_carries_one_activation_after_the_other() -> None:
    """Activations of 0.5 s on stages of 0.05 s each: steps arrive every 0.5 s."""
    executor = executor_of(flat_stages(0.1, ModelledLink(bytes_per_s=100, token_bytes=10)))
    ended = []
    for future in [executor.submit(prefill(k, 5)) for k in range(3)]:
        await future
        ended.append(asyncio.get_running_loop().time())
    await executor.close()
    assert ended == pytest.approx([0.05 + 0.5 + 0.05, 1.1, 1.6])


async def test_span_counts_only_the_time_with_a_batch_in_flight() -> None:
    executor = executor_of(flat_stages(0.1))
    for k in range(2):
        await asyncio.sleep(7)
        await executor.submit(prefill(k, 5))
    await executor.close()
    stats = executor.stats
    assert stats.span_s == pytest.approx(0.2)
    assert bubble_ratio(stats) == pytest.approx(0.5), "one batch at a time keeps one of two stages busy"


async def test_span_counts_a_batch_that_is_under_way_and_ends_when_the_pipeline_breaks() -> None:
    stages = flat_stages(10)
    executor, seen = executor_of(stages), list[PipelineStats]()
    future = executor.submit(prefill(0, 5))
    for happens in (lambda: None, lambda: stages.servers[0].die("its process ended"), lambda: None):
        await asyncio.sleep(2)
        happens()
        await asyncio.sleep(0)
        seen.append(executor.stats)
    with pytest.raises(BatchFailedError):
        await future
    await executor.close()
    assert [stats.span_s for stats in seen] == pytest.approx([2, 4, 4])


# Lanes

NUM_REQUESTS = 48


async def serve(num_stages: int, num_lanes: int, scheduler: str = "chunked") -> LivePipeline:
    """Serve prompts of 40 tokens with 60 outputs each on Qwen2.5-14B split over A800s.

    After half a second somebody holds the gate, as a plan does: then all sequences wait to go on at once.
    """
    config = engine_config(
        max_sequences=64, max_batch_tokens=512, max_batch_rows=64, block_size=16, num_lanes=num_lanes, vocab_size=1000
    )
    link = ModelledLink(5e-5, 25e9, 10_240)
    async with live_pipeline(
        num_stages, config=config, cost=A800, num_blocks=1000, link=link, scheduler=scheduler
    ) as live:
        new = [live.add(new_sequence(i, num_prompt=40, max_tokens=60, arrival_s=0.0)) for i in range(NUM_REQUESTS)]
        await asyncio.sleep(0.5)
        async with live.gate.exclusive():
            assert not live.engine.flights
        await live.until_idle()
        for each in new:
            assert live.texts[each.stream] == live.undisturbed(each)
    return live


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("scheduler", ["chunked", "fcfs"])
async def test_decodes_spread_over_lanes_leave_few_bubbles(scheduler: str, num_stages: int) -> None:
    live = await serve(num_stages, num_stages, scheduler=scheduler)
    decodes = [batch.rows.size for batch in live.batches if (batch.num_tokens == 1).all()]
    middle = decodes[len(decodes) // 2 : len(decodes) * 3 // 4]
    assert set(middle) == {NUM_REQUESTS // num_stages}, "every lane has its equal share"
    assert bubble_ratio(live.executor.stats) < 0.08


async def test_without_lanes_the_stages_wait_for_each_other() -> None:
    """The oracle of the test above: once all decodes are in one batch they stay there: one stage of two is idle."""
    assert bubble_ratio((await serve(2, 1)).executor.stats) > 0.3


async def test_lanes_that_became_unequal_are_equal_again_soon() -> None:
    """Half of the sequences, all of one lane at the time, end early."""
    config = engine_config(max_sequences=64, max_batch_tokens=64, max_batch_rows=64, num_lanes=2)
    async with live_pipeline(2, config=config, num_blocks=600) as live:
        for i in range(32):
            live.add(new_sequence(i, num_prompt=1, max_tokens=60, arrival_s=0.0))
        await asyncio.sleep(1.0)
        for row in next(iter(live.engine.flights)).rows.tolist():
            live.engine.registry.cancel(*live.engine.table.sequence(row).key)
        seen = len(live.batches)
        await live.until_idle()
        assert {batch.rows.size for batch in live.batches[seen + 3 : seen + 12]} == {8}


# Texts


def failing(seed: int, ratio: float) -> FailureInjector:
    random = np.random.default_rng(seed)
    return lambda batch: "bad luck" if batch.rows.size > 1 and random.random() < ratio else None


async def borrow_tail(live: LivePipeline, num_blocks: int) -> None:
    """Take memory from under blocks beyond what is held and a few more, as a plan does, and give it back."""
    engine = live.engine
    engine.memory.limit(max(engine.blocks.num_used, num_blocks))
    live.loop.wake()
    for _ in range(20):
        if engine.blocks.is_within_limit:
            break
        await asyncio.sleep(STEP_S)
    async with live.gate.exclusive():
        assert engine.blocks.is_within_limit
        for device in live.stages.devices:
            device.kv.poison(np.arange(engine.capacity_blocks, device.kv.num_blocks, dtype=np.int32))
    await asyncio.sleep(3 * STEP_S)
    engine.memory.limit(None)


def next_sequence(random: np.random.Generator, name: int, alive: list[NewSequence]) -> NewSequence:
    """A new sequence, which may fork one that is alive."""
    prompt = random.integers(0, 50, int(random.integers(1, 50))).tolist()
    parent = alive[int(random.integers(len(alive)))] if alive and random.random() < 0.3 else None
    return new_sequence(
        name,
        prompt=prompt if parent is None else parent.prompt.tolist(),
        max_tokens=int(random.integers(1, 30)),
        channel=name % 2,
        arrival_s=0.0,
        fork_of=None if parent is None else parent.request_id[1:],
    )


async def disturbed(
    scheduler: str, num_stages: int, num_host_blocks: int, *, prefix_caching: bool, seed: int = 0
) -> LivePipeline:
    """Too little memory, steps that fail on any stage, cancels, silent dispatchers, forks, and work at the gate.

    Without host memory some of the device's goes and comes back; the longest sequence takes 20 blocks for 77 tokens.
    """
    random = np.random.default_rng([num_stages, num_host_blocks, prefix_caching, seed])
    config = engine_config(
        max_batch_tokens=24, max_batch_rows=6, max_model_len=96, prefix_caching=prefix_caching, num_lanes=num_stages
    )
    failures = [failing(10 * seed + i, 0.04) for i in range(num_stages)]
    link = ModelledLink(0.004, 1e6, 100)
    async with live_pipeline(
        num_stages,
        scheduler=scheduler,
        config=config,
        num_blocks=30,
        link=link,
        failures=failures,
        num_host_blocks=num_host_blocks,
    ) as live:
        alive: list[NewSequence] = []
        for name in range(24):
            new = next_sequence(random, name, alive)
            while len(live.engine.registry.row_of) >= 14:
                await asyncio.sleep(0.1)
            live.add(new)
            alive.append(new)
            await asyncio.sleep(float(random.random()) * 0.3)
            chance = random.random()
            if chance < 0.15:
                victim = alive.pop(int(random.integers(len(alive))))
                live.engine.registry.cancel(victim.request_id, victim.attempt)
            elif chance < 0.3:
                live.engine.pause(1)
            elif chance < 0.5:
                async with live.gate.exclusive():
                    assert not live.engine.flights
                    check_engine(live.engine)
            elif chance < 0.7:
                await borrow_tail(live, num_blocks=20)
            check_engine(live.engine)
            live.engine.resume(1)
            live.loop.wake()
        await live.until_idle()
        for new in alive:
            assert live.texts[new.stream] == live.undisturbed(new)
            assert live.ends[new.stream] is FinishReason.LENGTH
        check_engine(live.engine)
        assert not take_stats(live.engine).num_used_blocks
    return live


@pytest.mark.parametrize(
    ("num_host_blocks", "prefix_caching"), first_of([(60, True), (0, True), (0, False)], 1, in_ci=2)
)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_texts_are_undisturbed_whatever_happens(
    scheduler: str, num_stages: int, num_host_blocks: int, *, prefix_caching: bool
) -> None:
    live = await disturbed(scheduler, num_stages, num_host_blocks, prefix_caching=prefix_caching)
    assert live.engine.totals.num_generated_tokens > 100


@pytest.mark.slow
async def test_what_disturbs_them_happens() -> None:
    moved = [(await disturbed("chunked", stages, 0, prefix_caching=True)).num_moved for stages in (1, 2, 3)]
    assert sum(moved) > 20
    stats = [take_stats((await disturbed("chunked", stages, 60, prefix_caching=True)).engine) for stages in (1, 2, 3)]
    assert all(one.totals.num_failed_steps for one in stats)
    assert sum(one.totals.num_preemptions for one in stats) > 10
    assert sum(one.totals.num_swap_ins for one in stats) > 3
    assert sum(one.totals.num_prefix_cache_hits for one in stats) > 100


# Broken pipelines


def lose_member(stages: ModelledStages) -> None:
    stages.servers[1].die("its process ended")


def lose_leader(stages: ModelledStages) -> None:
    stages.from_leader[2].cut("no route")


def lose_way_between(stages: ModelledStages) -> None:
    stages.activations[1].cut("cable pulled")


@pytest.mark.parametrize("breaks", [lose_member, lose_leader, lose_way_between])
@pytest.mark.parametrize("after_s", [0.0, 0.333, 1.0])
async def test_a_broken_pipeline_fails_all_lanes_and_blames_nobody(
    breaks: Callable[[ModelledStages], None], after_s: float
) -> None:
    kept: list[LivePipeline] = []

    async def until_broken() -> None:
        async with live_pipeline(3, num_host_blocks=20, link=ModelledLink(latency_s=0.01)) as live:
            kept.append(live)
            for name in range(9):
                live.add(new_sequence(name, max_tokens=99, arrival_s=0.0))
            await asyncio.sleep(after_s)
            breaks(live.stages)
            await live.until_idle()

    with pytest.raises(ExecutorBrokenError):
        await until_broken()
    (live,) = kept
    assert not live.ends
    assert not live.engine.flights
    check_engine(live.engine)
    assert len(live.engine.table.running) + len(live.engine.table.waiting) == 9
    with pytest.raises(BatchFailedError) as late:
        await live.executor.submit(prefill(0, 1))
    assert late.value.is_lost
    assert all(server._is_dead for server in live.stages.servers)


async def test_an_answer_out_of_turn_breaks_the_pipeline() -> None:
    stages = flat_stages(1)
    executor = executor_of(stages)
    futures = [executor.submit(prefill(0, 1)), executor.submit(prefill(1, 1))]
    stages._on_message(StepDone(BatchOutput(1, np.zeros(1, dtype=np.int32), 0.0), (0.0, 0.0)))
    for future in futures:
        with pytest.raises(BatchFailedError, match="answered step 1 out of order"):
            await future
    await executor.close()
