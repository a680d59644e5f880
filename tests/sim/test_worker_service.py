"""The whole worker on the virtual clock: intake, engine, step loop, emitter, reports, over the bus in memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.worker.serving import admin, intake
from services.worker.serving.reporter import MIN_SHORTAGE_GAP_S
from shared.grammars import GrammarError
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import Close
from shared.messages.report import WorkerPhase
from shared.messages.request import RefusalReason, Refused, Submit, Upload, Uploaded, pack_token_ids
from shared.subjects import Subjects
from shared.transport.bus import BusError, Message
from shared.types import FinishReason, ReaderTarget
from shared.wire import decode, encode
from sim.virtual_time import run
from tests.support.fake_dispatcher import Stream
from tests.support.lone_worker import STEP_S, ended, lone_worker
from tests.support.traces import outputs_of

pytestmark = pytest.mark.virtual_time

one_worker = partial(lone_worker, num_blocks=64, max_model_len=512, max_batch_tokens=64)


@pytest.mark.parametrize("system", ["fcfs", "fcfs-chunked"])
async def test_text_under_memory_pressure_equals_the_undisturbed_text(system: str) -> None:
    """24 requests need up to 24 · 8 = 192 blocks; there are 40, so sequences are preempted and computed again."""
    async with one_worker(num_blocks=40, system=system) as lone:
        rng = np.random.default_rng(7)
        streams = [
            await lone.submitted(rng.integers(300, 900, rng.integers(1, 80)).tolist(), 40, seed=i) for i in range(24)
        ]
        await ended(streams)
        assert lone.engine.totals.num_preemptions > 0
        assert [stream.tokens for stream in streams] == [lone.undisturbed(stream) for stream in streams]
        assert {stream.finish for stream in streams} == {FinishReason.LENGTH}
        assert lone.stats.num_used_blocks == 0


async def test_forks_and_repeated_prompts_say_what_they_found_and_the_report_counts_it() -> None:
    """50 tokens in blocks of 16: a fork shares 49, a later request with the same salt finds 48, another one nothing."""
    async with one_worker() as lone:
        prompt = list(range(300, 350))

        async def ask(seed: int, **changes: str) -> Stream:
            return await lone.accepted(lone.dispatcher.make(prompt, 5, seed=seed).model_copy(update=changes))

        first = await ask(0)
        streams = [first, await ask(1, fork_of=first.submit.request_id)]
        await ended(streams)
        for changes in ({}, {"cache_salt": "tenant"}):
            streams.append(await ask(2, **changes))
            await streams[-1].ended.wait()
        assert [stream.tokens for stream in streams] == [lone.undisturbed(stream) for stream in streams]
        said = [[extra.cached_tokens for extra in stream.extras] for stream in streams]
        assert said == [[], [49], [48], []]
        report = lone.worker.reporter.make_report(lone.now_s)
        assert report.num_prefix_cache_queries_total == 4 * 50
        assert report.num_prefix_cache_hits_total == 49 + 48


async def test_who_comes_because_it_fits_is_refused_if_it_does_not_with_what_is_free() -> None:
    """64 blocks of 16, 45 of them held or asked for: 19 fit, one more waits only if it says that it may."""
    async with one_worker(num_blocks=64) as lone:
        first = await lone.submitted([300] * 320, 100)
        held = await lone.submitted([302] * 400, 2)
        num_free = 64 - 20 - 25

        def ask(num_tokens: int, *, needs_room: bool) -> Submit:
            return lone.dispatcher.make([303] * num_tokens, 5).model_copy(update={"needs_room": needs_room})

        answer = await lone.refused(ask(16 * num_free + 1, needs_room=True))
        assert (answer.reason, answer.num_free_blocks) == (RefusalReason.NO_ROOM, num_free)
        streams = [first, held, await lone.accepted(ask(16 * num_free, needs_room=True))]
        streams.append(await lone.accepted(ask(16 * num_free + 1, needs_room=False)))
        await ended(streams)
        assert [stream.tokens for stream in streams] == [lone.undisturbed(stream) for stream in streams]


async def test_cancel_frees_the_blocks_within_one_step() -> None:
    async with one_worker() as lone:
        stream = await lone.submitted([300] * 50, 400)
        await asyncio.sleep(20.5 * STEP_S)
        assert lone.stats.num_used_blocks > 0
        steps = lone.engine.totals.num_steps
        assert await lone.dispatcher.cancel(stream)
        await asyncio.sleep(STEP_S)
        assert lone.engine.totals.num_steps <= steps + 1
        assert lone.stats.num_used_blocks == 0
        assert not await lone.dispatcher.cancel(stream)


async def test_a_cancel_that_overtakes_its_submission_wins() -> None:
    async with one_worker() as lone:
        early = Stream(lone.dispatcher.make([300], 10), WorkerId("w0"))
        assert not await lone.dispatcher.cancel(early)
        answer = await lone.refused(early.submit)
        assert (answer.reason, answer.newest_attempt) == (RefusalReason.CANCELLED, 1)


async def test_of_too_many_cancelled_names_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_TOMBSTONES", 3)
    async with one_worker() as lone:
        early = [Stream(lone.dispatcher.make([300], 2, request_id=f"r{i}"), WorkerId("w0")) for i in range(5)]
        for stream in early:
            assert not await lone.dispatcher.cancel(stream)
        answers = [await lone.dispatcher.submit("w0", stream.submit) for stream in early]
        assert [isinstance(answer, Refused) for answer in answers] == [False, False, True, True, True]


async def test_a_copy_of_a_submission_that_has_ended_or_was_followed_is_refused_with_the_newest_attempt() -> None:
    async with one_worker() as lone:
        submit = lone.dispatcher.make([300], 2, request_id="r").model_copy(update={"attempt": 3})
        stream = await lone.accepted(submit)
        for attempt, has_ended in ((1, False), (1, True), (2, True), (3, True)):
            if has_ended:
                await stream.ended.wait()
            answer = await lone.refused(submit.model_copy(update={"attempt": attempt}))
            assert (answer.reason, answer.newest_attempt) == (RefusalReason.DUPLICATE, 3)
        assert not lone.engine.table.num_sequences


async def test_of_too_many_names_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_REMEMBERED", 3)
    async with one_worker() as lone:
        submits = []
        for i in range(5):
            submits.append(lone.dispatcher.make([300], 2, request_id=f"r{i}"))
            await ended([await lone.accepted(submits[-1])])
        newest = [(await lone.refused(submit)).newest_attempt for submit in reversed(submits)]
        assert newest == [1, 1, 1, 0, 0], "the engine knows what has ended, but no attempt's number"


async def test_parts_of_a_long_prompt_are_taken_while_the_worker_takes_requests() -> None:
    async with one_worker() as lone:
        bus, subject = lone.broker.connect("d1"), lone.dispatcher.subjects.submit(WorkerId("w0"))

        async def upload(name: str, offset: int, data: bytes) -> int:
            part = Upload(request_id=RequestId(name), attempt=1, offset=offset, data=data)
            return decode(await bus.request(subject, encode(part), timeout_s=5), Uploaded).num_bytes

        whole = lone.dispatcher.make([300, 301, 302], 5, request_id="r").model_copy(
            update={"generated": pack_token_ids([400, 401])}
        )
        data = whole.prompt + whole.generated
        assert [await upload("r", 0, data[:8]), await upload("r", 8, data[8:])] == [8, 20]
        sizes = (len(whole.prompt), len(whole.generated))
        empty = whole.model_copy(update={"prompt": b"", "generated": b"", "uploaded": sizes})
        stream = await lone.accepted(empty)
        stream.tokens += [400, 401]
        await stream.ended.wait()
        assert stream.tokens == lone.undisturbed(replace(stream, submit=whole))
        await lone.worker.service.drain(1.0)
        assert await upload("late", 0, b"1234") == 0


async def test_a_worker_that_is_closing_names_another_until_somebody_finds_no_room_elsewhere() -> None:
    async with one_worker("d0", "d1") as lone:
        closing = lone.worker.service.intake.closing
        close = Close(begins=True, for_s=10.0, open_worker=WorkerId("w1"), why="it is emptied")
        make = lone.dispatcher.make
        running = await lone.accepted(make([300], 50))
        assert closing.answer(close).is_closing
        refused = await lone.refused(make([300], 5))
        assert (refused.reason, refused.open_worker) == (RefusalReason.CLOSING, "w1")
        taken_over = running.submit.model_copy(update={"attempt": 2, "dispatcher_id": "d1"})
        await lone.accepted(taken_over, lone.dispatchers[1])
        await ended([running])
        assert running.finish is FinishReason.SUPERSEDED
        assert closing.why == "it is emptied", "what runs here goes on here"
        await ended([await lone.accepted(make([300], 5).model_copy(update={"reopens": True}))])
        assert not closing.answer(close.model_copy(update={"begins": False})).is_closing, "it was opened meanwhile"
        await ended([await lone.accepted(make([300], 5))])


async def test_a_worker_is_closing_no_longer_than_it_is_told_to() -> None:
    async with one_worker() as lone:
        closing = lone.worker.service.intake.closing
        close = Close(begins=True, for_s=10.0, open_worker=WorkerId("w1"))
        for goes_on in (close, close.model_copy(update={"begins": False})):
            assert closing.answer(goes_on).is_closing
            await asyncio.sleep(9.0)
            assert (await lone.refused(lone.dispatcher.make([300], 5))).reason is RefusalReason.CLOSING
        await asyncio.sleep(1.1)
        await ended([await lone.accepted(lone.dispatcher.make([300], 5))])
        assert closing.answer(close).is_closing
        assert not closing.answer(close.model_copy(update={"for_s": 0.0})).is_closing
        assert not closing.why


async def test_a_request_is_as_old_as_its_submission_says() -> None:
    async with one_worker() as lone:
        submit = lone.dispatcher.make([300], 50).model_copy(update={"age_s": 7.0})
        now_s = lone.now_s
        await lone.accepted(submit)
        row = lone.engine.registry.row_of[submit.request_id, 1]
        assert lone.engine.table.arrival_s[row] == pytest.approx(now_s - 7.0, abs=0.1)


async def test_replay_gives_the_tokens_again_while_it_runs_and_after_the_end() -> None:
    async with one_worker() as lone:
        stream = await lone.submitted([300, 301], 300)
        await asyncio.sleep(10.5 * STEP_S)
        again = await lone.dispatcher.replay(stream, 3)
        assert again is not None
        assert again.tokens.tolist() == lone.undisturbed(stream)[3 : 3 + len(again.tokens)]
        assert not again.finish.any()
        await stream.ended.wait()
        again = await lone.dispatcher.replay(stream, 0)
        assert again is not None
        assert again.tokens.tolist() == stream.tokens
        assert again.count.tolist() == [255, 45]
        assert again.first_index.tolist() == [0, 255]
        assert again.finish.tolist() == [FinishReason.NONE, FinishReason.LENGTH]
        unknown = Stream(lone.dispatcher.make([1], 1, request_id="nobody"), WorkerId("w0"))
        assert await lone.dispatcher.replay(unknown, 0) is None


async def test_a_dump_of_many_sequences_comes_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 220 bytes a sequence: two or three in 600 bytes."""
    monkeypatch.setattr(admin, "MAX_PAGE_BYTES", 600)
    async with one_worker() as lone:
        streams = [await lone.submitted([300] * 5, 20, seed=seed) for seed in range(10)]
        subject = Subjects().dump(WorkerId("w0"))
        pages: list[dict[str, Any]] = [json.loads(await lone.dispatcher.bus.request(subject, b"", timeout_s=1.0))]
        while (first := pages[-1]["next_sequence"]) is not None:
            assert first == sum(len(page["sequences"]) for page in pages)
            pages.append(json.loads(await lone.dispatcher.bus.request(subject, str(first).encode(), timeout_s=1.0)))
        assert len(pages) >= 3
        named = [sequence["request_id"] for page in pages for sequence in page["sequences"]]
        assert sorted(named) == sorted(stream.submit.request_id for stream in streams)
        assert {page["num_sequences"] for page in pages} == {10}
        with pytest.raises(BusError, match="digits"):
            await lone.dispatcher.bus.request(subject, b"all", timeout_s=1.0)


