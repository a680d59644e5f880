"""A worker's leases on the virtual clock: silence pauses, a word resumes, long silence ends; attempts hand over."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from services.dispatcher.session.calls import SubmitOutcome, WorkerCalls
from services.worker.serving.uploads import MAX_WAITING_BYTES, Uploads
from shared.ids import RequestId, StreamId, WorkerId
from shared.messages.request import MAX_INLINE_BYTES, Upload, pack_token_ids
from shared.subjects import Subjects
from shared.types import FinishReason
from tests.support.fake_dispatcher import Stream
from tests.support.lone_worker import LoneWorker, ended, lone_worker

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(300, 340))
worker_and = partial(lone_worker, max_model_len=20_000)


async def begin(lone: LoneWorker, max_tokens: int, name: str = "r", *, of: int = 0, **changes: object) -> Stream:
    """Have a request taken of one of the dispatchers."""
    dispatcher = lone.dispatchers[of]
    submit = dispatcher.make(PROMPT, max_tokens, request_id=name).model_copy(update=changes)
    return await lone.accepted(submit, dispatcher)


@pytest.mark.slow
async def test_a_silent_dispatchers_sequences_pause_and_go_on_with_the_same_text_when_it_speaks() -> None:
    async with worker_and("quiet", "talker") as lone:
        quiet, talker = lone.dispatchers
        paused, other = await begin(lone, 1000), await begin(lone, 1000, "other", of=1)
        for _ in range(20):
            await asyncio.sleep(0.5)
            await talker.renew("w0")
        assert 250 <= len(paused.tokens) <= 400, "it stops at about 3 s"
        assert len(other.tokens) > 900
        assert lone.stats.num_preempted == 1
        while not paused.finish:
            renewed = await quiet.renew("w0")
            assert renewed.counter <= quiet.counters["w0"]
            await asyncio.sleep(0.5)
        assert lone.engine.totals.num_recomputed_tokens <= 16, "its KV was still in the cache"
        assert paused.tokens == lone.undisturbed(paused)


async def test_orphans_end_and_their_channel_is_forgotten() -> None:
    async with worker_and() as lone:
        stream = await begin(lone, 10_000)
        await asyncio.sleep(59)
        assert lone.stats.num_preempted == 1
        await asyncio.sleep(3)
        assert not lone.engine.table.num_sequences
        assert stream.finish is FinishReason.CANCELLED
        assert lone.stats.num_used_blocks == 0
        await asyncio.sleep(1)
        assert not len(lone.worker.service.leases)


async def test_what_a_renewal_drops_ends_and_the_rest_goes_on() -> None:
    async with worker_and() as lone:
        streams = [await begin(lone, 700, f"r{i}") for i in range(4)]
        await asyncio.sleep(10)
        await lone.dispatcher.renew("w0", drop=((RequestId("r1"), 1), (RequestId("r3"), 1), (RequestId("no"), 1)))
        for _ in range(20):
            await asyncio.sleep(0.5)
            await lone.dispatcher.renew("w0")
        ends = [stream.finish for stream in streams]
        gone, whole = FinishReason.CANCELLED, FinishReason.LENGTH
        assert ends == [whole, gone, whole, gone]


@pytest.mark.parametrize("after_s", [0.005, 0.5, 10.0])
async def test_a_newer_attempt_of_another_dispatcher_goes_on_in_place(after_s: float) -> None:
    """In flight, between steps, and after the lease of the first dispatcher has run out."""
    async with worker_and("d0", "d1") as lone:
        old, second = await begin(lone, 600), lone.dispatchers[1]
        await asyncio.sleep(after_s)
        num_steps = lone.engine.totals.num_steps
        new = await begin(lone, 600, of=1, attempt=2)
        batch = await second.replay(new, 0)
        assert batch is not None
        new.tokens[:0] = batch.tokens.tolist()
        while not new.finish:
            await second.renew("w0")
            await asyncio.sleep(0.25)
        assert old.finish is FinishReason.SUPERSEDED
        assert new.tokens[: len(old.tokens)] == old.tokens
        assert lone.engine.totals.num_steps - num_steps <= 600 - len(old.tokens) + 2
        assert new.tokens == lone.undisturbed(old)


async def test_a_newer_attempt_with_other_tokens_begins_anew_and_the_older_one_ends() -> None:
    async with worker_and("d0", "d1") as lone:
        old = await begin(lone, 600)
        await asyncio.sleep(0.5)
        new = await begin(lone, 20, of=1, attempt=2, generated=pack_token_ids([999]))
        new.tokens.append(999)
        await new.ended.wait()
        assert old.finish is FinishReason.CANCELLED
        assert len(new.tokens) == 20
        assert not lone.engine.table.num_sequences


async def test_many_dispatcher_processes_leave_no_channel_behind() -> None:
    async with worker_and() as lone:
        for incarnation in range(1, 40):
            lone.dispatcher.counters.clear()
            await ended([await begin(lone, 2, f"r{incarnation}", incarnation=incarnation)])
            await asyncio.sleep(30)
        assert len(lone.worker.service.leases) <= 3
        assert len(lone.worker.service.emitter._names) <= 4


@pytest.mark.parametrize("num_generated", [0, 300_000])
async def test_a_prompt_over_the_size_of_a_message_is_uploaded_and_computed(num_generated: int) -> None:
    """The bus refuses messages over 1 MiB; the prompt alone has 2."""
    async with lone_worker(
        num_blocks=60_000, max_model_len=1_000_000, max_batch_tokens=100_000, prefix_caching=False
    ) as lone:
        dispatcher = lone.dispatcher
        calls = WorkerCalls(dispatcher.bus, Subjects(), submit_limit_s=2.0)
        submit = dispatcher.make([256 + i % 1000 for i in range(500_000)], num_generated + 4)
        generated = pack_token_ids([300 + i % 7 for i in range(num_generated)])
        submit = submit.model_copy(update={"generated": generated, "stream": StreamId(0)})
        stream = Stream(submit, WorkerId("w0"), tokens=submit.generated_ids().tolist())
        dispatcher.streams.append(stream)
        answer = await calls.submit(WorkerId("w0"), submit)
        assert (answer.outcome, answer.num_output) == (SubmitOutcome.ACCEPTED, num_generated)
        await stream.ended.wait()
        assert stream.tokens == lone.undisturbed(stream)


def test_uploads_take_parts_in_order_and_forget_what_is_old_or_too_much() -> None:
    uploads = Uploads()

    def part(name: str, offset: int, size: int) -> Upload:
        return Upload(request_id=RequestId(name), attempt=1, offset=offset, data=bytes([offset % 251]) * size)

    assert uploads.add(part("r", 0, 10), 0.0) == 10
    assert uploads.add(part("r", 0, 10), 0.1) == 10, "a copy changes nothing"
    assert uploads.add(part("r", 20, 10), 0.2) == 10, "a part before it is missing"
    assert uploads.add(part("r", 10, 5), 0.3) == 15
    assert uploads.take("r", 2, 15) is None
    assert uploads.take("r", 1, 15) == bytes(10) + bytes([10]) * 5
    assert uploads.take("r", 1, 15) is None
    uploads.add(part("old", 0, 10), 1.0)
    for number in range(100):
        uploads.add(part(f"r{number}", 0, MAX_INLINE_BYTES), 40.0)
    assert uploads.take("old", 1, 10) is None
    assert len(uploads) * MAX_INLINE_BYTES <= MAX_WAITING_BYTES
    assert uploads.take("r99", 1, MAX_INLINE_BYTES) is not None
