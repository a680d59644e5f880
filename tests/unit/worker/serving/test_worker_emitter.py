"""What the emitter puts into the messages of one step."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from services.worker.sequences.events import RowExtra, StepEvents
from services.worker.serving.emitter import MAX_QUEUED_MESSAGES, Emitter
from shared.ids import DispatcherId, WorkerId
from shared.stream_extras import StreamExtra, TokenLogprob
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Bus, BusError, Message
from shared.transport.memory_bus import MemoryBroker

pytestmark = pytest.mark.virtual_time

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


async def run_for_a_second(emitter: Emitter) -> None:
    sender = asyncio.create_task(emitter.run())
    await asyncio.sleep(1)
    sender.cancel()


async def sent(*steps: StepEvents) -> dict[str, list[TokenBatch]]:
    """Return what each of the dispatchers d0, d1 gets of some steps."""
    broker, got = MemoryBroker(), dict[str, list[TokenBatch]]()
    for name in ("d0", "d1"):
        got[name] = []

        def keep(message: Message, name: str = name) -> None:
            got[name].append(TokenBatch.unpack(message.data))

        await broker.connect(name).subscribe(SUBJECTS.tokens(DispatcherId(name)), keep)
    emitter = Emitter(WorkerId("w0"), SUBJECTS, broker.connect("w0"))
    assert [emitter.channel(DispatcherId(name)) for name in ("d0", "d1")] == [0, 1]
    for step in steps:
        emitter.emit(step)
    idle = [emitter.idle]
    await run_for_a_second(emitter)
    assert [*idle, emitter.idle] == [False, True]
    return got


async def test_a_step_without_extras_carries_no_byte_of_them() -> None:
    [batch] = (await sent(events([0, 0], [5, 6], ())))["d0"]
    assert batch.extras == b""
    assert batch.tokens.tolist() == [5, 6]


async def test_extras_follow_their_rows_into_the_message_of_their_dispatcher() -> None:
    extras = (RowExtra(1, cached_tokens=32), RowExtra(2, logprobs=LIKELY), RowExtra(4, 16, LIKELY))
    batches = await sent(events([0, 1, 1, 0, 0], [1, -1, 2, 3, 4], extras))
    [first], [second] = batches["d0"], batches["d1"]
    assert first.stream.tolist() == [0, 3, 4]
    assert first.stream_extras() == [StreamExtra(2, 16, LIKELY)]
    assert second.stream.tolist() == [1, 2]
    assert second.stream_extras() == [StreamExtra(0, 32), StreamExtra(1, None, LIKELY)]


async def test_the_token_with_id_0_is_a_token_and_an_end_without_one_is_not() -> None:
    [batch] = (await sent(events([0, 0], [0, -1], ())))["d0"]
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


async def test_of_too_many_messages_that_wait_the_oldest_are_dropped() -> None:
    batches = await sent(*[events([0], [5], ())] * (MAX_QUEUED_MESSAGES + 3))
    assert [batch.counter for batch in batches["d0"]] == list(range(3, MAX_QUEUED_MESSAGES + 3))


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


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_message_that_the_bus_has_not_taken_yet_is_not_done_and_one_that_it_refuses_is_dropped(
    *, refuses: bool
) -> None:
    bus = _SlowBus(refuses=refuses)
    emitter = Emitter(WorkerId("w0"), SUBJECTS, cast("Bus", bus))
    emitter.emit(events([emitter.channel(DispatcherId("d0"))], [5], ()))
    sending = asyncio.create_task(run_for_a_second(emitter))
    await asyncio.sleep(0.5)
    assert not emitter.idle
    bus.may_go.set()
    await sending
    assert emitter.idle
