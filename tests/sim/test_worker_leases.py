"""A worker's leases on the virtual clock: silence pauses, a word resumes, long silence ends; attempts hand over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.dispatcher.session.calls import SubmitOutcome, WorkerCalls
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from services.worker.modelled.shadow_kv import expected_outputs
from services.worker.serving.uploads import MAX_WAITING_BYTES, Uploads
from shared.cost import CostModel
from shared.ids import RequestId, StreamId, WorkerId
from shared.messages.request import MAX_INLINE_BYTES, RefusalReason, Refused, Upload, pack_token_ids
from shared.subjects import Subjects
from shared.transport.memory_bus import MemoryBroker
from shared.types import FinishReason
from sim.virtual_time import run
from sim.worker import SimWorker, SimWorkerParams
from tests.support.fake_dispatcher import FakeDispatcher, Stream

STEP_S = 0.01
COST = CostModel(g0_s=STEP_S, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
PROMPT = list(range(300, 340))


@asynccontextmanager
async def worker_and(*names: str) -> AsyncIterator[tuple[SimWorker, list[FakeDispatcher]]]:
    broker = MemoryBroker()
    worker = SimWorker(SimWorkerParams("w0", COST, 1000, max_model_len=20_000), broker.connect("w0"))
    dispatchers = [FakeDispatcher(broker.connect(name), name) for name in names]
    await worker.start()
    for dispatcher in dispatchers:
        await dispatcher.start()
    yield worker, dispatchers
    check_engine(worker.service.engine)
    await worker.stop()
    assert not worker.failures
    assert not [fault for dispatcher in dispatchers for fault in dispatcher.faults]


async def begin(dispatcher: FakeDispatcher, max_tokens: int, name: str = "r") -> Stream:
    stream = await dispatcher.submit("w0", dispatcher.make(PROMPT, max_tokens, request_id=name))
    assert isinstance(stream, Stream)
    return stream


def undisturbed(max_tokens: int) -> list[int]:
    async def main() -> list[int]:
        async with worker_and("d0") as (_, (dispatcher,)):
            stream = await begin(dispatcher, max_tokens)
            while not stream.finish:
                await dispatcher.renew("w0")
                await asyncio.sleep(0.5)
            return stream.tokens

    return run(main())


def test_a_silent_dispatchers_sequences_pause_and_go_on_with_the_same_text_when_it_speaks() -> None:
    async def main() -> list[int]:
        async with worker_and("quiet", "talker") as (worker, (quiet, talker)):
            paused, other = await begin(quiet, 1000), await begin(talker, 1000, "other")
            for _ in range(20):
                await asyncio.sleep(0.5)
                await talker.renew("w0")
            assert 250 <= len(paused.tokens) <= 400, "it stops at about 3 s"
            assert len(other.tokens) > 900
            assert take_stats(worker.service.engine).num_preempted == 1
            while not paused.finish:
                renewed = await quiet.renew("w0")
                assert renewed.counter <= quiet.counters["w0"]
                await asyncio.sleep(0.5)
            assert worker.service.engine.totals.num_recomputed_tokens <= 16, "its KV was still in the cache"
            return paused.tokens

    assert run(main()) == undisturbed(1000)


def test_orphans_end_and_their_channel_is_forgotten() -> None:
    async def main() -> None:
        async with worker_and("d0") as (worker, (dispatcher,)):
            stream = await begin(dispatcher, 10_000)
            await asyncio.sleep(59)
            assert take_stats(worker.service.engine).num_preempted == 1
            await asyncio.sleep(3)
            assert not worker.service.engine.table.num_live
            assert stream.finish is FinishReason.CANCELLED
            assert take_stats(worker.service.engine).num_used_blocks == 0
            await asyncio.sleep(1)
            assert not len(worker.service.leases)

    run(main())


def test_what_a_renewal_drops_ends_and_the_rest_goes_on() -> None:
    async def main() -> None:
        async with worker_and("d0") as (_, (dispatcher,)):
            streams = [await begin(dispatcher, 700, f"r{i}") for i in range(4)]
            await asyncio.sleep(10)
            await dispatcher.renew("w0", drop=((RequestId("r1"), 1), (RequestId("r3"), 1), (RequestId("no"), 1)))
            for _ in range(20):
                await asyncio.sleep(0.5)
                await dispatcher.renew("w0")
            ends = [stream.finish for stream in streams]
            gone, whole = FinishReason.CANCELLED, FinishReason.LENGTH
            assert ends == [whole, gone, whole, gone]

    run(main())


@pytest.mark.parametrize("after_s", [0.005, 0.5, 10.0])
def test_a_newer_attempt_of_another_dispatcher_goes_on_in_place(after_s: float) -> None:
    """In flight, between steps, and after the lease of the first dispatcher has run out."""

    async def main() -> list[int]:
        async with worker_and("d0", "d1") as (worker, (first, second)):
            old = await begin(first, 600)
            await asyncio.sleep(after_s)
            num_steps = worker.service.engine.totals.num_steps
            submit = second.make(PROMPT, 600, request_id="r").model_copy(update={"attempt": 2})
            new = await second.submit("w0", submit)
            assert isinstance(new, Stream)
            batch = await second.replay(new, 0)
            assert batch is not None
            new.tokens[:0] = batch.tokens.tolist()
            while not new.finish:
                await second.renew("w0")
                await asyncio.sleep(0.25)
            assert old.finish is FinishReason.SUPERSEDED
            assert new.tokens[: len(old.tokens)] == old.tokens
            assert worker.service.engine.totals.num_steps - num_steps <= 600 - len(old.tokens) + 2
            return new.tokens

    assert run(main()) == undisturbed(600)


def test_a_newer_attempt_with_other_tokens_begins_anew_and_the_older_one_ends() -> None:
    async def main() -> None:
        async with worker_and("d0", "d1") as (worker, (first, second)):
            old = await begin(first, 600)
            await asyncio.sleep(0.5)
            update = {"attempt": 2, "generated": pack_token_ids([999])}
            submit = second.make(PROMPT, 20, request_id="r").model_copy(update=update)
            new = await second.submit("w0", submit)
            assert isinstance(new, Stream)
            new.tokens.append(999)
            await new.ended.wait()
            assert old.finish is FinishReason.CANCELLED
            assert len(new.tokens) == 20
            assert not worker.service.engine.table.num_live

    run(main())


def test_copies_and_older_attempts_are_refused_and_say_which_attempt_was_there() -> None:
    async def main() -> None:
        async with worker_and("d0") as (worker, (dispatcher,)):
            submit = dispatcher.make(PROMPT, 5, request_id="r").model_copy(update={"attempt": 3})
            stream = await dispatcher.submit("w0", submit)
            assert isinstance(stream, Stream)
            await stream.ended.wait()
            for attempt in (1, 2, 3):
                late = submit.model_copy(update={"attempt": attempt, "stream": StreamId(0)})
                answer = await dispatcher.submit("w0", late)
                assert isinstance(answer, Refused)
                assert (answer.reason, answer.newest_attempt) == (RefusalReason.DUPLICATE, 3)
            assert not worker.service.engine.table.num_live

    run(main())


def test_many_dispatcher_processes_leave_no_channel_behind() -> None:
    async def main() -> None:
        async with worker_and("d0") as (worker, (dispatcher,)):
            for incarnation in range(1, 40):
                submit = dispatcher.make(PROMPT, 2).model_copy(update={"incarnation": incarnation})
                dispatcher.counters.clear()
                stream = await dispatcher.submit("w0", submit)
                assert isinstance(stream, Stream)
                await stream.ended.wait()
                await asyncio.sleep(30)
            assert len(worker.service.leases) <= 3
            assert len(worker.service.emitter._names) <= 4

    run(main())


@pytest.mark.parametrize("num_generated", [0, 300_000])
def test_a_prompt_over_the_size_of_a_message_is_uploaded_and_computed(num_generated: int) -> None:
    """The bus refuses messages over 1 MiB; the prompt alone has 2."""

    async def main() -> None:
        broker = MemoryBroker()
        model = {"max_model_len": 1_000_000, "max_batch_tokens": 100_000, "prefix_caching": False}
        worker = SimWorker(SimWorkerParams("w0", COST, 60_000, **model), broker.connect("w0"))  # type: ignore[arg-type]
        await worker.start()
        dispatcher = FakeDispatcher(broker.connect("d0"))
        await dispatcher.start()
        calls = WorkerCalls(dispatcher.bus, Subjects(), submit_limit_s=2.0)
        submit = dispatcher.make([256 + i % 1000 for i in range(500_000)], num_generated + 4)
        generated = pack_token_ids([300 + i % 7 for i in range(num_generated)])
        submit = submit.model_copy(update={"generated": generated, "stream": StreamId(0)})
        dispatcher.streams.append(Stream(submit, WorkerId("w0"), tokens=submit.generated_ids().tolist()))
        answer = await calls.submit(WorkerId("w0"), submit)
        assert answer.outcome is SubmitOutcome.ACCEPTED
        assert answer.num_output == num_generated
        await dispatcher.streams[0].ended.wait()
        ids, known = submit.prompt_ids().astype("i4"), submit.generated_ids().astype("i4")
        expected = expected_outputs(ids, known, num_generated + 4, 0, worker.draw)
        assert dispatcher.streams[0].tokens == expected.tolist()
        await worker.stop()
        assert not worker.failures

    run(main())


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
