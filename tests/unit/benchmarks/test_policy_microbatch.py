"""Microbatches formed ahead: conservation, order, equal cost, limits; beside other ways, a bound, and the optimum."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_lookahead.formations import by_halving, by_tokens
from benchmarks.paper_lookahead.microbatch import (
    Chunk,
    Microbatch,
    Waiting,
    branch_of,
    form_ahead,
    microbatch_s,
    spread,
)
from benchmarks.paper_lookahead.pipeline_time import makespan_s, over_stages
from services.worker.scheduling.shares import MIN_TOKENS, STEPS_PER_LANE, Line, Room, Shares
from services.worker.scheduling.view import Limits
from shared.cost import CostModel, load_profile
from sim.workload.lengths import find_lengths
from tests.support.engine_builders import per_token

A800 = load_profile("qwen2.5-14b-tp1-a800")
COST = A800.cost
STEEP = CostModel(g0_s=3e-3, b0_s=1e-3, g1_s=0, b1_s=0, d_s=1e-5, a_s=1e-5)
"""Attention costs as much as the rest after a hundred tokens."""


def random_queue(random: np.random.Generator, *, most: int = 40) -> list[Waiting]:
    prefix = random.integers(0, 500, size=random.integers(1, most)) * (random.random() < 0.5)
    return [Waiting(int(p), int(n)) for p, n in zip(prefix, random.integers(1, 400, size=prefix.size), strict=True)]


def random_limits(random: np.random.Generator) -> Limits:
    return Limits(int(random.choice([16, 64, 256, 1000])), int(random.choice([4, 8, 64])), int(random.integers(1, 5)))


def random_decodes(random: np.random.Generator, limits: Limits) -> list[int]:
    most = (min(limits.max_batch_tokens, limits.max_batch_rows) - 1) * limits.num_lanes
    return [int(kv) for kv in random.integers(1, 1000, size=random.integers(0, most + 1))]


def check(queue: list[Waiting], decodes: list[int], limits: Limits, formed: list[Microbatch]) -> None:
    """Every token once and in order; first come first; each decode once in each round; limits; costs."""
    done = [waiting.prefix for waiting in queue]
    line = 0
    lanes = [formed[lane].decodes for lane in range(min(limits.num_lanes, len(formed)))]
    for turn, batch in enumerate(formed):
        for chunk in batch.chunks:
            assert chunk.num_tokens >= 1
            assert chunk.prefix == done[chunk.prompt], "in order, nothing twice"
            done[chunk.prompt] += chunk.num_tokens
            assert chunk.prompt >= line, "first come, first computed"
            line = chunk.prompt
        assert batch.decodes == lanes[turn % limits.num_lanes]
        assert batch.num_tokens <= limits.max_batch_tokens
        assert len(batch.chunks) + len(batch.decodes) <= limits.max_batch_rows
    assert done == [sum(waiting) for waiting in queue], "nothing is left"
    if len(formed) >= limits.num_lanes:
        assert sorted(index for lane in lanes for index in lane) == list(range(len(decodes)))
        assert max(map(len, lanes)) - min(map(len, lanes)) <= 1, "decodes are spread evenly"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.sampled_from([COST, STEEP]))
def test_every_token_is_computed_once_in_order_within_the_limits(seed: int, cost: CostModel) -> None:
    random = np.random.default_rng(seed)
    queue, limits = random_queue(random), random_limits(random)
    decodes = random_decodes(random, limits)
    for form in (form_ahead, by_tokens):
        formed = form(queue, decodes, cost, limits)
        check(queue, decodes, limits, formed)
        assert formed == form(queue, decodes, cost, limits), "the same again"
        for batch in formed:
            loads = [decodes[i] for i in batch.decodes]
            assert batch.cost_s == microbatch_s(cost, batch.chunks, loads)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.sampled_from([COST, STEEP]))
def test_neighbours_are_equal_but_for_a_token(seed: int, cost: CostModel) -> None:
    """Each ends within a token of where it should, and so begins there."""
    random = np.random.default_rng(seed)
    queue, num_lanes = random_queue(random), int(random.integers(1, 5))
    limits, work = Limits(256, 1000, num_lanes), branch_of(cost, 256)
    formed = form_ahead(queue, [], cost, limits)
    works = [sum(work.chunk_s(*chunk[1:]) for chunk in batch.chunks) for batch in formed]
    longest = max(sum(waiting) for waiting in queue)
    assert max(works) - min(works) <= 2 * work.chunk_s(longest, 1) + 1e-9


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_the_largest_chunk_is_the_largest(seed: int) -> None:
    random = np.random.default_rng(seed)
    work = per_token(float(random.choice([1.0, 1e-4])), pair_s=float(random.choice([0.0, 1e-3, 1.0])))
    prefix, limit_s = int(random.integers(0, 5000)), float(random.random() * random.choice([0.1, 10, 1e4]))
    chunk = work.largest(prefix, limit_s)
    assert not chunk or work.chunk_s(prefix, chunk) <= limit_s
    assert work.chunk_s(prefix, chunk + 1) > limit_s
    assert work.largest(prefix, work.chunk_s(prefix, 17)) in (16, 17), "rounding aside"
    assert work.largest(prefix, -1.0) == 0


def test_the_papers_form_is_that_of_the_cost_model() -> None:
    """Equation (1) for one chunk; two chunks share one γ, and decodes add their token and their KV.

    α, β and γ as fitted for Qwen2.5-14B on an A800.
    """
    alpha_s, beta_s, gamma_s = 5.33e-9, 9.76e-5, 1.53e-2

    def paper_s(prefix: int, chunk: int) -> float:
        return alpha_s * (prefix * chunk + (chunk**2 + chunk) / 2) + beta_s * chunk + gamma_s

    cost = CostModel(gamma_s, beta_s, 0, 0, COST.d_s, alpha_s)
    one, other = Chunk(0, 300, 700), Chunk(1, 0, 500)
    assert microbatch_s(cost, [one], []) == pytest.approx(paper_s(300, 700))
    both = paper_s(300, 700) + paper_s(0, 500) - gamma_s
    assert microbatch_s(cost, [one, other], []) == pytest.approx(both)
    assert microbatch_s(cost, [one, other], [100, 50]) == pytest.approx(both + 2 * beta_s + 150 * COST.d_s)
    assert microbatch_s(cost, [], []) == 0
    work = branch_of(cost, 2048)
    assert work.chunk_s(300, 700) == pytest.approx(paper_s(300, 700) - gamma_s)
    cut = work.chunk_s(300, 123) + work.chunk_s(423, 577)
    assert cut == pytest.approx(work.chunk_s(300, 700)), "cutting adds no work"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_decodes_are_spread_by_number_and_by_what_they_read(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_lanes = int(random.integers(1, 5))
    decodes = random.integers(1, 1000, size=50).tolist()
    kv = [sum(decodes[i] for i in lane) for lane in spread(decodes, num_lanes)]
    assert max(kv) - min(kv) <= max(decodes)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_shares_stay_about_as_large_while_prompts_come_and_go(seed: int) -> None:
    """A line under random arrivals: never more than fits, never nothing, and no two neighbours differ by more than the
    leeway, unless one is the last of a line, or the line is so short or long that the leeway would be left."""
    random = np.random.default_rng(seed)
    num_lanes, room = int(random.integers(2, 5)), Room(1000.0, 1000, 64)
    shares, left, before_s = Shares(num_lanes), 0.0, 0.0
    for _ in range(100):
        if random.random() < 0.5:
            left += float(random.exponential(800))
        line = Line(left, int(left), int(left > 0))
        share_s = shares.next_s(line, room, is_alone=False)
        assert share_s <= room.work_s * 1.1, "what little has come is taken along, as far as the step's limits let it"
        assert (share_s > 0) == (left > 0)
        least, most = left / (num_lanes * STEPS_PER_LANE), max(left, MIN_TOKENS)
        if before_s and least < 900 and 1.5 * least < before_s < most / 1.5 and left > 3 * MIN_TOKENS:
            assert 1 / 2.3 < share_s / before_s < 2.3
        before_s, left = share_s, max(left - share_s, 0.0)
        if left < 1e-6:
            left = before_s = 0.0


def test_a_long_line_is_cut_into_full_steps_a_short_one_into_some_for_each_lane() -> None:
    room = Room(1000.0, 1000, 64)

    def share_s(tokens: int, *, is_alone: bool = False) -> float:
        return Shares(2).next_s(Line(float(tokens), tokens, 1), room, is_alone=is_alone)

    assert share_s(9980) == pytest.approx(998)
    assert share_s(900) == pytest.approx(150), "three for each lane"
    assert share_s(3000) == pytest.approx(500)
    assert share_s(200) == pytest.approx(200 / 3), "at least 64 tokens each"
    assert share_s(900, is_alone=True) == pytest.approx(450), "one for each lane"
    assert share_s(400, is_alone=True) == pytest.approx(400), "at least 256 tokens each"
    assert Shares(2).next_s(Line(640.0, 640, 640), room, is_alone=False) == pytest.approx(64), "64 rows fit a step"


@pytest.mark.parametrize("lengths", ["burstgpt", "sharegpt", "longbench"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_formed_ahead_a_burst_is_done_earlier_than_by_token_count(lengths: str, num_stages: int) -> None:
    """Never by more than 2 % later, and within 3 % of the bound of equal costs."""
    random = np.random.default_rng(7)
    ratios, gaps = [], []
    for _ in range(12):
        sizes, _ = find_lengths(lengths).sample(int(random.integers(20, 80)), random)
        queue, decodes = [Waiting(0, int(n)) for n in sizes], random.integers(50, 3000, size=64).tolist()
        limits = Limits(2048, 256, num_stages)
        ahead, tokens = (form(queue, decodes, COST, limits) for form in (form_ahead, by_tokens))
        times = [
            makespan_s(over_stages(np.array([b.cost_s for b in formed]), num_stages), num_stages)
            for formed in (ahead, tokens)
        ]
        ratios.append(times[0] / times[1])
        costs = np.array([batch.cost_s for batch in ahead])
        if len(ahead) >= 3 * num_stages:
            gaps.append(times[0] * num_stages / (costs.sum() + (num_stages - 1) * costs.mean()) - 1)
    assert max(ratios) < 1.02
    assert np.mean(ratios) < 1
    assert max(gaps) < 0.03


def test_halving_is_the_same_for_powers_of_two_and_twofold_uneven_else() -> None:
    """8 prompts of 512: 1024 tokens each in 4 microbatches by both ways."""
    queue = [Waiting(0, 512)] * 8
    ahead = form_ahead(queue, [], COST, Limits(1200, 64))
    halved = by_halving(queue, COST, 1000)
    assert [batch.chunks for batch in ahead] == [batch.chunks for batch in halved]
    queue = [Waiting(0, 1000), *[Waiting(0, 100)] * 10, Waiting(20_000, 1000)]
    halved = by_halving(queue, COST, 500)
    costs = [batch.cost_s for batch in halved]
    check(queue, [], Limits(10_000, 64), halved)
    assert max(costs) > 1.5 * min(costs)
    assert all(batch.num_tokens >= 500 for batch in halved)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_halving_cuts_where_costs_differ_least(seed: int) -> None:
    random = np.random.default_rng(seed)
    queue = random_queue(random, most=8)
    total = sum(waiting.num_tokens for waiting in queue)
    halved = by_halving(queue, STEEP, max(total // 3, 1))
    check(queue, [], Limits(total, 64), halved)
    if len(halved) == 2 and total > 3:
        best = abs(halved[0].cost_s - halved[1].cost_s)
        token_s = branch_of(STEEP, total).chunk_s(max(sum(waiting) for waiting in queue), 1)
        assert best <= token_s * (1 + 1e-6), "no token could be on the other side"


def optimum_s(queue: tuple[int, ...], most: int, cost: CostModel) -> float:
    """The least time of two stages in step, over every way to cut prompts into turns."""

    @cache
    def rest_s(left: tuple[int, ...], before_s: float) -> float:
        if not any(left):
            return before_s
        best = np.inf
        for taken in product(*(range(n + 1) for n in left)):
            if sum(taken) > most or not any(taken):
                continue
            chunks = [Chunk(i, queue[i] - left[i], n) for i, n in enumerate(taken) if n]
            cost_s = microbatch_s(cost, chunks, [])
            after = tuple(n - m for n, m in zip(left, taken, strict=True))
            best = min(best, max(before_s, cost_s) + rest_s(after, cost_s))
        return best

    return rest_s(queue, 0.0)


def test_tiny_queues_beside_the_optimum() -> None:
    """Whole tokens weigh much here, and the optimum may use more microbatches, and any order."""
    random = np.random.default_rng(5)
    gaps = []
    for _ in range(25):
        queue = tuple(random.integers(1, 5, size=3).tolist())
        cost = CostModel(0.3, 1.0, 0, 0, 0, float(random.choice([0.0, 0.3])))
        formed = form_ahead([Waiting(0, n) for n in queue], [], cost, Limits(4, 3, 2))
        found = makespan_s(over_stages(np.array([batch.cost_s for batch in formed]), 2) * 2, 2)
        best = optimum_s(queue, 4, cost)
        assert found >= best - 1e-9
        gaps.append(found / best - 1)
    assert np.mean(gaps) < 0.05
    assert max(gaps) < 0.15


def test_what_cannot_be_formed_is_refused() -> None:
    for waiting in (Waiting(-1, 5), Waiting(0, 0)):
        with pytest.raises(ValueError, match="cannot be queued"):
            form_ahead([waiting], [], COST, Limits(8, 8))
    with pytest.raises(ValueError, match="leave no place"):
        form_ahead([Waiting(0, 5)], [10] * 8, COST, Limits(64, 4, 2))
    with pytest.raises(ValueError, match="at least 1 token"):
        by_halving([Waiting(0, 5)], COST, 0)
    assert form_ahead([], [5], COST, Limits(8, 8, 2)) == by_halving([], COST, 1) == []


def test_pieces_come_nearer_to_what_is_wanted_step_by_step() -> None:
    """Pieces of 150; 9 000 tokens want ten full steps, which is sixty such pieces, and get 60 / 1.5 = 40. Then 700 are
    three such pieces, and want six: 3 * 1.5 = 4 of 175."""
    room, shares = Room(1000.0, 1000, 64), Shares(2)
    assert shares.next_s(Line(900.0, 900, 1), room, is_alone=False) == pytest.approx(150)
    assert shares.next_s(Line(9000.0, 9000, 1), room, is_alone=False) == pytest.approx(225)
    assert shares.next_s(Line(700.0, 700, 1), room, is_alone=False) == pytest.approx(175)
