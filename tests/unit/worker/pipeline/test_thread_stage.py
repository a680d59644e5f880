"""Stages in threads over sockets, with the shadow KV for a model: failures, copies, and ends of every kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np
import pytest

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, BatchOutput, RowInit, TableDelta
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy, HostMemory
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.engine.stats import take_stats
from services.worker.modelled.executor import FailureInjector
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, expected_outputs, layer_weight
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.stage import Ended, StageDevice
from services.worker.pipeline.stage_messages import Hidden
from shared.cost import StageCost
from shared.layers import even_split
from shared.types import SamplingParams
from sim.devices.channel import ModelledLink
from sim.devices.modelled_pipeline import ModelledStages
from sim.devices.modelled_stage import ModelledStage
from tests.support.engine_builders import engine_config, make_engine, new_sequence
from tests.support.live_groups import run_engine
from tests.support.staged_kv import NO_COST
from tests.support.thread_pipeline import WiredPipeline, wire_up

DRAW = TokenDraw.of_vocabulary(100, ())
NUM_BLOCKS, HOST_BLOCKS = 60, 40


class DeviceWithBadCopies(ModelledStage):
    """Every fifth copy fails; a copy to the device leaves garbage then."""

    def copy(self, copy: HostCopy) -> None:
        self.kv.begin_copy(copy)
        if copy.copy_id % 5 == 3:
            raise CopyFailedError(copy.copy_id, "the link is down")
        super().copy(copy)


def devices(num_stages: int, failure: FailureInjector | None = None) -> list[ModelledStage]:
    """The last stage fails as told."""
    host = HostMemory(HOST_BLOCKS, 1024, 0.0)
    return [
        DeviceWithBadCopies(
            StageCost(NO_COST, layers, 6),
            ShadowKv(
                NUM_BLOCKS,
                4,
                DRAW,
                num_host_blocks=HOST_BLOCKS,
                verify_ratio=1.0,
                weight=layer_weight(layers, 6),
            ),
            failure=failure if layers.end == 6 else None,
            host=host,
        )
        for layers in even_split(6, num_stages)
    ]


def bad_luck(batch: Batch) -> str | None:
    """Some steps of several rows fail."""
    return "bad luck" if batch.rows.size > 1 and batch.step_id % 5 == 3 else None


class NotingDevice(ModelledStage):
    """Notes in which order it is asked for steps, and for the end of writes beside them."""

    def __init__(self, stage: ModelledStage) -> None:
        super().__init__(stage._cost, stage.kv, host=stage._host)
        self.notes: list[int | str] = []

    def launch(self, batch: Batch, hidden: Hidden | None) -> Ended:
        self.notes.append(batch.step_id)
        return super().launch(batch, hidden)

    def end_writes(self) -> None:
        self.notes.append("writes ended")


def make_pipeline_engine(num_lanes: int, num_host_blocks: int = HOST_BLOCKS) -> Engine:
    config = engine_config(max_model_len=96, num_lanes=num_lanes)
    return make_engine(num_blocks=NUM_BLOCKS, num_host_blocks=num_host_blocks, config=config)


async def serve_undisturbed(
    stages: Sequence[StageDevice], engine: Engine, lengths: Iterable[int], max_tokens: int
) -> None:
    """Serve prompts of these lengths; their texts are undisturbed, and the engine is sound after each step."""
    pipeline = wire_up(stages, asyncio.get_running_loop())
    new = [new_sequence(i, num_prompt=length, max_tokens=max_tokens) for i, length in enumerate(lengths)]
    for each in new:
        assert isinstance(engine.registry.add(each), int)
    texts = await run_engine(engine, pipeline.executor, lambda *_: check_engine(engine))
    await pipeline.close()
    for each in new:
        prompt = each.prompt.astype(np.int32)
        assert texts[each.stream] == expected_outputs(prompt, prompt[:0], max_tokens, 0, DRAW).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_texts_survive_failed_steps_and_failed_copies(num_stages: int) -> None:
    random, engine = np.random.default_rng(num_stages), make_pipeline_engine(num_stages)
    await serve_undisturbed(devices(num_stages, bad_luck), engine, random.integers(1, 40, 16).tolist(), max_tokens=30)
    stats = take_stats(engine)
    assert stats.totals.num_failed_steps
    assert stats.totals.num_failed_copies
    assert stats.totals.num_swap_ins
    assert not stats.num_used_blocks


def leave(pipeline: WiredPipeline) -> None:
    pipeline.servers[1].close()


def vanish(pipeline: WiredPipeline) -> None:
    pipeline.control[1].shutdown(socket.SHUT_RDWR)


def talk_nonsense(pipeline: WiredPipeline) -> None:
    pipeline.leader_ends[0].sendall(b"x" * 64)


def answer_nonsense(pipeline: WiredPipeline) -> None:
    pipeline.control[0].sendall(b"x" * 64)


@pytest.mark.parametrize("end", [leave, vanish, talk_nonsense, answer_nonsense])
async def test_a_pipeline_that_breaks_fails_all_lanes_blames_nobody_and_ends_every_thread(
    end: Callable[[WiredPipeline], None],
) -> None:
    pipeline = wire_up(devices(3), asyncio.get_running_loop())
    engine, num_steps = make_pipeline_engine(3), count(1)
    for i in range(9):
        engine.registry.add(new_sequence(i, max_tokens=90))

    def note_and_end(_batch: Batch, _output: BatchOutput) -> None:
        check_engine(engine)
        if next(num_steps) == 5:
            end(pipeline)

    with pytest.raises(ExecutorBrokenError):
        await run_engine(engine, pipeline.executor, note_and_end)
    check_engine(engine)
    assert not engine.flights
    assert len(engine.table.running) + len(engine.table.waiting) == 9, "nobody was given up"
    with pytest.raises(BatchFailedError) as late:
        await pipeline.executor.submit(
            Batch(99, EMPTY_I32, EMPTY_I32, EMPTY_I32, EMPTY_I32, np.zeros(0, dtype=np.bool_))
        )
    assert late.value.is_lost
    with pytest.raises(CopyFailedError):
        await pipeline.executor.copy(HostCopy(99, EMPTY_I32, EMPTY_I32, to_host=True))
    await pipeline.executor.close()
    await pipeline.close()
    assert all(server.reason for server in pipeline.servers)


async def test_closing_an_idle_pipeline_ends_every_stage_in_order() -> None:
    pipeline = wire_up(devices(3), asyncio.get_running_loop())
    await pipeline.close()
    assert [server.reason for server in pipeline.servers] == [None, None]


async def test_every_modelled_stage_ends_late_writes_before_the_steps_that_are_submitted_afterwards() -> None:
    """Stages in threads: `test_stage_order`."""
    stages = [NotingDevice(stage) for stage in devices(3)]
    executor = PipelineExecutor(ModelledStages(stages, ModelledLink()), asyncio.get_running_loop().time)
    row = np.array([1], dtype=np.int32)
    admits = (RowInit(1, SamplingParams(max_tokens=2)),)
    first = executor.submit(Batch(0, row, row, row * 0, row, row == 0, TableDelta(row, row * 0, row), admits=admits))
    executor.end_writes()
    await executor.submit(Batch(1, row, row, row, row, row == 1))
    await first
    for stage in stages:
        assert sorted(map(str, stage.notes)) == ["0", "1", "writes ended"]
        assert stage.notes[-1] == 1
    await executor.close()
