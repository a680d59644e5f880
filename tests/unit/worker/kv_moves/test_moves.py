"""Meters of what moves: rates against a plain sum, and events that say the same as the meters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.executor.parameter_load import ParameterLoad
from services.worker.kv_moves.transfers import (
    LOOK_S,
    NUM_SAMPLES,
    RATE_WINDOW_S,
    TransferFacts,
    TransferMeter,
    Transfers,
)
from shared.messages.report import TransferKind
from shared.process.tasks import TaskOwner
from shared.sizes import describe_bytes

pytestmark = pytest.mark.virtual_time

MIB = 2**20


@pytest.mark.parametrize("seed", range(30))
def test_the_rate_is_that_of_the_last_second(seed: int) -> None:
    """Samples are thinned, so that the window may begin a little early."""
    rng = np.random.default_rng(seed)
    meter = TransferMeter(TransferFacts(TransferKind.KV_EXCHANGE, 10**9), 5.0)
    told = [(5.0, 0)]
    for gap_s, num_bytes in zip(rng.exponential(0.02, 300), rng.integers(0, 10**6, 300), strict=True):
        now_s, count = told[-1][0] + float(gap_s), told[-1][1] + int(num_bytes)
        told.append((now_s, count))
        meter.reach(count, now_s)
        past_s = max(now_s - RATE_WINDOW_S, 5.0)
        last_s = max(at_s for at_s, _ in told if at_s <= past_s)
        possible = [
            (count - size) / max(now_s - at_s, RATE_WINDOW_S / NUM_SAMPLES)
            for at_s, size in told
            if last_s - RATE_WINDOW_S / NUM_SAMPLES <= at_s <= last_s
        ]
        assert meter.bytes_per_s(now_s) in possible


def test_the_rate_falls_to_nothing_when_nothing_comes() -> None:
    meter = TransferMeter(TransferFacts(TransferKind.KV_COPY, 100), 0.0)
    assert meter.bytes_per_s(0.0) == 0.0, "nothing is there"
    meter.reach(100, 0.5)
    assert meter.bytes_per_s(0.5) == 200.0
    assert meter.bytes_per_s(0.9) == pytest.approx(100 / 0.9)
    assert meter.bytes_per_s(3.0) == 0.0
    move = meter.look(3.0, 7)
    assert (move.num_bytes, move.num_moved_bytes, move.elapsed_s, move.num_waiting) == (100, 100, 3.0, 7)


def test_what_is_there_is_never_more_than_what_was_expected() -> None:
    meter = TransferMeter(TransferFacts(TransferKind.KV_COPY, 0), 0.0)
    meter.reach(30, 0.1)
    assert meter.num_bytes == 30
    meter.reach(30, 0.2, 50)
    assert (meter.num_moved_bytes, meter.num_bytes) == (30, 50)


@dataclass
class Told:
    """Moves of one worker, and the events that were told of them."""

    tasks: TaskOwner
    events: list[tuple[str, str]] = field(default_factory=list)
    num_waiting: int = 0

    def __post_init__(self) -> None:
        now = asyncio.get_running_loop().time
        self.moves = Transfers(lambda: self.num_waiting, lambda *told: self.events.append(told), now, self.tasks)


async def test_an_exchange_is_told_when_it_begins_and_ends_and_shown_between() -> None:
    async with TaskOwner() as tasks:
        told = Told(tasks)
        told.num_waiting = 3
        meter = told.moves.begin(TransferFacts(TransferKind.KV_EXCHANGE, 4 * MIB, ("w0", "w1"), "live"))
        assert told.events == [("kv_exchange_begun", "4.0 MiB of KV from w0, w1, live; 3 requests wait for theirs")]
        await asyncio.sleep(0.5)
        meter.reach(MIB, asyncio.get_running_loop().time())
        told.num_waiting = 1
        (move,) = told.moves.look()
        assert (move.kind, move.mode, move.sources, move.num_waiting) == (
            TransferKind.KV_EXCHANGE,
            "live",
            ("w0", "w1"),
            1,
        )
        assert (move.num_moved_bytes, move.num_bytes, move.bytes_per_s) == (MIB, 4 * MIB, 2 * MIB)
        await asyncio.sleep(0.5)
        told.moves.end(meter, "80 blocks are computed again")
        told.moves.end(meter, "told twice")
        assert told.moves.look() == ()
        reason = "1.0 MiB of 4.0 MiB of KV from w0, w1, live in 1.000 s, 1.0 MiB/s: 80 blocks are computed again"
        assert told.events[1:] == [("kv_exchange_ended", reason)]


async def test_parameters_are_followed_to_their_end() -> None:
    async with TaskOwner() as tasks:
        told = Told(tasks)
        began_s = asyncio.get_running_loop().time()

        def look() -> ParameterLoad:
            """A MiB comes in a second, of two."""
            count = min(int((asyncio.get_running_loop().time() - began_s) * MIB), 2 * MIB)
            return ParameterLoad(2 * MIB, count, (("w1", count),), is_over=count == 2 * MIB)

        told.moves.follow(look)
        await asyncio.sleep(1.0)
        (move,) = told.moves.look()
        assert move.kind is TransferKind.PARAMETER_LOAD
        assert move.sources == ("w1",)
        assert move.num_moved_bytes == pytest.approx(MIB, rel=2 * LOOK_S)
        assert move.bytes_per_s == pytest.approx(MIB, rel=2 * LOOK_S)
        await asyncio.sleep(1.0 + 2 * LOOK_S)
        assert told.moves.look() == ()
        (begun, first), (ended, last) = told.events
        assert (begun, first) == ("parameter_load_begun", "2.0 MiB of parameters")
        assert ended == "parameter_load_ended"
        assert last.startswith("2.0 MiB of 2.0 MiB of parameters from w1 in 2.0")
        assert last.endswith("all is there: 2.0 MiB from w1")
        told.moves.follow_no_more()
        assert len(told.events) == 2, "it was over"


@pytest.mark.parametrize("ends_by", ["another load", "a change", "nothing to load any more", "no source"])
async def test_parameters_that_do_not_come_are_told_of_once(ends_by: str) -> None:
    async with TaskOwner() as tasks:
        told = Told(tasks)
        found: list[ParameterLoad | None] = [ParameterLoad(2 * MIB, MIB, (("w1", MIB),), is_over=False)]
        told.moves.follow(lambda: found[-1])
        await asyncio.sleep(0.5)
        if ends_by == "another load":
            told.moves.follow(lambda: found[-1])
            assert [name for name, _ in told.events][1:] == ["parameter_load_ended", "parameter_load_begun"]
            assert len(told.moves.look()) == 1
            found.append(None)
            await asyncio.sleep(0.5)
        elif ends_by == "a change":
            told.moves.follow_no_more()
        else:
            found.append(None if ends_by != "no source" else ParameterLoad(2 * MIB, MIB, (("w1", MIB),), is_over=True))
            await asyncio.sleep(0.5)
        assert told.moves.look() == ()
        name, reason = told.events[1]
        assert name == "parameter_load_ended"
        assert reason.startswith("1.0 MiB of 2.0 MiB of parameters from w1 in 0.5")
        assert ("no source" in reason) == (ends_by == "no source")
        await asyncio.sleep(0.5)
        assert [name for name, _ in told.events].count("parameter_load_ended") == (2 if "another" in ends_by else 1)


async def test_a_load_of_nothing_is_not_told() -> None:
    async with TaskOwner() as tasks:
        told = Told(tasks)
        told.moves.follow(lambda: None)
        told.moves.follow_no_more()
        assert told.events == []


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (2**61, "2048.0 PiB")],
)
def test_sizes_are_shown_with_units(num_bytes: int, shown: str) -> None:
    assert describe_bytes(num_bytes) == shown