async def test_refusals_say_why() -> None:
    async with one_worker(num_blocks=8) as lone:
        make = lone.dispatcher.make
        assert (await lone.refused(make([300] * 130, 100))).reason is RefusalReason.TOO_LONG
        assert (await lone.refused(make([32_000], 5))).reason is RefusalReason.INVALID
        await lone.worker.service.drain(1.0)
        assert (await lone.refused(make([300], 5))).reason is RefusalReason.DRAINING


async def test_a_grammar_is_made_ready_before_its_sequence_comes_and_refused_if_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[bytes] = []

    def prepare(grammar: bytes) -> None:
        made.append(grammar)
        if grammar == b"none":
            raise GrammarError("it is none")

    async def at_once(call: Callable[[bytes], None], grammar: bytes) -> None:
        """The virtual clock knows no threads."""
        call(grammar)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    async with one_worker() as lone:
        lone.worker.service.intake._prepare_grammar = prepare

        def with_grammar(grammar: bytes) -> Submit:
            submit = lone.dispatcher.make([300], 5)
            return submit.model_copy(update={"sampling": submit.sampling.model_copy(update={"grammar": grammar})})

        refused = await lone.refused(with_grammar(b"none"))
        stream = await lone.accepted(with_grammar(b"some"))
        assert (refused.reason, refused.detail) == (RefusalReason.INVALID, "it is none")
        await stream.ended.wait()
        await lone.submitted([300], 5)
        assert made == [b"none", b"some"]


