"""Which rows ask for KV memory, as a worker reports it: where others may have their blocks only those without slack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.demand import SLACK_S, SLOWED_TIMES, count_queued_for_memory, take_demand
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from shared.api_keys import Tier
from shared.cost import CostModel
from shared.types import ReaderTarget
from tests.support.engine_builders import engine_config, make_engine, new_sequence
from tests.support.engine_harness import EngineHarness

COST = CostModel(g0_s=0.0, b0_s=0.05, g1_s=0.0, b1_s=0.05, d_s=0.0, a_s=0.0)
"""Every token of a prompt takes 50 ms."""
NOW_S = 10.0
NUM_BLOCKS, BLOCK_SIZE = 32, 4
PROMPTS = st.lists(
    st.tuples(st.sampled_from(["runs", "gave way", "waits"]), st.integers(1, 40), st.floats(-9, 9), st.booleans()),
    max_size=8,
)
"""Where a sequence is, tokens of its prompt, seconds of text that its reader has beyond what it takes to be back."""


def placed(
    engine: Engine, rows: list[tuple[str, int, float, bool]], arrivals_s: Sequence[float] = ()
) -> list[tuple[str, int, bool, int, int]]:
    """Have sequences in an engine that is at `NOW_S`; when they came, in order, or all of them at 0.

    Return of each where it is, its blocks, its slack, those held, and those that others may have.
    """
    found, table = [], engine.table
    engine.noted_s = NOW_S
    for name, (place, num_prompt, text_s, is_read) in enumerate(rows):
        new = new_sequence(name, prompt=[name + 2] * num_prompt, arrival_s=0.0, qoe=ReaderTarget(ttft_s=1))
        if arrivals_s:
            new = replace(new, arrival_s=arrivals_s[name])
        if not is_read:
            new = replace(new, tier=Tier.FLEX)
        row = engine.registry.add(new)
        assert isinstance(row, int)
        num_blocks = -(-num_prompt // BLOCK_SIZE)
        if place != "waits" and num_blocks > engine.blocks.num_free:
            place = "waits"
        if place != "waits":
            table.admit(row)
            engine.blocks.extend(np.array([row]), np.array([num_prompt], dtype=np.int32))
            table.num_computed[row] = num_prompt
        if place == "gave way":
            engine._transitions.preempt(row, num_kept=num_prompt // BLOCK_SIZE // 2)
        back_s = COST.token_s * (num_prompt - (int(table.num_computed[row]) if place == "gave way" else 0))
        table.qoe_last_s[row] = NOW_S + text_s + SLACK_S + back_s - table.qoe_gap_s[row] if is_read else np.nan
        held = int(table.held_blocks[row])
        may_lose_all = not is_read or text_s > (COST.token_s * held * BLOCK_SIZE if place == "gave way" else 0)
        found.append((place, num_blocks, not is_read or text_s > 0, held, held * may_lose_all))
    return found


@settings(max_examples=60)
@given(PROMPTS, st.sampled_from(["andes", "lqsf", "sluice"]))
def test_only_rows_without_slack_ask_for_memory_and_those_with_slack_lend_theirs(
    rows: list[tuple[str, int, float, bool]], scheduler: str
) -> None:
    """What is asked for, row by row."""
    rows = [(place, num, text_s, is_read) for place, num, text_s, is_read in rows if abs(text_s) > 1e-6]
    engine = make_engine(scheduler, num_blocks=NUM_BLOCKS, cost=COST)
    found = placed(engine, rows)
    line = [each for place in ("gave way", "waits") for each in found if each[0] == place]
    late = [each for each in line if not each[2]]
    lent = sum(num_free for *_, num_free in found)
    head = late[0][1] - late[0][3] if late else 0
    num_running = sum(place == "runs" for place, *_ in found)
    there = engine.blocks.num_free + lent - num_running
    fits = [sum(size - held for _, size, _, held, _ in late[: i + 1]) <= there for i in range(len(late))]
    places = engine.config.max_batch_rows - num_running
    demand = take_demand(engine)
    assert demand.num_head_blocks == head
    assert demand.num_slack_blocks == lent
    assert demand.num_queued == count_queued_for_memory(engine)
    assert demand.num_queued == min(fits.count(False), places)
    stats = take_stats(engine)
    asked = sum(num_blocks - held for _, num_blocks, has_slack, held, _ in line if has_slack)
    assert stats.num_slack_demanded_blocks == min(asked, stats.num_demanded_blocks)
    assert stats.num_slack_blocks <= stats.num_used_blocks


@pytest.mark.parametrize("scheduler", ["chunked-flex-last", "lookahead"])
@settings(max_examples=100)
@given(PROMPTS, st.lists(st.floats(0, NOW_S), min_size=8, max_size=8), st.just(-np.inf) | st.floats(0, NOW_S))
def test_who_keeps_to_the_order_of_arrival_counts_all_others_but_whom_best_effort_has_slowed(
    scheduler: str, rows: list[tuple[str, int, float, bool]], arrivals_s: list[float], beside_s: float
) -> None:
    """Whose blocks others may have, whatever text they have; if the first who counts does not fit all of them wait.

    Best effort was in a step at `beside_s` for the last time.
    """
    engine, arrivals_s = make_engine(scheduler, num_blocks=NUM_BLOCKS, cost=COST), sorted(arrivals_s)
    engine.beside_best_effort_s = beside_s
    counts = [
        is_read and SLOWED_TIMES * (beside_s - came_s) <= NOW_S - beside_s
        for (*_, is_read), came_s in zip(rows, arrivals_s, strict=False)
    ]
    found = [(*each, does) for each, does in zip(placed(engine, rows, arrivals_s), counts, strict=True)]
    lent = sum(held for *_, held, _, does in found if not does)
    line = [each for place in ("gave way", "waits") for each in found if each[0] == place and each[-1]]
    lacks = [num_blocks - held for _, num_blocks, _, held, *_ in line]
    num_running = len(engine.table.running)
    is_short = bool(lacks) and lacks[0] > engine.blocks.num_free + lent - num_running
    demand = take_demand(engine)
    assert demand.num_head_blocks == (lacks[0] if lacks else 0)
    assert demand.num_slack_blocks == lent
    best_effort = sum(held for (*_, held, _, _), (*_, is_read) in zip(found, rows, strict=True) if not is_read)
    assert take_stats(engine).num_slowed_blocks == lent - best_effort
    assert demand.num_queued == count_queued_for_memory(engine)
    assert demand.num_queued == min(len(lacks) * is_short, engine.config.max_batch_rows - num_running)


@pytest.mark.parametrize("scheduler", ["chunked-flex-last", "lookahead"])
def test_a_step_with_best_effort_slows_who_is_there(scheduler: str) -> None:
    """A document alone; with a chat; and with one more, who needs so much that the document is in no step."""
    harness = EngineHarness(make_engine(scheduler, num_blocks=NUM_BLOCKS, config=engine_config(max_batch_tokens=128)))
    steps: list[tuple[float, float]] = []
    for stream, (num_prompt, tier) in enumerate([(4, Tier.FLEX), (4, Tier.DEFAULT), (60, Tier.DEFAULT)]):
        new = new_sequence(stream, prompt=[stream + 2] * num_prompt, max_tokens=20, arrival_s=harness.now_s)
        harness.add(replace(new, tier=tier))
        for _ in range(2):
            asked_s = harness.now_s
            harness.stepped()
            steps.append((asked_s, harness.engine.beside_best_effort_s))
    assert [beside_s == asked_s for asked_s, beside_s in steps] == [True] * 4 + [False] * 2
    assert take_demand(harness.engine).num_slack_blocks == 4, "the document's and the first chat's, two each"


@pytest.mark.parametrize("scheduler", ["fcfs", "chunked", "round-robin"])
@settings(max_examples=40)
@given(PROMPTS)
def test_who_keeps_to_the_order_of_arrival_counts_everybody(
    scheduler: str, rows: list[tuple[str, int, float, bool]]
) -> None:
    engine = make_engine(scheduler, num_blocks=NUM_BLOCKS, cost=COST)
    found = placed(engine, rows)
    line = [each for place in ("gave way", "waits") for each in found if each[0] == place]
    demand = take_demand(engine)
    assert demand.num_head_blocks == (line[0][1] - line[0][3] if line else 0)
    is_short = demand.num_head_blocks + len(engine.table.running) > engine.blocks.num_free
    assert (demand.num_queued > 0) == (bool(line) and is_short)
    assert (demand.num_slack_blocks, demand.num_slack_demanded_blocks) == (0, 0)
