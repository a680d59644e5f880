"""The step loop with the modelled executor on the virtual clock; every step takes 0.1 s."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.contract.executor import KvCapacity
from services.worker.engine.gate import GateClosedError
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.engine.stats import take_stats
from services.worker.scheduling.registry import SCHEDULERS
from shared.cost import CostModel
from shared.types import FinishReason
from sim.virtual_time import run
from tests.support.engine_builders import new_sequence
from tests.support.engine_live import STEP_S, live_engine
from tests.support.traces import outputs_of

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_sequence_streams_one_token_per_step_and_ends_once(scheduler: str, *, overlaps: bool) -> None:
    """One prefill step and three decodes: tokens at 0.1, 0.2, 0.3, 0.4 s; a step behind another ends one step later."""
    async with live_engine(scheduler=scheduler, overlaps=overlaps) as live:
        new = live.add(new_sequence(0, num_prompt=9, max_tokens=4))
        await live.until_idle()
        assert [round(at_s, 6) for at_s in live.heard_s[new.stream]] == [0.1, 0.2, 0.3, 0.4]
        assert live.texts[new.stream] == live.undisturbed(new)
        assert live.ends[new.stream] is FinishReason.LENGTH


@pytest.mark.parametrize("num_blocks", [14, 64])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_where_steps_overlap_texts_are_the_same_and_two_batches_are_in_flight(
    scheduler: str, num_blocks: int
) -> None:
    """With little memory sequences give way: then nothing goes ahead. Whoever comes waits for two steps at most."""
    most_in_flight, said = {True: 0, False: 0}, list[object]()
    for overlaps in (True, False):
        async with live_engine(
            scheduler=scheduler, num_blocks=num_blocks, eos_token_ids=(1, 2), max_model_len=48, overlaps=overlaps
        ) as live:
            news = [new_sequence(name, num_prompt=3 + 4 * name % 9, max_tokens=20 + name) for name in range(7)]
            for new in news:
                live.add(new)
                await asyncio.sleep(0.65)
                most_in_flight[overlaps] = max(most_in_flight[overlaps], len(live.loop._flight))
            await live.until_idle()
            assert live.engine.blocks.num_free == num_blocks
            said.append((live.texts, live.ends))
    assert said[0] == said[1]
    assert most_in_flight == {True: 2, False: 1}


async def test_an_idle_loop_wakes_for_a_sequence_that_comes_later() -> None:
    async with live_engine() as live:
        await asyncio.sleep(5)
        new = live.add(new_sequence(0, max_tokens=1))
        await live.until_idle()
        assert (live.ended_s[new.stream], live.ends[new.stream]) == (5 + STEP_S, FinishReason.LENGTH)


async def test_a_cancel_of_a_waiting_sequence_is_told_while_a_step_runs() -> None:
    async with live_engine(max_batch_rows=1) as live:
        first, second = new_sequence(0, max_tokens=9), new_sequence(1)
        live.add(first)
        live.add(second)
        await asyncio.sleep(0.05)
        assert live.cancel(second)
        await asyncio.sleep(0.01)
        assert live.ends[second.stream] is FinishReason.CANCELLED
        assert len(live.loop._flight) == 1
        live.cancel(first)
        await live.until_idle()


async def test_a_cancel_in_flight_frees_the_kv_when_that_step_comes_back() -> None:
    async with live_engine() as live:
        new = live.add(new_sequence(0, max_tokens=50))
        await asyncio.sleep(0.25)
        assert live.cancel(new)
        assert take_stats(live.engine).num_used_blocks > 0
        await asyncio.sleep(0.06)
        assert take_stats(live.engine).num_used_blocks == 0
        assert live.ends[new.stream] is FinishReason.CANCELLED
        assert len(live.texts[new.stream]) == 2


async def test_a_sequence_that_cannot_run_expires_by_itself() -> None:
    """All memory is taken away, so no step ever comes that could notice the time."""
    async with live_engine(num_blocks=8) as live:
        new = live.add(new_sequence(0, max_tokens=20, expires_s=2.5))
        async with live.gate.exclusive():
            live.engine.leave_executor(asyncio.get_running_loop().time())
            live.engine.enter_executor(KvCapacity(0, live.engine.config.block_size), 1)
        await asyncio.sleep(4)
        assert (live.ended_s[new.stream], live.ends[new.stream]) == (2.5, FinishReason.CANCELLED)
        assert len(live.loop._flight) == 0


async def test_a_running_sequence_expires_between_steps() -> None:
    async with live_engine() as live:
        new = live.add(new_sequence(0, max_tokens=100, expires_s=1.05))
        await live.until_idle()
        assert live.ends[new.stream] is FinishReason.CANCELLED
        assert 1.05 <= live.ended_s[new.stream] <= 1.05 + 2 * STEP_S


async def test_the_gate_is_handed_over_with_nothing_in_flight_in_order_of_asking() -> None:
    async with live_engine() as live:
        live.add(new_sequence(0, max_tokens=30))
        order: list[int] = []

        async def visit(name: int) -> None:
            async with live.gate.exclusive():
                assert len(live.loop._flight) == 0
                steps = live.engine.totals.num_steps
                await asyncio.sleep(1)
                assert live.engine.totals.num_steps == steps
                order.append(name)

        await asyncio.sleep(0.35)
        await asyncio.gather(*(visit(name) for name in range(3)))
        assert order == [0, 1, 2]
        await live.until_idle()
        assert live.engine.totals.num_generated_tokens == 30


async def test_rows_count_as_runnable_while_steps_are_made_or_held_up_and_not_while_they_wait_for_something() -> None:
    """Two run and two wait; then all are paused, as those of a dispatcher that is silent."""
    async with live_engine(max_batch_rows=2) as live:

        def count() -> tuple[int, int]:
            stats = take_stats(live.engine, live.loop.pace)
            return stats.num_running, stats.num_runnable

        assert count() == (0, 0)
        for name in range(4):
            live.add(new_sequence(name, max_tokens=30))
        await asyncio.sleep(2.5 * STEP_S)
        assert count() == (2, 2)
        async with live.gate.exclusive():
            assert count() == (2, 4), "those that wait could be in a step if there were one"
            for row in live.engine.table.running.view.tolist():
                live.engine._transitions.preempt(row)
            assert count() == (0, 4), "all gave way, and none goes on"
        await asyncio.sleep(2.5 * STEP_S)
        for _ in range(3):  # those in a step give way when they are back
            live.engine.pause(0)
            live.loop.wake()
            await asyncio.sleep(2 * STEP_S)
        assert count()[1] == 0
        live.engine.resume(0)
        live.loop.wake()
        await live.until_idle()
        assert count() == (0, 0)


async def test_rows_that_the_scheduler_parks_are_not_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may let running rows be; a worker that makes no step for that is not stuck."""
    async with live_engine() as live:
        live.add(new_sequence(0, max_tokens=30))
        await asyncio.sleep(2.5 * STEP_S)
        with monkeypatch.context() as patch:
            patch.setattr(live.engine, "next_batch", lambda _: None)
            await asyncio.sleep(2 * STEP_S)
            stats = take_stats(live.engine, live.loop.pace)
            assert (stats.num_running, stats.num_runnable) == (1, 0)
            async with live.gate.exclusive():
                assert take_stats(live.engine, live.loop.pace).num_runnable == 1
        live.loop.wake()
        await live.until_idle()


