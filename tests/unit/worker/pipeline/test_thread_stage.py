"""Stages in threads over sockets, with the shadow KV for a model: failures, copies, and ends of every kind."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, BatchOutput, RowInit, TableDelta
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy, HostMemory
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import ExecutorBrokenError, StepLoop
from services.worker.engine.stats import take_stats
from services.worker.modelled.executor import FailureInjector
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, expected_outputs, layer_weight
from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.channel import SocketChannel
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.stage import Ended
from services.worker.pipeline.stage_messages import Activation, Close, Hidden, StageMessage
from services.worker.sequences.events import StepEvents
from shared.cost import StageCost
from shared.layers import even_split
from shared.types import SamplingParams
from sim.devices.channel import ModelledLink
from sim.devices.modelled_pipeline import ModelledStages
from sim.devices.modelled_stage import ModelledStage
from tests.support.engine_builders import engine_config, make_engine, new_sequence
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


class Served:
    """An engine on a pipeline, and the texts that it gave."""

    def __init__(self, pipeline: WiredPipeline, num_lanes: int, num_host_blocks: int = HOST_BLOCKS) -> None:
        config = engine_config(max_model_len=96, num_lanes=num_lanes)
        self.pipeline = pipeline
        self.engine: Engine = make_engine(num_blocks=NUM_BLOCKS, num_host_blocks=num_host_blocks, config=config)
        self.texts: dict[int, list[int]] = {}
        self.num_steps = 0
        now = asyncio.get_running_loop().time
        self.loop = StepLoop(self.engine, pipeline.executor, self.say, now, StepGate(), on_step=self.note)

    def say(self, events: StepEvents) -> None:
        for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
            self.texts.setdefault(stream, []).extend([token] if token >= 0 else [])

    def note(self, _batch: Batch, _output: BatchOutput) -> None:
        self.num_steps += 1
        check_engine(self.engine)

    async def run(self) -> None:
        task = asyncio.create_task(self.loop.run())
        async with asyncio.timeout(30):
            while self.engine.table.num_live and not task.done():
                await asyncio.sleep(0.001)
        self.loop.close()
        await task


@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_texts_survive_failed_steps_and_failed_copies(num_stages: int) -> None:
    random = np.random.default_rng(num_stages)
    bad_luck: FailureInjector = lambda b: "bad luck" if b.rows.size > 1 and b.step_id % 5 == 3 else None  # noqa: E731
    served = Served(wire_up(devices(num_stages, bad_luck), asyncio.get_running_loop()), num_stages)
    new = [new_sequence(i, num_prompt=int(random.integers(1, 40)), max_tokens=30) for i in range(16)]
    for each in new:
        assert isinstance(served.engine.residents.add(each), int)
    await served.run()
    await served.pipeline.executor.close()
    served.pipeline.join()
    for each in new:
        prompt = each.prompt.astype(np.int32)
        assert served.texts[each.stream] == expected_outputs(prompt, prompt[:0], 30, 0, DRAW).tolist()
    stats = take_stats(served.engine)
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
async def test_a_pipeline_that_breaks_fails_all_lanes_blames_nobody_and_ends_every_thread(end: object) -> None:
    pipeline = wire_up(devices(3), asyncio.get_running_loop())
    served = Served(pipeline, 3)
    for i in range(9):
        served.engine.residents.add(new_sequence(i, max_tokens=90))
    note = served.note

    def note_and_end(batch: Batch, output: BatchOutput) -> None:
        note(batch, output)
        if served.num_steps == 5:
            end(pipeline)  # type: ignore[operator]

    served.loop._on_step = note_and_end
    with pytest.raises(ExecutorBrokenError):
        await served.run()
    check_engine(served.engine)
    assert not served.engine.flights
    assert len(served.engine.table.running) + len(served.engine.table.waiting) == 9, "nobody was given up"
    with pytest.raises(BatchFailedError) as late:
        await pipeline.executor.submit(
            Batch(99, EMPTY_I32, EMPTY_I32, EMPTY_I32, EMPTY_I32, np.zeros(0, dtype=np.bool_))
        )
    assert late.value.is_lost
    with pytest.raises(CopyFailedError):
        await pipeline.executor.copy(HostCopy(99, EMPTY_I32, EMPTY_I32, to_host=True))
    await pipeline.executor.close()
    await pipeline.executor.close()
    pipeline.join()
    assert all(server.reason for server in pipeline.servers)


async def test_closing_an_idle_pipeline_ends_every_stage_in_order() -> None:
    pipeline = wire_up(devices(3), asyncio.get_running_loop())
    await pipeline.executor.close()
    pipeline.join()
    assert [server.reason for server in pipeline.servers] == [None, None]


@pytest.mark.parametrize("kind", ["threads", "modelled"])
async def test_every_stage_ends_late_writes_before_the_steps_that_are_submitted_afterwards(kind: str) -> None:
    loop, stages = asyncio.get_running_loop(), [NotingDevice(stage) for stage in devices(3)]
    wired = wire_up(stages, loop) if kind == "threads" else None
    executor = (
        PipelineExecutor(ModelledStages(stages, [ModelledLink()] * 2), loop.time) if wired is None else wired.executor
    )
    row = np.array([1], dtype=np.int32)
    admits = (RowInit(1, SamplingParams(max_tokens=2)),)
    batches = [
        Batch(0, row, row, row * 0, row, row == 0, TableDelta(row, row * 0, row), admits=admits),
        Batch(1, row, row, row, row, row == 1),
    ]
    first = executor.submit(batches[0])
    executor.end_writes()
    await executor.submit(batches[1])
    await first
    for stage in stages:
        assert sorted(map(str, stage.notes)) == ["0", "1", "writes ended"]
        assert stage.notes[-1] == 1
    await executor.close()
    if wired is not None:
        wired.join()


def test_a_channel_carries_large_activations_whole_and_in_order() -> None:
    """Larger than any socket's buffer, so sender and receiver have to work at the same time."""
    ours, theirs = (SocketChannel(end) for end in socket.socketpair())
    sent = [
        Activation(i, 300, np.random.default_rng(i).standard_normal((300, 1024)).astype(np.float32), (0.5,))
        for i in range(5)
    ]
    received: list[StageMessage] = []

    def receive() -> None:
        received.extend(theirs.receive() for _ in range(6))

    reader = threading.Thread(target=receive)
    reader.start()
    for message in sent:
        ours.send(message)
    ours.send(Close())
    reader.join()
    assert isinstance(received[-1], Close)
    for one, other in zip(sent, received[:5], strict=True):
        assert isinstance(other, Activation)
        assert (one.step_id, one.durations_s) == (other.step_id, other.durations_s)
        assert np.array_equal(one.hidden, other.hidden)
    theirs.close()
    with pytest.raises(PeerLostError):
        ours.receive()
    ours.close()
    with pytest.raises(PeerLostError):
        ours.send(Close())
