"""What a source keeps for who fetches a request: blocks as they are, a lease, and a row that leaves or goes on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.worker.engine.engine import Engine
from services.worker.migration.departures import LEASE_S, MAX_DEPARTURES, Departure, Departures
from services.worker.migration.kv_messages import GetKv, HasLeft, KvListed, LetGo, ListKv, NotHere, unpack_names
from services.worker.migration.shared_prefixes import shared_prefixes
from shared.errors import WireError
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import ListRunning
from shared.messages.report_parts import SharedPrefix
from shared.prefix_names import following_names, root_name
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

ONE = ListKv(request_id=RequestId("r0"), attempt=1)


class Source:
    """An engine with one long sequence under way, and what is open there."""

    def __init__(self) -> None:
        self.harness = make_harness(num_blocks=40, max_model_len=120, depth=1)
        self.reason = ""
        self.num_wakes = self.num_ends = 0
        self.departures = Departures(self.harness.engine, self.wake, lambda: self.reason)
        self.harness.add(new_sequence(0, num_prompt=30, max_tokens=60))
        while self.engine.table.num_computed[0] < 30:
            self.harness.step()

    @property
    def engine(self) -> Engine:
        return self.harness.engine

    def wake(self) -> None:
        self.num_wakes += 1

    def end(self) -> None:
        self.num_ends += 1

    def open(self) -> Departure:
        departure = self.departures.open(WorkerId("w1"), self.end)
        assert departure is not None
        return departure


async def listed(departure: Departure) -> tuple[bytes, ...]:
    said = await departure.answer(ONE)
    assert isinstance(said, KvListed)
    return unpack_names(said.names)


def fill_up(harness: EngineHarness) -> None:
    """Let others take all memory, so that whatever nobody holds or pins is lost."""
    for name in range(1, 9):
        harness.add(new_sequence(name, num_prompt=24, max_tokens=30))
    for _ in range(25):
        harness.step()


@pytest.mark.virtual_time
async def test_what_is_listed_stays_as_it_is_whatever_becomes_of_the_row() -> None:
    source = Source()
    departure = source.open()
    names = await listed(departure)
    assert len(names) == 30 // source.engine.config.block_size
    ids = departure.ids_of(GetKv(names=b"".join(names)))
    before = source.harness.kv.slots(ids)
    source.engine.registry.cancel(RequestId("r0"), 1)
    fill_up(source.harness)
    assert (source.harness.kv.slots(ids) == before).all(), "a block was handed out that somebody reads"
    assert isinstance(await departure.answer(ONE), NotHere)
    departure.close()
    assert not source.engine.blocks.pins.any()
    source.harness.finish()


@pytest.mark.virtual_time
async def test_a_list_grows_with_the_text_and_pins_each_block_once() -> None:
    source = Source()
    departure = source.open()
    first = await listed(departure)
    for _ in range(10):
        source.harness.step()
    second = await listed(departure)
    assert second[: len(first)] == first
    assert len(second) > len(first)
    assert source.engine.blocks.pins.max() == 1
    with pytest.raises(WireError, match="not listed"):
        departure.ids_of(GetKv(names=b"x" * 16))
    departure.close()
    assert not source.engine.blocks.pins.any()


@pytest.mark.virtual_time
async def test_it_says_whether_a_prompt_is_being_computed() -> None:
    """Who leaves in the middle of one would leave behind what the step under way computes."""
    source = Source()
    source.harness.add(new_sequence(1, num_prompt=100, max_tokens=5))
    departure = source.open()
    asked = ListKv(request_id=RequestId("r1"), attempt=1)
    told: list[bool] = []
    while not told or told[-1] or len(told) < 4:
        said = await departure.answer(asked)
        assert isinstance(said, KvListed)
        told.append(said.is_prefilling)
        source.harness.step()
    assert told.index(True) < len(told) - 2, "while it is computed, and neither before nor after"
    assert not told[0], "it waits, and has nothing"
    departure.close()


@pytest.mark.virtual_time
async def test_a_row_leaves_when_its_step_is_back_and_says_whereto() -> None:
    source = Source()
    departure = source.open()
    await listed(departure)
    source.harness.submitted()
    leaving = asyncio.ensure_future(departure.answer(LetGo()))
    await asyncio.sleep(0)
    assert source.engine.registry.leaving.rows
    assert source.num_wakes
    source.harness.land()
    assert isinstance(await leaving, HasLeft)
    story = source.harness.stories[1000]
    assert story.finish is FinishReason.RELEASED
    assert source.departures.num_left == 1
    departure.close()
    assert not len(source.departures)
    source.harness.judge()


@pytest.mark.virtual_time
async def test_a_row_that_was_to_leave_goes_on_if_the_connection_ends_first() -> None:
    source = Source()
    departure = source.open()
    await listed(departure)
    source.harness.submitted()
    leaving = asyncio.ensure_future(departure.answer(LetGo()))
    await asyncio.sleep(0)
    departure.close()
    assert isinstance(await leaving, NotHere)
    assert not source.engine.registry.leaving.rows
    source.harness.finish()
    assert source.harness.stories[1000].finish is FinishReason.LENGTH


@pytest.mark.virtual_time
async def test_of_two_who_fetch_one_request_the_second_is_refused_and_hinders_nobody() -> None:
    source = Source()
    first, second = source.open(), source.open()
    await listed(first)
    await listed(second)
    source.harness.submitted()
    leaving = asyncio.ensure_future(first.answer(LetGo()))
    await asyncio.sleep(0)
    refused = await second.answer(LetGo())
    assert isinstance(refused, NotHere)
    assert refused.is_refused
    second.close()
    assert source.engine.registry.leaving.rows, "it leaves for the first one"
    source.harness.land()
    assert isinstance(await leaving, HasLeft)
    first.close()
    source.harness.judge()


@pytest.mark.virtual_time
async def test_who_asks_nothing_more_loses_the_lease() -> None:
    source = Source()
    departure = source.open()
    await listed(departure)
    await asyncio.sleep(0.9 * LEASE_S)
    await listed(departure)
    await asyncio.sleep(0.9 * LEASE_S)
    assert source.num_ends == 0
    assert source.engine.blocks.pins.any()
    await asyncio.sleep(0.2 * LEASE_S)
    assert (source.num_ends, len(source.departures)) == (1, 0)
    assert not source.engine.blocks.pins.any()
    assert isinstance(await departure.answer(ONE), NotHere)
    with pytest.raises(WireError):
        departure.ids_of(GetKv(names=b""))


@pytest.mark.virtual_time
async def test_nothing_leaves_while_the_worker_says_why_not_and_each_lease_is_for_one_request() -> None:
    source = Source()
    source.harness.add(new_sequence(1, num_prompt=9))
    source.reason = "it is in a group"
    departure = source.open()
    said = await departure.answer(ONE)
    assert isinstance(said, NotHere)
    assert (said.is_refused, said.detail) == (True, "it is in a group")
    source.reason = ""
    await listed(departure)
    other = await departure.answer(ListKv(request_id=RequestId("r1"), attempt=1))
    assert isinstance(other, NotHere)
    assert not other.is_refused
    assert isinstance(await source.open().answer(LetGo()), NotHere), "nothing was listed"
    source.reason = "plan 7"
    said = await departure.answer(LetGo())
    assert isinstance(said, NotHere)
    assert said.is_refused
    source.departures.close()
    assert (source.num_ends, len(source.departures)) == (2, 0)
    assert not source.engine.blocks.pins.any()


@pytest.mark.virtual_time
async def test_only_so_many_are_fetched_at_a_time() -> None:
    source = Source()
    opened = [source.open() for _ in range(MAX_DEPARTURES)]
    assert source.departures.open(WorkerId("w1"), source.end) is None
    opened[0].close()
    source.open()
    source.departures.close()
    assert source.num_ends == MAX_DEPARTURES
    assert np.count_nonzero(source.engine.blocks.pins) == 0


async def test_what_others_hold_too_is_told_by_name_and_is_not_free_if_one_leaves() -> None:
    """Prompts of 40 tokens in blocks of 4, of which the first 14 are alike: three blocks. A third one is another's."""
    source = Source()
    first, second = (new_sequence(number, num_prompt=40).prompt for number in (1, 2))
    second[:14] = first[:14]
    for number, prompt in enumerate((first, second), start=1):
        source.harness.add(new_sequence(number, prompt=prompt.tolist(), max_tokens=50))
        while len(source.departures.running(ListRunning()).requests) < 1 + number:
            source.harness.step()
    parts = {str(part.choices[0][0]): part for part in source.departures.running(ListRunning()).requests}
    size, names = source.engine.config.block_size, {parts[name].prefix for name in ("r1", "r2")}
    assert size == 4
    assert [parts[name].num_prefix_blocks for name in ("r0", "r1", "r2")] == [0, 3, 3]
    assert [parts[name].num_held_blocks - parts[name].num_blocks for name in ("r0", "r1", "r2")] == [0, 3, 3]
    assert names == {following_names(root_name(""), first[:12].astype(np.int32).tobytes(), size)[-1].hex()}
    assert shared_prefixes(source.engine) == (SharedPrefix(name=names.pop(), num_blocks=3),)
    source.engine.registry.cancel(RequestId("r2"), 1)
    source.harness.step()
    assert shared_prefixes(source.engine) == ()
    (alone,) = (part for part in source.departures.running(ListRunning()).requests if part.choices[0][0] == "r1")
    assert (alone.prefix, alone.num_blocks) == ("", alone.num_held_blocks), "what nobody uses any more is free"