async def test_beyond_one_batch_who_has_no_token_yet_is_refused_as_full() -> None:
    """Of four that run at a time, as they came; a copy of one that waits, and one with tokens already, are taken."""
    async with one_worker(system="fcfs-chunked", max_batch_rows=4) as lone:
        for _ in range(4):
            await lone.submitted([300] * 8, 50)
        await asyncio.sleep(5 * STEP_S)
        waiting = [await lone.submitted([300] * 8, 50) for _ in range(4)]
        assert (lone.stats.num_running, lone.stats.num_waiting, lone.stats.max_waiting) == (4, 4, 4)
        refused = await lone.dispatcher.submit("w0", lone.dispatcher.make([300] * 8, 50))
        assert isinstance(refused, Refused)
        assert refused.reason is RefusalReason.FULL
        assert not isinstance(await lone.dispatcher.submit("w0", waiting[0].submit), Refused)
        goes_on = lone.dispatcher.make([300] * 8, 50).model_copy(update={"generated": pack_token_ids([301])})
        await lone.accepted(goes_on)
        assert lone.stats.num_waiting == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": b"12345"},
        {"generated": b"123"},
        {"prompt": b"1234", "generated": b"1"},
        {"dispatcher_id": "not a token"},
    ],
)
async def test_token_ids_that_are_no_whole_numbers_and_impossible_names_are_refused_and_harm_nobody(
    changes: dict[str, object],
) -> None:
    async with one_worker() as lone:
        answer = await lone.refused(lone.dispatcher.make([300], 5).model_copy(update=changes))
        assert answer.reason is RefusalReason.INVALID
        stream = await lone.submitted([300], 5)
        await stream.ended.wait()
        assert stream.tokens == lone.undisturbed(stream)


