"""The whole worker on the virtual clock: intake, engine, step loop, emitter, reports, over the bus in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from services.worker.modelled.shadow_kv import expected_outputs
from services.worker.serving import intake
from services.worker.serving.reporter import MIN_SHORTAGE_GAP_S
from shared.cost import CostModel
from shared.ids import RequestId, WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.messages.request import RefusalReason, Refused, Upload, Uploaded, pack_token_ids
from shared.transport.bus import Message
from shared.transport.memory_bus import MemoryBroker
from shared.types import FinishReason
from shared.wire import decode, decode_json, encode
from sim.virtual_time import run
from sim.worker import SimWorker, SimWorkerParams
from tests.support.fake_dispatcher import FakeDispatcher, Stream
from tests.support.traces import outputs_of

STEP_S = 0.010
COST = CostModel(g0_s=STEP_S, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)


@asynccontextmanager
async def one_worker(
    *, num_blocks: int = 64, system: str = "fcfs-chunked", failure: Callable[[Batch], str | None] | None = None
) -> AsyncIterator[tuple[SimWorker, FakeDispatcher, MemoryBroker]]:
    broker = MemoryBroker()
    params = SimWorkerParams(
        "w0", COST, num_blocks, system=system, max_model_len=512, max_batch_tokens=64, failure=failure
    )
    worker = SimWorker(params, broker.connect("w0"))
    dispatcher = FakeDispatcher(broker.connect("d0"))
    await dispatcher.start()
    await worker.start()
    try:
        yield worker, dispatcher, broker
    finally:
        await worker.stop()
    assert not worker.failures
    check_engine(worker.service.engine)


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    run(main())


def undisturbed(worker: SimWorker, stream: Stream) -> list[int]:
    """What the sequence says when nothing ever happens to its KV."""
    sampling = stream.submit.sampling
    prompt = stream.submit.prompt_ids().astype(np.int32)
    empty = np.zeros(0, dtype=np.int32)
    tokens: list[int] = expected_outputs(prompt, empty, sampling.max_tokens, sampling.seed, worker.draw).tolist()
    return tokens


async def submitted(dispatcher: FakeDispatcher, prompt: list[int], max_tokens: int, seed: int = 0) -> Stream:
    stream = await dispatcher.submit("w0", dispatcher.make(prompt, max_tokens, seed=seed))
    assert isinstance(stream, Stream)
    return stream


@pytest.mark.parametrize("system", ["fcfs", "fcfs-chunked"])
def test_text_under_memory_pressure_equals_the_undisturbed_text(system: str) -> None:
    """24 requests need up to 24 · 8 = 192 blocks; there are 40, so sequences are preempted and computed again."""

    async def test() -> None:
        async with one_worker(num_blocks=40, system=system) as (worker, dispatcher, _):
            rng = np.random.default_rng(7)
            streams = [
                await submitted(dispatcher, rng.integers(300, 900, rng.integers(1, 80)).tolist(), 40, seed=i)
                for i in range(24)
            ]
            async with asyncio.timeout(60):
                await asyncio.gather(*(stream.ended.wait() for stream in streams))
            assert worker.service.engine.totals.num_preemptions > 0
            assert [stream.tokens for stream in streams] == [undisturbed(worker, stream) for stream in streams]
            assert {stream.finish for stream in streams} == {FinishReason.LENGTH}
            assert not dispatcher.faults
            assert take_stats(worker.service.engine).num_used_blocks == 0

    in_virtual_time(test)


def test_forks_and_repeated_prompts_say_what_they_found_and_the_report_counts_it() -> None:
    """50 tokens in blocks of 16: a fork shares 49, a later request with the same salt finds 48, another one nothing."""

    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            prompt = list(range(300, 350))

            async def ask(seed: int, **changes: str) -> Stream:
                submit = dispatcher.make(prompt, 5, seed=seed).model_copy(update=changes)
                stream = await dispatcher.submit("w0", submit)
                assert isinstance(stream, Stream)
                return stream

            first = await ask(0)
            streams = [first, await ask(1, fork_of=first.submit.request_id)]
            await asyncio.gather(*(stream.ended.wait() for stream in streams))
            for changes in ({}, {"cache_salt": "tenant"}):
                streams.append(await ask(2, **changes))
                await streams[-1].ended.wait()
            assert [stream.tokens for stream in streams] == [undisturbed(worker, stream) for stream in streams]
            said = [[extra.cached_tokens for extra in stream.extras] for stream in streams]
            assert said == [[], [49], [48], []]
            report = worker.reporter.make_report(asyncio.get_running_loop().time())
            assert report.num_prefix_cache_queries_total == 4 * 50
            assert report.num_prefix_cache_hits_total == 49 + 48
            assert not dispatcher.faults

    in_virtual_time(test)


def test_cancel_frees_the_blocks_within_one_step() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            stream = await submitted(dispatcher, [300] * 50, 400)
            await asyncio.sleep(20.5 * STEP_S)
            assert take_stats(worker.service.engine).num_used_blocks > 0
            steps = worker.service.engine.totals.num_steps
            assert await dispatcher.cancel(stream)
            await asyncio.sleep(STEP_S)
            assert worker.service.engine.totals.num_steps <= steps + 1
            assert take_stats(worker.service.engine).num_used_blocks == 0
            assert not await dispatcher.cancel(stream)

    in_virtual_time(test)


def test_a_cancel_that_overtakes_its_submission_wins() -> None:
    async def test() -> None:
        async with one_worker() as (_, dispatcher, _):
            early = Stream(dispatcher.make([300], 10), WorkerId("w0"))
            assert not await dispatcher.cancel(early)
            answer = await dispatcher.submit("w0", early.submit)
            assert isinstance(answer, Refused)
            assert (answer.reason, answer.newest_attempt) == (RefusalReason.CANCELLED, 1)

    in_virtual_time(test)


def test_of_too_many_cancelled_names_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_TOMBSTONES", 3)

    async def test() -> None:
        async with one_worker() as (_, dispatcher, _):
            early = [Stream(dispatcher.make([300], 2, request_id=f"r{i}"), WorkerId("w0")) for i in range(5)]
            for stream in early:
                assert not await dispatcher.cancel(stream)
            answers = [await dispatcher.submit("w0", stream.submit) for stream in early]
            assert [isinstance(answer, Refused) for answer in answers] == [False, False, True, True, True]

    in_virtual_time(test)


def test_a_copy_of_a_submission_that_has_ended_or_was_followed_is_refused_with_the_newest_attempt() -> None:
    async def test() -> None:
        async with one_worker() as (_, dispatcher, _):
            first = dispatcher.make([300], 2, request_id="r")
            second = first.model_copy(update={"attempt": 2})
            stream = await dispatcher.submit("w0", second)
            assert isinstance(stream, Stream)
            late = await dispatcher.submit("w0", first)
            await stream.ended.wait()
            copy = await dispatcher.submit("w0", second)
            for answer in (late, copy):
                assert isinstance(answer, Refused)
                assert (answer.reason, answer.newest_attempt) == (RefusalReason.DUPLICATE, 2)

    in_virtual_time(test)


def test_of_too_many_names_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_REMEMBERED", 3)

    async def test() -> None:
        async with one_worker() as (_, dispatcher, _):
            submits = []
            for i in range(5):
                submits.append(dispatcher.make([300], 2, request_id=f"r{i}"))
                stream = await dispatcher.submit("w0", submits[-1])
                assert isinstance(stream, Stream)
                await stream.ended.wait()
            copies = [await dispatcher.submit("w0", submit) for submit in reversed(submits)]
            newest = [copy.newest_attempt for copy in copies if isinstance(copy, Refused)]
            assert newest == [1, 1, 1, 0, 0], "the engine knows what has ended, but no attempt's number"

    in_virtual_time(test)


def test_parts_of_a_long_prompt_are_taken_while_the_worker_takes_requests() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, broker):
            bus, subject = broker.connect("d1"), dispatcher.subjects.submit(WorkerId("w0"))

            async def upload(name: str, offset: int, data: bytes) -> int:
                part = Upload(request_id=RequestId(name), attempt=1, offset=offset, data=data)
                return decode(await bus.request(subject, encode(part), timeout_s=5), Uploaded).num_bytes

            whole = dispatcher.make([300, 301, 302], 5, request_id="r").model_copy(
                update={"generated": pack_token_ids([400, 401])}
            )
            data = whole.prompt + whole.generated
            assert [await upload("r", 0, data[:8]), await upload("r", 8, data[8:])] == [8, 20]
            sizes = (len(whole.prompt), len(whole.generated))
            empty = whole.model_copy(update={"prompt": b"", "generated": b"", "uploaded": sizes})
            stream = await dispatcher.submit("w0", empty)
            assert isinstance(stream, Stream)
            stream.tokens += [400, 401]
            await stream.ended.wait()
            known = np.array([300, 301, 302, 400, 401], dtype=np.int32)
            whole_text = expected_outputs(known[:3], known[3:], 5, whole.sampling.seed, worker.draw)
            assert stream.tokens == whole_text.tolist()
            await worker.service.drain(1.0)
            assert await upload("late", 0, b"1234") == 0

    in_virtual_time(test)


def test_a_request_is_as_old_as_its_submission_says() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            submit = dispatcher.make([300], 50).model_copy(update={"age_s": 7.0})
            now_s = asyncio.get_running_loop().time()
            assert isinstance(await dispatcher.submit("w0", submit), Stream)
            engine = worker.service.engine
            row = engine.residents.row_of[submit.request_id, 1]
            assert engine.table.arrival_s[row] == pytest.approx(now_s - 7.0, abs=0.1)

    in_virtual_time(test)


def test_replay_gives_the_tokens_again_while_it_runs_and_after_the_end() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            stream = await submitted(dispatcher, [300, 301], 300)
            await asyncio.sleep(10.5 * STEP_S)
            again = await dispatcher.replay(stream, 3)
            assert again is not None
            assert again.tokens.tolist() == undisturbed(worker, stream)[3 : 3 + len(again.tokens)]
            assert not again.finish.any()
            await stream.ended.wait()
            again = await dispatcher.replay(stream, 0)
            assert again is not None
            assert again.tokens.tolist() == stream.tokens
            assert again.count.tolist() == [255, 45]
            assert again.first_index.tolist() == [0, 255]
            assert again.finish.tolist() == [FinishReason.NONE, FinishReason.LENGTH]
            unknown = Stream(dispatcher.make([1], 1, request_id="nobody"), WorkerId("w0"))
            assert await dispatcher.replay(unknown, 0) is None

    in_virtual_time(test)


def test_refusals_say_why() -> None:
    async def test() -> None:
        async with one_worker(num_blocks=8) as (worker, dispatcher, _):
            long = await dispatcher.submit("w0", dispatcher.make([300] * 130, 100))
            outside = await dispatcher.submit("w0", dispatcher.make([32_000], 5))
            await worker.service.drain(1.0)
            late = await dispatcher.submit("w0", dispatcher.make([300], 5))
            answers = [long, outside, late]
            assert all(isinstance(answer, Refused) for answer in answers)
            reasons = [answer.reason for answer in answers if isinstance(answer, Refused)]
            assert reasons == [RefusalReason.TOO_LONG, RefusalReason.INVALID, RefusalReason.DRAINING]

    in_virtual_time(test)


def test_token_ids_that_are_no_whole_numbers_are_refused() -> None:
    async def test() -> None:
        async with one_worker() as (_, dispatcher, _):
            for changes in ({"prompt": b"12345"}, {"generated": b"123"}, {"prompt": b"1234", "generated": b"1"}):
                answer = await dispatcher.submit("w0", dispatcher.make([300], 5).model_copy(update=changes))
                assert isinstance(answer, Refused)
                assert answer.reason is RefusalReason.INVALID

    in_virtual_time(test)


def test_a_submission_that_names_no_possible_dispatcher_is_refused_and_harms_nobody() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            bad = dispatcher.make([300], 5).model_copy(update={"dispatcher_id": "not a token"})
            answer = await dispatcher.submit("w0", bad)
            assert isinstance(answer, Refused)
            assert answer.reason is RefusalReason.INVALID
            stream = await submitted(dispatcher, [300], 5)
            await stream.ended.wait()
            assert stream.tokens == undisturbed(worker, stream)

    in_virtual_time(test)


def test_drain_lets_running_sequences_finish() -> None:
    async def test() -> None:
        async with one_worker() as (worker, dispatcher, _):
            stream = await submitted(dispatcher, [300], 30)
            await worker.service.drain(60)
            await asyncio.sleep(0.01)
            assert stream.finish is FinishReason.LENGTH
            assert stream.tokens == undisturbed(worker, stream)

    in_virtual_time(test)


def test_a_row_that_fails_ends_alone() -> None:
    """Row 1 breaks every step it is in; the other two never notice."""

    async def test() -> None:
        guilty = 1
        async with one_worker(failure=lambda batch: "bad row" if guilty in batch.rows.tolist() else None) as (
            worker,
            dispatcher,
            _,
        ):
            streams = [await submitted(dispatcher, [300 + i], 20, seed=i) for i in range(3)]
            async with asyncio.timeout(30):
                await asyncio.gather(*(stream.ended.wait() for stream in streams))
            finishes = [stream.finish for stream in streams]
            assert finishes == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
            assert streams[0].tokens == undisturbed(worker, streams[0])
            assert streams[2].tokens == undisturbed(worker, streams[2])

    in_virtual_time(test)


def test_reports_come_by_period_and_at_once_on_a_change() -> None:
    async def test() -> None:
        times: list[tuple[float, WorkerPhase]] = []

        def on_report(message: Message) -> None:
            report = decode_json(message.data, WorkerReport)
            times.append((round(asyncio.get_running_loop().time() - started_s, 2), report.phase))

        async with one_worker() as (worker, dispatcher, _):
            started_s = asyncio.get_running_loop().time()
            await dispatcher.bus.subscribe(dispatcher.subjects.all_reports(), on_report)
            await asyncio.sleep(1.2)
            await worker.service.drain(1.0)
            await asyncio.sleep(0.3)
        assert times == [
            (0.0, WorkerPhase.READY),
            (0.5, WorkerPhase.READY),
            (1.0, WorkerPhase.READY),
            (1.2, WorkerPhase.DRAINING),
            (1.5, WorkerPhase.STOPPED),
        ]

    in_virtual_time(test)


def test_a_request_that_finds_no_memory_is_reported_after_the_step_and_not_again_and_again() -> None:
    """16 blocks of 16 tokens; four prompts of 7 blocks each, and what they grow, find room for two at most."""

    async def test() -> None:
        reports: list[tuple[float, int]] = []

        def on_report(message: Message) -> None:
            report = decode_json(message.data, WorkerReport)
            reports.append((asyncio.get_running_loop().time(), report.num_queued_for_memory))

        async with one_worker(num_blocks=16) as (worker, dispatcher, _):
            await asyncio.sleep(0.13)  # between two reports of the period
            await dispatcher.bus.subscribe(dispatcher.subjects.all_reports(), on_report)
            began_s = asyncio.get_running_loop().time()
            prompts = [list(range(300 + 100 * i, 400 + 100 * i)) for i in range(4)]
            streams = [await submitted(dispatcher, prompt, 40) for prompt in prompts]
            async with asyncio.timeout(60):
                await asyncio.gather(*(stream.ended.wait() for stream in streams))
            ended_s = asyncio.get_running_loop().time()
        first_s = next(at_s for at_s, num_queued in reports if num_queued)
        assert first_s - began_s < 3 * worker.service.engine.totals.busy_s / worker.service.engine.totals.num_steps
        assert len(reports) <= 2 + (ended_s - began_s) * (1 / MIN_SHORTAGE_GAP_S + 1 / 0.5)

    in_virtual_time(test)


def test_a_shortage_that_comes_and_goes_with_every_step_is_no_flood_of_reports() -> None:
    async def test() -> None:
        times: list[float] = []
        async with one_worker() as (worker, dispatcher, _):
            await dispatcher.bus.subscribe(dispatcher.subjects.all_reports(), lambda _message: times.append(0.0))
            for step in range(400):
                worker.reporter.look(is_short=step % 2 == 0)
                await asyncio.sleep(0.005)
        assert 2.0 / MIN_SHORTAGE_GAP_S - 1 <= len(times) <= 2.0 / MIN_SHORTAGE_GAP_S + 2.0 / 0.5 + 1

    in_virtual_time(test)


async def _scenario(seed: int) -> str:
    """A busy minute with cancellations; returns a digest of all that went over the bus to the dispatcher."""
    digest = hashlib.sha256()
    async with one_worker(num_blocks=16) as (worker, dispatcher, broker):
        spy = broker.connect("spy")

        def on_message(message: Message) -> None:
            digest.update(f"{asyncio.get_running_loop().time():.9f} {message.subject} ".encode() + message.data)

        await spy.subscribe("sluice.*.dispatcher.>", on_message)
        rng = np.random.default_rng(seed)
        streams: list[Stream] = []
        for i in range(80):
            await asyncio.sleep(float(rng.exponential(0.02)))
            prompt = rng.integers(300, 900, rng.integers(1, 100)).tolist()
            streams.append(await submitted(dispatcher, prompt, int(rng.integers(20, 140)), seed=i))
            if rng.random() < 0.2:
                await dispatcher.cancel(streams[int(rng.integers(len(streams)))])
        async with asyncio.timeout(120):
            await asyncio.gather(*(stream.ended.wait() for stream in streams))
        for stream in streams:
            text = undisturbed(worker, stream)
            assert stream.tokens == text[: len(stream.tokens)]
        assert worker.service.engine.totals.num_preemptions > 0
    return digest.hexdigest()


def test_one_seed_gives_one_trace_in_any_process() -> None:
    here = run(_scenario(3))
    program = "from tests.sim import test_worker_service as t; print(t.run(t._scenario(3)))"
    assert outputs_of(program) == {here}
    assert run(_scenario(4)) != here
