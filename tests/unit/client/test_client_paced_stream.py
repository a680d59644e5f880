"""The pacer under an event loop, mostly in virtual time: instants, conservation, errors, and every kind of ending."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from sim.virtual_time import run
from sluice_client.paced_stream import MIN_TIMER_S, SMOOTH_FRAME_S, PacedStream
from sluice_client.pacer import PaceMode, Piece, SmoothPacing, make_pacer
from sluice_client.qoe import QoeTarget, displayed_times, final_qoe

TARGET = QoeTarget(ttft_s=0.5, speed_tokens_per_s=10.0)
MODES: list[PaceMode] = ["reading", "smooth", "off"]


class Source:
    """Yields a piece after each gap; knows whether it was closed."""

    def __init__(self, gaps_s: list[float], error: Exception | None = None) -> None:
        self.gaps_s = gaps_s
        self.error = error
        self.num_yielded = 0
        self.is_closed = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[str]:
        for i, gap_s in enumerate(self.gaps_s):
            if gap_s:
                await asyncio.sleep(gap_s)
            self.num_yielded += 1
            yield f"w{i} "
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        await asyncio.sleep(0.02)  # closing takes a while, and a cancellation may come within
        self.is_closed = True

    @property
    def text(self) -> str:
        return "".join(f"w{i} " for i in range(self.num_yielded))


def stream_of(source: Source, mode: PaceMode, **options: Any) -> PacedStream:
    return PacedStream(source, make_pacer(mode, TARGET), **options)


async def collect(stream: PacedStream) -> list[tuple[float, str]]:
    start_s = asyncio.get_running_loop().time()
    return [(asyncio.get_running_loop().time() - start_s, text) async for text in stream]


@pytest.mark.parametrize("start_s", [0.0, 12345.678, 4e6 + 0.1])
@pytest.mark.parametrize("mean_gap_s", [0.0, 0.01, 0.1, 0.7])
def test_reading_mode_shows_each_token_at_its_instant(mean_gap_s: float, start_s: float) -> None:
    """Producers much faster than, as fast as and much slower than the reader; late by less than the shortest timer."""
    rng = random.Random(21)
    gaps = [rng.uniform(0, 2 * mean_gap_s) for _ in range(60)]
    arrived = [sum(gaps[: i + 1]) for i in range(60)]
    stream = stream_of(Source(gaps), "reading")
    output = run(collect(stream), start_s=start_s)
    shown = [at_s for at_s, text in output for _ in text.split()]
    for at_s, due_s in zip(shown, displayed_times(TARGET, arrived), strict=True):
        assert -1e-7 <= at_s - due_s <= MIN_TIMER_S + 1e-7
    assert "".join(text for _, text in output) == "".join(f"w{i} " for i in range(60))
    assert stream.stats.qoe == pytest.approx(final_qoe(TARGET, arrived), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(gaps=st.lists(st.one_of(st.just(0.0), st.floats(0, 0.01), st.floats(0, 1)), max_size=50))
def test_all_text_comes_out_in_order_and_the_source_is_closed(mode: PaceMode, gaps: list[float]) -> None:
    source = Source(gaps)
    output = run(collect(stream_of(source, mode)))
    assert "".join(text for _, text in output) == "".join(f"w{i} " for i in range(len(gaps)))
    assert all(text for _, text in output)
    assert source.is_closed


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.02, 0.3])
def test_smooth_mode_draws_at_most_sixty_frames_a_second_and_ends_with_the_drain(gap_s: float) -> None:
    output = run(collect(stream_of(Source([gap_s] * 200), "smooth")))
    instants = [at_s for at_s, _ in output]
    assert all(b - a >= SMOOTH_FRAME_S - 1e-9 for a, b in pairwise(instants))
    assert instants[0] == pytest.approx(gap_s, abs=1e-6)
    assert instants[-1] <= 200 * gap_s + SmoothPacing().drain_s + SMOOTH_FRAME_S + 1e-6


def test_without_pacing_text_is_shown_as_it_arrives() -> None:
    output = run(collect(stream_of(Source([0.1] * 5), "off")))
    assert [at_s for at_s, _ in output] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.virtual_time
async def test_pieces_say_how_many_tokens_they_hold() -> None:
    async def source() -> AsyncIterator[Piece]:
        yield Piece("a", 3)
        yield Piece("b", 0)

    output = await collect(PacedStream(source(), make_pacer("reading", TARGET)))
    assert [text for _, text in output] == ["ab"]
    assert output[0][0] == pytest.approx(0.7, abs=1e-6)


@pytest.mark.virtual_time
async def test_time_counts_from_the_requests_arrival_if_that_is_given() -> None:
    await asyncio.sleep(77.0)
    now_s = asyncio.get_running_loop().time()
    await asyncio.sleep(0.4)
    output = await collect(stream_of(Source([0.0] * 3), "reading", started_s=now_s))
    assert [at_s for at_s, _ in output] == pytest.approx([0.1, 0.2, 0.3], abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.virtual_time
async def test_an_error_of_the_source_is_raised_after_the_text_before_it(mode: PaceMode) -> None:
    source, seen = Source([0.01] * 20, error=ValueError("lost")), []
    with pytest.raises(ValueError, match="lost"):  # noqa: PT012  the loop shows what came before the error
        async for text in stream_of(source, mode):
            seen.append(text)
    assert "".join(seen) == source.text
    assert source.num_yielded == 20
    assert source.is_closed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cancel_s", [0.0, 0.004, 0.0505, 0.101, 0.11, 0.119, 0.3])
@pytest.mark.virtual_time
async def test_cancelling_the_reader_in_any_state_leaves_no_task_and_no_text_lost(
    mode: PaceMode, cancel_s: float
) -> None:
    """Before the reader's first step, before the first piece, with a full buffer, while the source closes, after it."""
    source, seen = Source([0.01] * 10), []
    stream = stream_of(source, mode)

    async def read() -> None:
        async for text in stream:
            seen.append(text)
        await asyncio.sleep(10)

    task = asyncio.create_task(read())
    await asyncio.sleep(cancel_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert source.is_closed
    assert "".join(seen) + stream.drain() == source.text
    assert stream.stats.buffered_tokens == 0
    assert [text async for text in stream] == []
    await stream.aclose()


@pytest.mark.virtual_time
async def test_a_timeout_around_the_loop_ends_the_stream() -> None:
    source = Source([0.1] * 1000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.05):
            await collect(stream_of(source, "smooth"))
    assert source.is_closed
    assert source.num_yielded == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.virtual_time
async def test_leaving_the_context_ends_reader_and_source(mode: PaceMode) -> None:
    source = Source([0.01] * 1000)
    async with stream_of(source, mode) as stream:
        async for _ in stream:
            break
    assert source.is_closed
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.virtual_time
async def test_a_stream_left_behind_without_closing_ends_its_reader() -> None:
    source = Source([0.01] * 1000)
    async for _ in stream_of(source, "smooth"):
        break
    gc.collect()
    await asyncio.sleep(0.1)
    assert source.is_closed
    assert source.num_yielded < 5


@pytest.mark.virtual_time
async def test_closing_a_stream_that_was_never_used_closes_the_source() -> None:
    source = Source([1.0])
    stream = stream_of(source, "smooth")
    await stream.aclose()
    assert source.is_closed
    assert [text async for text in stream] == []
    assert stream.drain() == ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.virtual_time
async def test_stop_shows_what_had_arrived_at_once_and_ends(mode: PaceMode) -> None:
    source = Source([0.01] * 1000)
    stream = stream_of(source, mode)
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.1055)
    await stream.stop()
    output = await task
    assert "".join(text for _, text in output) == source.text
    assert output[-1][0] <= 0.1055 + 1e-6
    assert source.num_yielded == 10
    assert source.is_closed


