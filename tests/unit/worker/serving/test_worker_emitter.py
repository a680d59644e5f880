"""What the emitter puts into the messages of one step."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np

from services.worker.sequences.events import RowExtra, StepEvents
from services.worker.serving.emitter import MAX_QUEUED_MESSAGES, Emitter
from shared.ids import DispatcherId, WorkerId
from shared.stream_extras import StreamExtra, TokenLogprob
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Bus, BusError, Message
from shared.transport.memory_bus import MemoryBroker
from sim.virtual_time import run

SUBJECTS = Subjects("c")
LIKELY = (TokenLogprob(-0.5, ((7, -0.5),)),)


def events(channels: list[int], tokens: list[int], extras: tuple[RowExtra, ...]) -> StepEvents:
    size = len(tokens)
    return StepEvents(
        channel=np.array(channels, dtype=np.int32),
        stream=np.arange(size, dtype=np.uint32),
        attempt=np.ones(size, dtype=np.uint16),
        first_index=np.zeros(size, dtype=np.uint32),
        tokens=np.array(tokens, dtype=np.int32),
        finish=np.array([2 if token < 0 else 0 for token in tokens], dtype=np.uint8),
        extras=extras,
    )


def sent(step: StepEvents) -> dict[str, TokenBatch]:
    """Return what each of the dispatchers d0, d1 gets of a step."""

    async def test() -> dict[str, TokenBatch]:
        broker, got = MemoryBroker(), {}
        for name in ("d0", "d1"):

            def keep(message: Message, name: str = name) -> None:
                got[name] = TokenBatch.unpack(message.data)

            await broker.connect(name).subscribe(SUBJECTS.tokens(DispatcherId(name)), keep)
        emitter = Emitter(WorkerId("w0"), SUBJECTS, broker.connect("w0"))
        assert [emitter.channel(DispatcherId(name)) for name in ("d0", "d1")] == [0, 1]
        emitter.emit(step)
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(emitter.run())
            await asyncio.sleep(1)
            sender.cancel()
        return got

    return run(test())


def test_a_step_without_extras_carries_no_byte_of_them() -> None:
    batch = sent(events([0, 0], [5, 6], ()))["d0"]
    assert batch.extras == b""
    assert batch.tokens.tolist() == [5, 6]


def test_extras_follow_their_rows_into_the_message_of_their_dispatcher() -> None:
    extras = (RowExtra(1, cached_tokens=32), RowExtra(2, logprobs=LIKELY), RowExtra(4, 16, LIKELY))
    batches = sent(events([0, 1, 1, 0, 0], [1, -1, 2, 3, 4], extras))
    assert batches["d0"].stream.tolist() == [0, 3, 4]
    assert batches["d0"].stream_extras() == [StreamExtra(2, 16, LIKELY)]
    assert batches["d1"].stream.tolist() == [1, 2]
    assert batches["d1"].stream_extras() == [StreamExtra(0, 32), StreamExtra(1, None, LIKELY)]


def test_the_token_with_id_0_is_a_token_and_an_end_without_one_is_not() -> None:
    batch = sent(events([0, 0], [0, -1], ()))["d0"]
    assert batch.count.tolist() == [1, 0]
    assert batch.tokens.tolist() == [0]
    assert batch.counter == 0


async def test_the_number_of_a_closed_channel_is_used_again_and_its_messages_begin_anew() -> None:
    emitter = Emitter(WorkerId("w0"), SUBJECTS, MemoryBroker().connect("w0"))
    first, second = emitter.channel(DispatcherId("d0")), emitter.channel(DispatcherId("d1"))
    emitter.emit(events([first], [5], ()))
    assert emitter.counter(first) == 1
    emitter.close_channel(first)
    assert emitter.channel(DispatcherId("d2")) == first
    assert emitter.counter(first) == 0
    assert emitter.channel(DispatcherId("d1")) == second
    assert emitter.channel(DispatcherId("d0")) not in (first, second)


def test_of_too_many_messages_that_wait_the_oldest_are_dropped() -> None:
    async def test() -> list[int]:
        broker, got = MemoryBroker(), list[int]()
        await broker.connect("d0").subscribe(
            SUBJECTS.tokens(DispatcherId("d0")), lambda message: got.append(TokenBatch.unpack(message.data).counter)
        )
        emitter = Emitter(WorkerId("w0"), SUBJECTS, broker.connect("w0"))
        channel = emitter.channel(DispatcherId("d0"))
        for _ in range(MAX_QUEUED_MESSAGES + 3):
            emitter.emit(events([channel], [5], ()))
        idle = [emitter.idle]
        sender = asyncio.create_task(emitter.run())
        await asyncio.sleep(1)
        sender.cancel()
        assert [*idle, emitter.idle] == [False, True]
        return got

    assert run(test()) == list(range(3, MAX_QUEUED_MESSAGES + 3))


class _SlowBus:
    """Takes a message when it is let, or refuses it."""

    max_payload_bytes = 2**20

    def __init__(self, *, refuses: bool) -> None:
        self.may_go = asyncio.Event()
        self.refuses = refuses

    async def publish(self, subject: str, data: bytes) -> None:
        del subject, data
        await self.may_go.wait()
        if self.refuses:
            raise BusError("not connected")


def test_a_message_that_the_bus_has_not_taken_yet_is_not_done_and_one_that_it_refuses_is_dropped() -> None:
    async def test(*, refuses: bool) -> list[bool]:
        bus = _SlowBus(refuses=refuses)
        emitter = Emitter(WorkerId("w0"), SUBJECTS, cast("Bus", bus))
        emitter.emit(events([emitter.channel(DispatcherId("d0"))], [5], ()))
        sender = asyncio.create_task(emitter.run())
        await asyncio.sleep(1)
        idle = [emitter.idle]
        bus.may_go.set()
        await asyncio.sleep(1)
        idle.append(emitter.idle)
        sender.cancel()
        return idle

    assert run(test(refuses=False)) == run(test(refuses=True)) == [False, True]