async def test_the_choices_of_a_request_are_one_that_goes_as_a_whole_or_not_at_all() -> None:
    """What they free together is more than the sum of what each would free: their prompt's blocks."""
    source = Source()
    prompt = new_sequence(1, num_prompt=40).prompt.tolist()
    source.harness.add(new_sequence(1, prompt=prompt, max_tokens=50))
    for name in (2, 3):
        source.harness.add(new_sequence(name, prompt=prompt, max_tokens=50, fork_of=1))
    while len(source.departures.running(ListRunning()).requests) < 2:
        source.harness.step()
    engine = source.engine
    whole, other = sorted(source.departures.running(ListRunning()).requests, key=lambda part: -len(part.choices))
    assert {name for name, _ in whole.choices} == {"r1", "r2", "r3"}
    assert {name for name, _ in other.choices} == {"r0"}
    rows = [engine.registry.row_of[key] for key in whole.choices]
    alone = sum(int(engine.blocks.freeable(np.array([row], dtype=np.int32))[0]) for row in rows)
    held = len(set(np.concatenate([engine.blocks.block_table[row, : engine.blocks.held[row]] for row in rows])))
    assert whole.num_blocks == whole.num_held_blocks == held > alone
    assert not whole.prefix, "who shares it goes along"
    assert len(source.departures.running(ListRunning(most_blocks=held)).requests) == 2
    assert len(source.departures.running(ListRunning(most_blocks=held - 1)).requests) == 1
    assert len(source.departures.running(ListRunning(limit=1)).requests) == 1
    source.harness.submitted()
    engine.registry.leaving.begin(rows[-1], "w1", lambda _: None)
    assert [part.choices for part in source.departures.running(ListRunning()).requests] == [other.choices]
    source.reason = "a plan is under way"
    assert not source.departures.running(ListRunning()).requests
    source.harness.land()
    source.harness.finish()