@pytest.mark.virtual_time
async def test_skip_shows_the_rest_as_it_arrives() -> None:
    stream = stream_of(Source([0.01] * 50), "reading")
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.2)
    stream.skip()
    output = await task
    assert output[0][0] == pytest.approx(0.2, abs=1e-6)
    assert len(output[0][1].split()) in (19, 20)
    assert output[-1][0] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("mode", ["reading", "smooth"])
@pytest.mark.virtual_time
async def test_the_source_is_not_read_further_than_the_buffers_limit(mode: PaceMode) -> None:
    source = Source([0.0] * 500)
    deepest = 0
    stream = stream_of(source, mode, max_buffered_chars=40)
    async for _ in stream:
        deepest = max(deepest, stream.stats.buffered_chars)
    assert 0 < deepest < 40 + 5
    assert source.num_yielded == 500


@pytest.mark.virtual_time
async def test_a_source_that_is_cancelled_from_outside_does_not_pass_for_an_end() -> None:
    async def source() -> AsyncIterator[str]:
        yield "one "
        raise asyncio.CancelledError

    seen = []
    with pytest.raises(asyncio.CancelledError):  # noqa: PT012  the loop shows what came before the error
        async for text in PacedStream(source(), make_pacer("smooth", TARGET)):
            seen.append(text)
    assert seen == ["one "]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("mode", MODES)
def test_live_loops_show_all_text_and_never_early(
    mode: PaceMode, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A reader of 2 000 tokens/s, so that the whole answer takes 25 ms."""
    target = QoeTarget(ttft_s=0.001, speed_tokens_per_s=2000.0)

    async def main() -> None:
        source, loop = Source([0.0] * 50), asyncio.get_running_loop()
        asked_s = loop.time()
        stream = PacedStream(source, make_pacer(mode, target), started_s=asked_s)
        output = [(loop.time() - asked_s, text) async for text in stream]
        assert "".join(text for _, text in output) == source.text
        if mode == "reading":
            shown = [at_s for at_s, text in output for _ in text.split()]
            assert all(at_s >= 0.001 + i / 2000 - 1e-4 for i, at_s in enumerate(shown))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def test_the_same_input_gives_the_same_output_to_the_last_digit() -> None:
    rng = random.Random(22)
    gaps = [rng.expovariate(30.0) for _ in range(200)]
    traces = {tuple(run(collect(stream_of(Source(gaps), "smooth")))) for _ in range(3)}
    assert len(traces) == 1


async def test_a_cancellation_from_within_a_step_is_not_lost_in_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does it: the signal's handler cancels the task while it runs, just before it waits for the next frame.

    The time of that frame has passed when its timer begins, as on a machine that stalls.
    """
    monkeypatch.setattr("sluice_client.paced_stream.TIMER_SLACK_S", -1.0)

    async def source() -> AsyncIterator[str]:
        for _ in range(10_000):
            yield "tick "
            await asyncio.sleep(0.001)

    async def read() -> None:
        async with PacedStream(source(), make_pacer("smooth", TARGET)) as stream:
            count = 0
            async for _ in stream:
                count += 1
                if count == 3:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()

    reading = asyncio.create_task(read())
    done, _ = await asyncio.wait({reading}, timeout=5)
    assert done
    assert reading.cancelled()