async def test_drain_lets_running_sequences_finish() -> None:
    async with one_worker() as lone:
        stream = await lone.submitted([300], 30)
        await lone.worker.service.drain(60)
        await asyncio.sleep(0.01)
        assert stream.finish is FinishReason.LENGTH
        assert stream.tokens == lone.undisturbed(stream)


async def test_a_row_that_fails_ends_alone() -> None:
    """Row 1 breaks every step it is in; the other two never notice."""
    guilty = 1
    async with one_worker(failure=lambda batch: "bad row" if guilty in batch.rows.tolist() else None) as lone:
        streams = [await lone.submitted([300 + i], 20, seed=i) for i in range(3)]
        await ended(streams, limit_s=30)
        finishes = [stream.finish for stream in streams]
        assert finishes == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
        assert streams[0].tokens == lone.undisturbed(streams[0])
        assert streams[2].tokens == lone.undisturbed(streams[2])


async def test_reports_come_by_period_and_at_once_on_a_change() -> None:
    async with one_worker() as lone:
        started_s, reports = lone.now_s, await lone.reports()
        await asyncio.sleep(1.2)
        await lone.worker.service.drain(1.0)
        await asyncio.sleep(0.3)
    assert [(round(at_s - started_s, 2), report.phase) for at_s, report in reports] == [
        (0.0, WorkerPhase.READY),
        (0.5, WorkerPhase.READY),
        (1.0, WorkerPhase.READY),
        (1.2, WorkerPhase.DRAINING),
        (1.5, WorkerPhase.STOPPED),
    ]


