"""The lookahead scheduler: one lane is `chunked`; several are full, even and in order, in a real engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from services.worker.scheduling.chunked import ChunkedScheduler
from services.worker.scheduling.lookahead import LookaheadScheduler
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.shares import Line, Room, Shares
from services.worker.scheduling.view import Limits, Scheduler, SchedulerOutput
from services.worker.sequences.config import NewSequence
from shared.api_keys import Tier
from shared.cost import CostModel, load_profile
from sim.workload.lengths import find_lengths
from tests.support.engine_builders import make_engine, new_sequence, per_token
from tests.support.engine_chaos import make_chaos
from tests.support.engine_views import (
    check_contract,
    chosen,
    decoding,
    in_lanes,
    make_view,
    parked,
    prefilling,
    random_flights,
    random_view,
)
from tests.support.seeds import first_of
from tests.support.toy_pipeline import ToyPipeline

COST = load_profile("qwen2.5-14b-tp1-a800").cost


def same(one: SchedulerOutput, other: SchedulerOutput) -> bool:
    names = ("rows", "num_tokens", "preempt", "preempt_how", "resume")
    return one.reason == other.reason and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in names
    )


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_with_one_lane_it_is_chunked(seed: int, swaps: bool) -> None:
    view = replace(random_view(np.random.default_rng(seed), swaps=swaps), cost=COST)
    assert same(LookaheadScheduler().schedule(view), make_scheduler("chunked-flex-last").schedule(view))


@pytest.mark.parametrize(("free_blocks", "sits_out"), [(100, False), (60, True)])
def test_in_lanes_too_best_effort_sits_out_while_others_need_more_than_a_quarter_of_the_memory(
    free_blocks: int, sits_out: bool
) -> None:
    """Others need 33 blocks, of 161 or 121 in all; of best effort four decode, and two have begun a prompt."""
    rows = [decoding(60), prefilling(60, 16), *[decoding(40)] * 4, *[prefilling(30, 6)] * 2]
    view = in_lanes(make_view(running=rows, free_blocks=free_blocks, cost=COST), 2, [7], ends=np.full(8, 18))
    view.columns.tier[2:] = Tier.FLEX
    assert view.extensible.tolist() == [7]
    chosen_rows = set(LookaheadScheduler().schedule(view).rows.tolist())
    assert chosen_rows & {0, 1}
    assert (not chosen_rows - {0, 1}) == sits_out


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.booleans())
def test_with_several_lanes_every_answer_keeps_the_contract(
    seed: int,
    num_lanes: int,
    swaps: bool,
) -> None:
    random = np.random.default_rng(seed)
    view = replace(random_flights(random_view(random, swaps=swaps), num_lanes, random), cost=COST)
    output = LookaheadScheduler().schedule(view)
    check_contract(view, output)
    assert same(output, LookaheadScheduler().schedule(view)), "the same again"


@pytest.mark.parametrize("cost", [None, CostModel(0.1, 0, 0, 0, 0, 0)])
def test_where_nothing_says_what_a_token_costs_pieces_have_equal_numbers(cost: CostModel | None) -> None:
    view = in_lanes(make_view(running=[decoding(5)] * 3, waiting=[parked(16), parked(40)]), 2)
    output = LookaheadScheduler().schedule(replace(view, cost=cost))
    assert output.reason == "mixed"
    assert same(output, LookaheadScheduler().schedule(replace(view, cost=per_token(1.0))))


def test_decodes_are_split_evenly_while_nothing_is_queued() -> None:
    """Five decodes over two lanes: three, then the other two."""
    view = make_view(running=[decoding(5)] * 5)
    scheduler = LookaheadScheduler()
    assert chosen(scheduler.schedule(in_lanes(view, 2))) == [(0, 1), (1, 1), (2, 1)]
    assert chosen(scheduler.schedule(in_lanes(view, 2, [0, 1, 2]))) == [(3, 1), (4, 1)]


def test_a_step_holds_its_decodes_and_a_piece_of_the_line() -> None:
    """80 tokens, of which 32 - 1 decode - 2 to spare fit a step for sure: three of 27, 27 and 26."""
    view = make_view(running=[decoding(5)] * 2, waiting=[parked(16), parked(12), parked(40), parked(12)])
    assert chosen(LookaheadScheduler().schedule(in_lanes(view, 2))) == [(0, 1), (2, 16), (3, 10)]


def test_the_next_chunk_of_a_prompt_follows_while_the_one_before_is_in_flight() -> None:
    """150 tokens at 20 a step, 2 of them to spare: nine pieces of 16.7, at 16, 33, 50, ..."""
    scheduler = LookaheadScheduler()
    view = make_view(waiting=[parked(90), parked(60)], max_batch_tokens=20)
    assert chosen(scheduler.schedule(in_lanes(view, 2))) == [(0, 16)]
    begun = make_view(running=[prefilling(90, 0, held=4)], waiting=[parked(60)], max_batch_tokens=20)
    flying = in_lanes(begun, 2, [0], ends=np.array([16, 60], dtype=np.int32))
    assert chosen(scheduler.schedule(flying)) == [(0, 17)]
    for end in (33, 50, 66):
        flying = in_lanes(begun, 2, [0], [0], ends=np.array([end, 60], dtype=np.int32))
        output = scheduler.schedule(flying)
    flying = in_lanes(begun, 2, [0], [0], ends=np.array([83, 60], dtype=np.int32))
    assert chosen(output) == [(0, 17)]
    assert chosen(scheduler.schedule(flying)) == [(0, 7), (1, 10)], "and the next prompt fills its last piece up"


def test_a_prompt_alone_is_in_all_stages_at_once() -> None:
    """Nobody decodes: one piece per lane, of at least 256 tokens; 600 tokens are two of 300."""
    view = make_view(waiting=[parked(600)], max_batch_tokens=2048, free_blocks=1000)
    assert chosen(LookaheadScheduler().schedule(in_lanes(view, 2))) == [(0, 300)]
    assert chosen(LookaheadScheduler().schedule(in_lanes(view, 4))) == [(0, 300)]
    view = make_view(running=[decoding(5)], waiting=[parked(600)], max_batch_tokens=2048, free_blocks=1000)
    assert chosen(LookaheadScheduler().schedule(in_lanes(view, 2))) == [(0, 1), (1, 100)], "six beside decodes"
    assert chosen(LookaheadScheduler().schedule(in_lanes(view, 2, [0]))) == [(1, 100)], "also if they are away"


def test_nobody_overtakes_a_prompt_of_which_not_even_a_token_fits_the_rest_of_a_piece() -> None:
    """Pieces of 30: the last token of row 0 is worth 12, one of row 1 is worth 52, one of row 2 would be worth 2."""
    cost = per_token(1.0, pair_s=1.0)
    view = make_view(running=[prefilling(11, 0, held=3), prefilling(60, 50)], waiting=[parked(9)], cost=cost)
    flying = in_lanes(view, 2, [0], ends=np.array([10, 60, 9], dtype=np.int32))
    assert chosen(LookaheadScheduler().schedule(flying)) == [(0, 1)]


def test_lanes_share_decodes_by_what_they_read() -> None:
    """Reading costs a tenth of a token per token of KV: 1 + 10 of 2 + 2 + 11 are the first half, of 4 the rest."""
    cost = per_token(1.0, read_s=0.1)
    view = make_view(running=[decoding(100), decoding(10), decoding(10)], free_blocks=100, cost=cost)
    scheduler = LookaheadScheduler()
    assert chosen(scheduler.schedule(in_lanes(view, 2))) == [(0, 1)]
    assert chosen(scheduler.schedule(in_lanes(view, 2, [0]))) == [(1, 1), (2, 1)]
    view = in_lanes(make_view(running=[decoding(5)] * 4), 2, last_step=[9, 7, 8, 6])
    assert chosen(scheduler.schedule(view)) == [(1, 1), (3, 1)], "first who has waited longest"


def engine_of(
    scheduler: Scheduler, num_lanes: int, *, num_blocks: int = 40_000, max_batch_tokens: int = 2048
) -> Engine:
    return make_engine(
        scheduler,
        num_blocks=num_blocks,
        cost=COST,
        max_sequences=2048,
        max_batch_tokens=max_batch_tokens,
        max_batch_rows=512,
        max_model_len=40_000,
        vocab_size=1000,
        block_size=16,
        prefix_caching=False,
        num_lanes=num_lanes,
    )


def sequences(prompts: list[int], outputs: list[int], arrivals_s: list[float]) -> list[NewSequence]:
    return [
        new_sequence(name, prompt=[5] * prompt, max_tokens=output, ignore_eos=True, arrival_s=arrival_s)
        for name, (prompt, output, arrival_s) in enumerate(zip(prompts, outputs, arrivals_s, strict=True))
    ]


def formed_ahead(prompts: list[int], limits: Limits) -> list[list[tuple[int, int, int]]]:
    """The steps of a line of prompts beside which nobody decodes: prompt, prefix and tokens of each chunk, in order."""
    room, shares = Room.beside(0, limits, COST), Shares(limits.num_lanes)
    begins, first = [0] * len(prompts), 0
    formed: list[list[tuple[int, int, int]]] = []
    while first < len(prompts):
        left = [n - begin for n, begin in zip(prompts, begins, strict=True)]
        work_s = sum(map(COST.chunk_s, begins, left))
        left_s = shares.next_s(Line(work_s, sum(left), len(prompts) - first), room, is_alone=True)
        formed.append([])
        while first < len(prompts) and (size := min(left[first], COST.largest(begins[first], left_s))):
            formed[-1].append((first, begins[first], size))
            left_s -= COST.chunk_s(begins[first], size)
            begins[first] += size
            if size < left[first]:
                break
            first += 1
        assert formed[-1], "a share holds a token"
    return formed


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_an_engine_hands_out_what_was_formed_ahead(seed: int, num_lanes: int) -> None:
    """A closed queue, whose answers are one token long so that nobody decodes: a last token of a prompt would.

    Every step ends within a token of where it should, and so begins there: works differ by two tokens at most.
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 600, size=random.integers(1, 16 * num_lanes)).tolist()
    engine = engine_of(LookaheadScheduler(), num_lanes, max_batch_tokens=256)
    pipeline = ToyPipeline(engine, COST, num_lanes)
    pipeline.run(sequences(prompts, [1] * len(prompts), [0.0] * len(prompts)))
    formed = formed_ahead(prompts, Limits(256, 512, num_lanes))
    assume(all(prefix + size != prompts[prompt] - 1 for chunks in formed for prompt, prefix, size in chunks))
    expected = [[(prompt, size) for prompt, _, size in chunks] for chunks in formed]
    assert [sorted(batch) for batch in pipeline.chunks_by_name] == expected
    works = [sum(COST.chunk_s(prefix, size) for _, prefix, size in chunks) for chunks in formed]
    assert max(works) - min(works) <= 2 * COST.chunk_s(max(prompts), 1) + 1e-9


