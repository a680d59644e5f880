"""What of an engine is best effort's, as reports say it, and what it gives up when memory is to go."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import MIN_PARKED, most_parked, most_waiting, take_stats
from services.worker.roles.block_limit import BlockLimit, BlocksNeededError
from shared.api_keys import Tier
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

ROWS = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 9)), max_size=9)
"""Whether it is best effort, tokens of the prompt, outputs."""


def mixed(
    rows: list[tuple[bool, int, int]], *, num_steps: int, scheduler: str, num_blocks: int = 24, **engine: int
) -> EngineHarness:
    """Blocks of 4 tokens."""
    harness = make_harness(scheduler, num_blocks=num_blocks, **engine)
    for name, (is_flex, num_prompt, max_tokens) in enumerate(rows):
        tier = Tier.FLEX if is_flex else Tier.DEFAULT
        harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens, tier=tier, arrival_s=0.0))
    for _ in range(num_steps):
        harness.step()
    return harness


@settings(max_examples=40)
@given(ROWS, st.integers(0, 4), st.sampled_from(["andes", "fcfs", "lookahead"]))
def test_best_effort_and_the_others_together_are_all_that_there_is(
    rows: list[tuple[bool, int, int]], num_steps: int, scheduler: str
) -> None:
    """Where all are best effort the counts are the engine's own; where none are, they are 0."""
    for kind in (None, True, False):
        told = [(is_flex if kind is None else kind, *sizes) for is_flex, sizes in ((row[0], row[1:]) for row in rows)]
        engine = mixed(told, num_steps=num_steps, scheduler=scheduler).engine
        stats, found = take_stats(engine), take_stats(engine).best_effort
        alike = ("num_running", "num_waiting", "num_preempted", "num_used_blocks", "num_demanded_blocks")
        for name in (*alike, "num_uncomputed_blocks"):
            part, total = getattr(found, name), getattr(stats, name)
            assert 0 <= part <= total, name
            assert part == {None: part, True: total, False: 0}[kind], name
        assert found.gives_way == (scheduler != "fcfs")


def test_few_of_best_effort_may_wait_and_of_a_policy_that_cannot_put_others_first_fewer() -> None:
    """One batch, at most half of the rows; where it would be in the way, or nobody is there to compare with, a few.

    Of rows of 9 blocks two fit memory, of rows of one block 24.
    """
    andes, fcfs = (make_harness(name, num_blocks=24, max_sequences=64, max_batch_rows=20) for name in ("andes", "fcfs"))
    assert (most_parked(andes.engine), most_waiting(andes.engine)) == (MIN_PARKED, (64 - 20) // 2)
    for harness in (andes, fcfs):
        harness.add(new_sequence(0, num_prompt=3))
    assert most_parked(fcfs.engine) == MIN_PARKED
    assert most_parked(andes.engine) == 20
    for name in range(1, 4):
        andes.add(new_sequence(name, num_prompt=36, tier=Tier.FLEX))
    assert most_parked(andes.engine) == MIN_PARKED, "as many as fit are fewer"
    assert most_parked(make_harness("andes", max_sequences=6, max_batch_rows=20).engine) == 3


def full(scheduler: str) -> EngineHarness:
    """Two of best effort hold 8 blocks each, and one that somebody reads 3; 24 there are."""
    rows = [(True, 30, 20), (True, 30, 20), (False, 10, 20)]
    harness = mixed(rows, num_steps=1, scheduler=scheduler, max_batch_tokens=200)
    assert harness.engine.blocks.num_used == 19
    return harness


async def reach(harness: EngineHarness, num_blocks: int) -> BlockLimit:
    """Bring an engine within a limit while it makes steps."""
    limit = BlockLimit(harness.engine, lambda: None)
    given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    harness.submit()  # a step is under way, which nobody can leave
    reaching = asyncio.create_task(limit.reach(num_blocks, given_up))
    async with asyncio.timeout(5):
        while not reaching.done():
            await asyncio.sleep(0.01)
            harness.step()
            check_engine(harness.engine)
    await reaching
    return limit


@pytest.mark.parametrize(("num_prompt", "sits_out"), [(14, False), (34, True)])
def test_where_layers_can_be_dropped_it_sits_out_while_others_need_more_than_a_quarter_of_the_memory(
    num_prompt: int, sits_out: bool
) -> None:
    """Of 48 blocks others need 9 to 11, or 14 to 16, until the longer one ends; best effort keeps its KV."""
    rows = [(True, 10, 20), (False, 10, 20)]
    harness = mixed(rows, num_steps=3, scheduler="lookahead", num_blocks=48, max_batch_tokens=200)
    engine, row_of = harness.engine, harness.engine.registry.row_of
    flex, other = (row_of[new_sequence(name).request_id, 1] for name in (0, 1))
    harness.add(new_sequence(2, num_prompt=num_prompt, max_tokens=4))
    before = [int(engine.table.num_output[row]) for row in (flex, other)]
    for _ in range(4):
        harness.step()
    assert (new_sequence(2).request_id, 1) not in row_of
    went = [int(engine.table.num_output[row]) - count for row, count in zip((flex, other), before, strict=True)]
    assert went == [0 if sits_out else 4, 4]
    assert engine.totals.num_preemptions == 0
    assert engine.totals.num_pauses == sits_out
    harness.step()
    assert engine.table.num_output[flex] == before[0] + went[0] + 1
    harness.finish()


@pytest.mark.virtual_time
async def test_best_effort_that_gives_way_lets_memory_go_the_youngest_first() -> None:
    """13 blocks are to stay: one of the two gives up its 8, nobody else anything, and all get their text."""
    harness = full("andes")
    table = harness.engine.table
    limit = await reach(harness, 13)
    held = [int(table.held_blocks[harness.engine.registry.row_of[new_sequence(name).request_id, 1]]) for name in (0, 2)]
    assert min(held) > 0
    assert harness.engine.blocks.is_within_limit
    limit.go_back()
    harness.finish()


@pytest.mark.virtual_time
async def test_memory_that_others_need_or_that_nobody_would_give_up_does_not_go() -> None:
    for scheduler, num_blocks in (("andes", 2), ("fcfs", 13)):
        harness = full(scheduler)
        with pytest.raises(BlocksNeededError):
            await reach(harness, num_blocks)
        harness.finish()