async def test_a_request_that_finds_no_memory_is_reported_after_the_step_and_not_again_and_again() -> None:
    """16 blocks of 16 tokens; four prompts of 7 blocks each, and what they grow, find room for two at most."""
    async with one_worker(num_blocks=16) as lone:
        await asyncio.sleep(0.13)  # between two reports of the period
        began_s, reports = lone.now_s, await lone.reports()
        prompts = [list(range(300 + 100 * i, 400 + 100 * i)) for i in range(4)]
        streams = [await lone.submitted(prompt, 40) for prompt in prompts]
        await ended(streams)
        ended_s = lone.now_s
    first_s = next(at_s for at_s, report in reports if report.num_queued_for_memory)
    assert first_s - began_s < 3 * lone.engine.totals.busy_s / lone.engine.totals.num_steps
    assert len(reports) <= 2 + (ended_s - began_s) * (1 / MIN_SHORTAGE_GAP_S + 1 / 0.5)


async def test_a_shortage_that_comes_and_goes_with_every_step_is_no_flood_of_reports() -> None:
    async with one_worker() as lone:
        reports = await lone.reports()
        for step in range(400):
            lone.worker.reporter.look(is_short=step % 2 == 0)
            await asyncio.sleep(0.005)
    assert 2.0 / MIN_SHORTAGE_GAP_S - 1 <= len(reports) <= 2.0 / MIN_SHORTAGE_GAP_S + 2.0 / 0.5 + 1


@pytest.mark.parametrize("displayed", [None, (3.0, 2.5)])
async def test_what_a_reader_has_seen_elsewhere_is_taken_over(displayed: tuple[float, float] | None) -> None:
    """Of two tokens, which are on time if nothing is said: the second one a second and a quarter after arrival."""
    async with one_worker(max_batch_rows=1) as lone:
        await lone.submitted([300] * 8, 50)  # the other one waits
        target = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.0)
        submit = lone.dispatcher.make([300] * 8, 50, qoe=target).model_copy(
            update={"generated": pack_token_ids([301, 302]), "displayed": displayed}
        )
        await lone.accepted(submit)
        table = lone.engine.table
        (row,) = table.waiting.view
        assert (table.qoe_last_s[row], table.qoe_delay_sum_s[row]) == (displayed or (1.25, 0.0))


async def _scenario(seed: int) -> str:
    """A busy minute with cancellations; returns a digest of all that went over the bus to the dispatcher."""
    digest = hashlib.sha256()
    async with one_worker(num_blocks=16) as lone:
        lone.engine.reorders = True  # so that as many may wait as come
        spy = lone.broker.connect("spy")

        def on_message(message: Message) -> None:
            digest.update(f"{lone.now_s:.9f} {message.subject} ".encode() + message.data)

        await spy.subscribe("sluice.*.dispatcher.>", on_message)
        rng = np.random.default_rng(seed)
        streams: list[Stream] = []
        for i in range(80):
            await asyncio.sleep(float(rng.exponential(0.02)))
            prompt = rng.integers(300, 900, rng.integers(1, 100)).tolist()
            streams.append(await lone.submitted(prompt, int(rng.integers(20, 140)), seed=i))
            if rng.random() < 0.2:
                await lone.dispatcher.cancel(streams[int(rng.integers(len(streams)))])
        await ended(streams, limit_s=120)
        for stream in streams:
            text = lone.undisturbed(stream)
            assert stream.tokens == text[: len(stream.tokens)]
        assert lone.engine.totals.num_preemptions > 0
    return digest.hexdigest()


@pytest.mark.slow
def test_one_seed_gives_one_trace_in_any_process() -> None:
    here = run(_scenario(3))
    program = "from tests.sim import test_worker_service as t; print(t.run(t._scenario(3)))"
    assert outputs_of(program) == {here}
    assert run(_scenario(4)) != here
