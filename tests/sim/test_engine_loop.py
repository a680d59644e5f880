"""The step loop with the modelled executor on the virtual clock; every step takes 0.1 s."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.engine.gate import GateClosedError
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.engine.stats import take_stats
from services.worker.modelled.shadow_kv import expected_outputs
from services.worker.scheduling.registry import SCHEDULERS
from services.worker.sequences.config import NewSequence
from shared.types import FinishReason
from sim.virtual_time import run
from tests.support.engine_builders import engine_config, new_sequence
from tests.support.engine_live import STEP_S, LiveEngine, live_engine
from tests.support.engine_trace import trace_hash


def expected_text(live: LiveEngine, new: NewSequence, count: int) -> list[int]:
    prompt = new.prompt.astype(np.int32)
    return [int(token) for token in expected_outputs(prompt, prompt[:0], count, 0, live.kv._draw)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_sequence_streams_one_token_per_step_and_ends_once(scheduler: str) -> None:
    """One prefill step and three decodes: tokens at 0.1, 0.2, 0.3, 0.4 s."""

    async def main() -> None:
        async with live_engine(scheduler=scheduler) as live:
            new = new_sequence(0, num_prompt=9, max_tokens=4)
            live.add(new)
            await live.until_idle()
            assert [round(at_s, 6) for at_s, _ in live.said] == [0.1, 0.2, 0.3, 0.4]
            assert live.text(new) == expected_text(live, new, 4)
            assert [finish for _, finish in live.ends(new)] == [FinishReason.LENGTH]

    run(main())


@pytest.mark.parametrize("num_blocks", [14, 64])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_where_steps_overlap_texts_are_the_same_and_two_batches_are_in_flight(scheduler: str, num_blocks: int) -> None:
    """With little memory sequences give way: then nothing goes ahead. Whoever comes waits for two steps at most."""
    most_in_flight: dict[bool, int] = {}

    async def main(*, overlaps: bool) -> dict[int, tuple[list[int], list[FinishReason]]]:
        config = engine_config(eos_token_ids=(1, 2), max_model_len=48, overlaps=overlaps)
        async with live_engine(scheduler=scheduler, num_blocks=num_blocks, config=config) as live:
            news = [new_sequence(name, num_prompt=3 + 4 * name % 9, max_tokens=20 + name) for name in range(7)]
            for new in news:
                live.add(new)
                await asyncio.sleep(0.65)
                most_in_flight[overlaps] = max(most_in_flight.get(overlaps, 0), len(live.loop._flight))
            await live.until_idle()
            check_engine(live.engine)
            assert live.engine.blocks.num_free == num_blocks
            return {new.stream: (live.text(new), [finish for _, finish in live.ends(new)]) for new in news}

    texts = run(main(overlaps=True))
    assert texts == run(main(overlaps=False))
    assert all(len(ends) == 1 for _, ends in texts.values())
    assert most_in_flight == {True: 2, False: 1}


def test_a_step_that_overlaps_ends_one_step_after_the_one_before() -> None:
    async def main() -> None:
        async with live_engine(config=engine_config(overlaps=True)) as live:
            new = new_sequence(0, num_prompt=9, max_tokens=4)
            live.add(new)
            await live.until_idle()
            assert [round(at_s, 6) for at_s, _ in live.said] == [0.1, 0.2, 0.3, 0.4]
            assert live.text(new) == expected_text(live, new, 4)

    run(main())


def test_an_idle_loop_wakes_for_a_sequence_that_comes_later() -> None:
    async def main() -> None:
        async with live_engine() as live:
            await asyncio.sleep(5)
            new = new_sequence(0, max_tokens=1)
            live.add(new)
            await live.until_idle()
            assert live.ends(new) == [(5 + STEP_S, FinishReason.LENGTH)]

    run(main())


def test_a_cancel_of_a_waiting_sequence_is_told_while_a_step_runs() -> None:
    async def main() -> None:
        config = engine_config(max_batch_rows=1)
        async with live_engine(config=config) as live:
            first, second = new_sequence(0, max_tokens=9), new_sequence(1)
            live.add(first)
            live.add(second)
            await asyncio.sleep(0.05)
            assert live.cancel(second)
            await asyncio.sleep(0.01)
            assert [finish for _, finish in live.ends(second)] == [FinishReason.CANCELLED]
            assert len(live.loop._flight) == 1
            live.cancel(first)
            await live.until_idle()

    run(main())


def test_a_cancel_in_flight_frees_the_kv_when_that_step_comes_back() -> None:
    async def main() -> None:
        async with live_engine() as live:
            new = new_sequence(0, max_tokens=50)
            live.add(new)
            await asyncio.sleep(0.25)
            assert live.cancel(new)
            assert take_stats(live.engine).num_used_blocks > 0
            await asyncio.sleep(0.06)
            assert take_stats(live.engine).num_used_blocks == 0
            assert [finish for _, finish in live.ends(new)] == [FinishReason.CANCELLED]
            assert len(live.text(new)) == 2

    run(main())


def test_a_sequence_that_cannot_run_expires_by_itself() -> None:
    """All memory is taken away, so no step ever comes that could notice the time."""

    async def main() -> None:
        async with live_engine(num_blocks=8) as live:
            new = new_sequence(0, max_tokens=20, expires_s=2.5)
            live.add(new)
            async with live.gate.exclusive():
                live.engine.leave_executor(asyncio.get_running_loop().time())
                live.engine.enter_executor(0, 1)
            await asyncio.sleep(4)
            assert live.ends(new) == [(2.5, FinishReason.CANCELLED)]
            assert len(live.loop._flight) == 0

    run(main())


def test_a_running_sequence_expires_between_steps() -> None:
    async def main() -> None:
        async with live_engine() as live:
            new = new_sequence(0, max_tokens=100, expires_s=1.05)
            live.add(new)
            await live.until_idle()
            [(at_s, finish)] = live.ends(new)
            assert finish is FinishReason.CANCELLED
            assert 1.05 <= at_s <= 1.05 + 2 * STEP_S

    run(main())


def test_the_gate_is_handed_over_with_nothing_in_flight_in_order_of_asking() -> None:
    async def main() -> None:
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

    run(main())


def test_a_visitor_that_gives_up_or_fails_does_not_keep_the_gate() -> None:
    async def main() -> None:
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

    run(main())


def test_the_gate_turns_visitors_away_once_the_loop_has_ended() -> None:
    async def main() -> None:
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

    run(main())


def test_closing_takes_in_what_is_in_flight() -> None:
    async def main() -> None:
        async with live_engine() as live:
            new = new_sequence(0, max_tokens=30)
            live.add(new)
            await asyncio.sleep(0.25)
            live.loop.close()
            await asyncio.sleep(1)
            assert len(live.text(new)) == 3

    run(main())


@pytest.mark.parametrize("guilty_row", range(5))
def test_a_row_that_fails_alone_twice_ends_and_the_others_never_notice(guilty_row: int) -> None:
    failed: list[list[int]] = []

    def failure(batch: Batch) -> str | None:
        if guilty_row in batch.rows:
            failed.append(sorted(batch.rows.tolist()))
            return "broken"
        return None

    async def main() -> None:
        async with live_engine(failure=failure) as live:
            sequences = [new_sequence(name, num_prompt=4, max_tokens=6) for name in range(5)]
            for new in sequences:
                live.add(new)
            await live.until_idle()
            for row, new in enumerate(sequences):
                [(_, finish)] = live.ends(new)
                assert finish is (FinishReason.ERROR if row == guilty_row else FinishReason.LENGTH)
                assert live.text(new) == ([] if row == guilty_row else expected_text(live, new, 6))
            assert failed[-2:] == [[guilty_row], [guilty_row]]
            assert len(failed) <= 5, "5 rows, then at most 3, 2, 1, 1"

    run(main())


def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    async def main() -> None:
        async with live_engine(failure=lambda batch: "hiccup" if batch.step_id in (1, 5) else None) as live:
            sequences = [new_sequence(name, num_prompt=4, max_tokens=6) for name in range(5)]
            for new in sequences:
                live.add(new)
            await live.until_idle()
            assert all(live.text(new) == expected_text(live, new, 6) for new in sequences)
            assert live.engine.totals.num_failed_steps == 2

    run(main())


def test_a_row_that_failed_alone_is_clear_once_a_step_of_its_goes_well() -> None:
    """Steps 1 and 3 fail, each for the first time in a row; step 2 repeats step 1 and goes well."""

    async def main() -> None:
        async with live_engine(failure=lambda batch: "hiccup" if batch.step_id in (1, 3) else None) as live:
            new = new_sequence(0, max_tokens=6)
            live.add(new)
            await live.until_idle()
            assert live.text(new) == expected_text(live, new, 6)
            assert live.engine.totals.num_failed_steps == 2

    run(main())


def test_an_executor_that_always_fails_is_called_broken() -> None:
    async def main() -> None:
        async with live_engine(failure=lambda _: "on fire") as live:
            for name in range(8):
                live.add(new_sequence(name))
            await asyncio.sleep(10)

    with pytest.raises(ExecutorBrokenError, match="16 steps failed in a row, the last one with: on fire"):
        run(main())


def test_one_seed_gives_one_trace_in_processes_with_different_hash_seeds() -> None:
    outputs = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.support.engine_trace", "5"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    digest, num_events = outputs.pop().split()
    assert int(num_events) > 300
    assert (digest, int(num_events)) == trace_hash(5)
    assert digest != trace_hash(6)[0]