def bubbles(scheduler: Scheduler, num_lanes: int, lengths: str, rate_per_s: float) -> tuple[float, int]:
    """Idle share of the stages while requests queue, and tokens computed until then: 8 s to 24 s of an overload."""
    random = np.random.default_rng(11)
    prompts, outputs = find_lengths(lengths).sample(int(rate_per_s * 24), random)
    arrivals_s = np.cumsum(random.exponential(1 / rate_per_s, size=prompts.size))
    pipeline = ToyPipeline(engine_of(scheduler, num_lanes), COST, num_lanes)
    pipeline.run(sequences(prompts.tolist(), outputs.tolist(), arrivals_s.tolist()), until_s=24)
    assert take_stats(pipeline.engine).num_waiting > 8, "requests queue"
    return pipeline.idle_ratio(8, 24), sum(int(batch.num_tokens.sum()) for batch in pipeline.batches)


@pytest.mark.slow
@pytest.mark.parametrize(("num_lanes", "rate_per_s"), [(2, 4.0), (4, 8.0)])
def test_under_queueing_the_stages_stand_idle_for_less_than_a_fiftieth(num_lanes: int, rate_per_s: float) -> None:
    """Long documents: by token count several times as much, and so fewer tokens."""
    idle, tokens = bubbles(LookaheadScheduler(), num_lanes, "longbench", rate_per_s)
    idle_by_count, tokens_by_count = bubbles(ChunkedScheduler(), num_lanes, "longbench", rate_per_s)
    assert idle < 0.02
    assert idle_by_count > 3 * idle
    assert tokens > tokens_by_count


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of(range(6), in_ci=2))
@pytest.mark.parametrize("num_lanes", [2, 3])
@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_texts_survive_any_order_of_operations(seed: int, num_lanes: int, num_host_blocks: int) -> None:
    """Several batches in flight while sequences come, go, fail, lose memory and get it back."""
    chaos = make_chaos(
        LookaheadScheduler(),
        [seed, num_lanes, num_host_blocks],
        num_lanes=num_lanes,
        num_stages=1,
        num_host_blocks=num_host_blocks,
        cost=per_token(1.0, pair_s=0.1),
    )
    chaos.unruly.is_calm = bool(seed % 2)
    chaos.live_through(300)


def test_lanes_do_not_starve_when_memory_is_short() -> None:
    """Room for about three of twelve at a time: all end, on two stages, and no stage is forgotten."""
    random = np.random.default_rng(3)
    prompts, outputs = random.integers(100, 400, size=12).tolist(), random.integers(20, 60, size=12).tolist()
    engine = engine_of(LookaheadScheduler(), 2, num_blocks=80, max_batch_tokens=128)
    pipeline = ToyPipeline(engine, CostModel(1e-3, 1e-5, 0, 0, 1e-8, 1e-8), 2)
    pipeline.run(sequences(prompts, outputs, [0.0] * 12))
    assert engine.totals.num_finished == 12
    check_engine(engine)