async def test_a_visitor_that_gives_up_or_fails_does_not_keep_the_gate() -> None:
    async with live_engine() as live:
        live.add(new_sequence(0, max_tokens=30))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), live.gate.exclusive():
                pytest.fail("a step was in flight")
        await asyncio.sleep(0.05)
        with pytest.raises(ZeroDivisionError):
            async with live.gate.exclusive():
                _ = 1 / 0
        await live.until_idle()
        assert live.engine.totals.num_generated_tokens == 30


async def test_the_gate_turns_visitors_away_once_the_loop_has_ended() -> None:
    async with live_engine() as live:
        live.add(new_sequence(0, max_tokens=30))
        await asyncio.sleep(0.05)

        async def visit() -> None:
            with pytest.raises(GateClosedError):
                async with live.gate.exclusive():
                    pytest.fail("the loop has ended")

        visitor = asyncio.create_task(visit())
        live.loop.close()
        await visitor
        await visit()


async def test_closing_takes_in_what_is_in_flight() -> None:
    async with live_engine() as live:
        new = live.add(new_sequence(0, max_tokens=30))
        await asyncio.sleep(0.25)
        live.loop.close()
        await asyncio.sleep(1)
        assert len(live.texts[new.stream]) == 3


@pytest.mark.parametrize("guilty_row", range(5))
async def test_a_row_that_fails_alone_twice_ends_and_the_others_never_notice(guilty_row: int) -> None:
    failed: list[list[int]] = []

    def failure(batch: Batch) -> str | None:
        if guilty_row in batch.rows:
            failed.append(sorted(batch.rows.tolist()))
            return "broken"
        return None

    async with live_engine(failure=failure) as live:
        sequences = [live.add(new_sequence(name, num_prompt=4, max_tokens=6)) for name in range(5)]
        await live.until_idle()
        for row, new in enumerate(sequences):
            assert live.ends[new.stream] is (FinishReason.ERROR if row == guilty_row else FinishReason.LENGTH)
            assert live.texts[new.stream] == ([] if row == guilty_row else live.undisturbed(new))
        assert failed[-2:] == [[guilty_row], [guilty_row]]
        assert len(failed) <= 5, "5 rows, then at most 3, 2, 1, 1"


@pytest.mark.parametrize(("num_sequences", "failing"), [(5, (1, 5)), (1, (1, 3))])
async def test_a_step_that_fails_once_costs_nobody_anything(num_sequences: int, failing: tuple[int, ...]) -> None:
    """Of a single row steps 1 and 3 fail, each for the first time in a row; step 2 repeats step 1 and goes well."""
    async with live_engine(failure=lambda batch: "hiccup" if batch.step_id in failing else None) as live:
        sequences = [live.add(new_sequence(name, num_prompt=4, max_tokens=6)) for name in range(num_sequences)]
        await live.until_idle()
        assert all(live.texts[new.stream] == live.undisturbed(new) for new in sequences)
        assert live.engine.totals.num_failed_steps == 2


async def test_an_executor_that_always_fails_is_called_broken() -> None:
    async def fail() -> None:
        async with live_engine(failure=lambda _: "on fire") as live:
            for name in range(8):
                live.add(new_sequence(name))
            await asyncio.sleep(10)

    with pytest.raises(ExecutorBrokenError, match="16 steps failed in a row, the last one with: on fire"):
        await fail()


async def trace(seed: int) -> tuple[str, int]:
    """Return the hash of a run of 60 sequences with what every batch holds, and every event and its time."""
    seen: list[object] = []

    def strike(batch: Batch) -> str | None:
        delta = batch.table_delta
        columns = (batch.rows, batch.num_tokens, batch.start, batch.tokens, delta.row, delta.index, delta.block_id)
        seen.append((asyncio.get_running_loop().time(), [column.tolist() for column in columns]))
        return "struck" if batch.step_id % 17 == 11 and batch.rows.size > 1 else None

    random = np.random.default_rng(seed)
    cost = CostModel(g0_s=0.010, b0_s=0.0001, g1_s=0.005, b1_s=0.0002, d_s=1e-6, a_s=1e-8)
    async with live_engine(num_blocks=40, max_model_len=96, cost=cost, failure=strike, verify_ratio=0.2) as live:
        for name in range(60):
            await asyncio.sleep(float(random.exponential(0.05)))
            num_prompt, max_tokens = int(random.integers(1, 40)), int(random.integers(1, 30))
            now_s = asyncio.get_running_loop().time()
            live.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens, arrival_s=now_s))
            if random.random() < 0.2:
                live.cancel(new_sequence(int(random.integers(name + 1))))
        await live.until_idle()
    for at_s, events in live.said:
        columns = (events.stream, events.first_index, events.tokens, events.finish)
        seen.append((at_s, [column.tolist() for column in columns]))
    return hashlib.sha256(repr(seen).encode()).hexdigest(), sum(len(events) for _, events in live.said)


@pytest.mark.slow
def test_one_seed_gives_one_trace_in_processes_with_different_hash_seeds() -> None:
    digest, num_events = run(trace(5))
    assert num_events > 300
    assert outputs_of("from tests.sim import test_engine_loop as t; print(*t.run(t.trace(5)))") == {
        f"{digest} {num_events}"
    }
    assert digest != run(trace(6))[0]
