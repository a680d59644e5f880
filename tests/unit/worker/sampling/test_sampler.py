"""The sampler: exact where it is exact, and by chi-square where it draws; all seeds are fixed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.worker.contract.arrays import I64
from services.worker.sampling.draw import RowSampling, filter_weights
from services.worker.sampling.random import uniforms
from services.worker.sampling.sampler import Sampler, SamplingTable
from shared.types import SamplingParams

DRAWS = 20_000
PINNED = [0.28176129772258496, 0.6524484863740322, 0.8628561488610587, 0.5118143779284616, 0.8897992113579962]


def sampling(
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = 1,
) -> RowSampling:
    seeds = np.arange(count, dtype=np.int64) if seed is None else np.full(count, seed, dtype=np.int64)
    whole = np.full(count, top_k, dtype=np.int64)
    return RowSampling(np.full(count, temperature), np.full(count, top_p), whole, np.full(count, min_p), seeds)


def positions(count: int) -> I64:
    return np.arange(count, dtype=np.int64)


def chi_square(counts: np.ndarray[tuple[int], np.dtype[np.int64]], expected: torch.Tensor) -> float:
    """Statistic over its degrees of freedom; near 1 if the counts follow the expected shares."""
    shares = expected.double().numpy()
    assert not counts[shares == 0].any(), "drew a token that was filtered away"
    kept = shares > 0
    wanted = shares[kept] / shares.sum() * counts.sum()
    return float(((counts[kept] - wanted) ** 2 / wanted).sum() / max(kept.sum() - 1, 1))


def draw_counts(logits: torch.Tensor, **params: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = logits.expand(DRAWS, -1)
    tokens = Sampler().sample(rows, sampling(DRAWS, **params), positions(DRAWS))  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=logits.shape[-1])


LOGITS = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.3, -3.0, 1.7, 0.0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_softmax_at_that_temperature(temperature: float) -> None:
    """7 degrees of freedom: a statistic over 3.5 times them has a chance below 0.1 %."""
    assert chi_square(draw_counts(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1)) < 3.5


def test_top_k_draws_from_the_k_best_in_their_proportions() -> None:
    expected = LOGITS.softmax(-1).clone()
    expected[[2, 5, 7]] = 0  # five best: 3, 6, 0 and the tie 1, 4
    assert chi_square(draw_counts(LOGITS, top_k=5), expected) < 4
    assert chi_square(draw_counts(LOGITS, top_k=4), expected) < 4  # a tie with the last one kept is kept


def test_top_p_draws_from_the_smallest_set_that_reaches_p() -> None:
    """softmax = .136 .068 .030 .371 .068 .002 .275 .050: 3, 6 reach 0.645, and 3, 6, 0 reach 0.781."""
    shares = LOGITS.softmax(-1)
    for top_p, kept in ((0.37, [3]), (0.64, [3, 6]), (0.65, [3, 6, 0]), (0.78, [3, 6, 0])):
        expected = torch.zeros_like(shares)
        expected[kept] = shares[kept]
        assert chi_square(draw_counts(LOGITS, top_p=top_p), expected) < 6


def test_top_p_counts_within_what_top_k_and_temperature_left() -> None:
    """At temperature 2 the two best are 3 and 6 with shares 0.54 and 0.46 of the pair, so p = 0.5 keeps one of them."""
    counts = draw_counts(LOGITS, temperature=2.0, top_k=2, top_p=0.5)
    assert counts[3] == DRAWS
    counts = draw_counts(LOGITS, temperature=2.0, top_k=2, top_p=0.55)
    assert chi_square(counts, torch.tensor([0, 0, 0, math.exp(1.0), 0, 0, math.exp(0.85), 0])) < 8


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-5.0, -6.0, -4.0]])
    assert Sampler().sample(logits, sampling(3, temperature=0.0), positions(3)).tolist() == [1, 0, 2]


def test_greedy_and_drawn_rows_mix_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    mixed = RowSampling(
        np.array([0.0, 1.0, 0.0, 1.0, 0.7, 1.0]),
        np.array([1.0, 1.0, 0.5, 0.8, 1.0, 1.0]),
        np.array([0, 0, 3, 0, 5, 0]),
        np.array([0, 0, 0, 0.2, 0, 0.1]),
        np.arange(6, dtype=np.int64),
    )
    tokens = Sampler().sample(logits, mixed, positions(6) + 40)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    for row in range(6):
        one = mixed.select(np.array([row]))
        for row_by_row in (False, True):
            alone = Sampler(row_by_row=row_by_row).sample(logits[[row]], one, np.array([40 + row]))
            assert alone[0] == tokens[row], "a draw depends on its seed and position, not on its neighbours"


def test_many_rows_of_a_large_vocabulary_are_drawn_in_parts_without_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    params = RowSampling(
        np.full(7, 1.0), np.full(7, 0.9), np.array([0, 5] * 3 + [0]), np.zeros(7), np.arange(7, dtype=np.int64)
    )
    whole = Sampler().sample(logits, params, positions(7))
    monkeypatch.setattr("services.worker.sampling.sampler.DRAW_ELEMENTS", 90)
    assert Sampler().sample(logits, params, positions(7)).tolist() == whole.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_rows_whose_filters_reach_far_are_drawn_once_more(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes beside the host nobody asks meanwhile whether the largest weights were enough."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, rng.uniform(0.1, 4, (12, 1)), (12, 300))).float()
    logits[:, ::7] = logits[:, :1]  # ties
    params = RowSampling(
        rng.choice([0.0, 0.7, 1.0], 12),
        rng.choice([1.0, 0.3, 0.95], 12),
        rng.choice([0, 3, 400], 12),
        rng.choice([0.0, 0.1], 12),
        np.arange(12, dtype=np.int64),
    )
    logits[0] *= 0.01  # nearly alike: so many of them reach a share
    params.temperature[0], params.top_p[0], params.top_k[0] = 1.0, 0.95, 0
    monkeypatch.setattr("services.worker.sampling.draw.CANDIDATES", 16)
    expected = Sampler().sample(logits, params, positions(12))
    monkeypatch.setattr("services.worker.memory.host_link.BESIDE", ("cpu",))
    asked = Sampler().begin(logits, params, positions(12)).columns
    assert any(bool(column.any()) for column in asked if column.dtype == torch.bool)
    assert Sampler().sample(logits, params, positions(12)).tolist() == expected.tolist()


def test_a_vanishing_temperature_is_greedy_and_extreme_logits_are_no_nan() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [5.0, 5.0 - 1e-3, -torch.inf]])
    assert Sampler().sample(logits, sampling(2, temperature=1e-300), positions(2)).tolist() == [0, 0]
    assert Sampler().sample(logits, sampling(2, temperature=2.0), positions(2)).tolist()[0] == 0


@pytest.mark.parametrize(("point", "expected"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_distribution_never_draw_a_token_without_weight(
    monkeypatch: pytest.MonkeyPatch, point: float, expected: int
) -> None:
    """Tokens 1 and 3 have one half each, their neighbours nothing."""
    monkeypatch.setattr(
        "services.worker.sampling.sampler.uniforms", lambda seeds, _positions: np.full(len(seeds), point)
    )
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]])
    assert Sampler().sample(logits, sampling(1), positions(1)).tolist() == [expected]


WEIGHTS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.floats(0.125, 1, width=16)
)


@given(WEIGHTS, st.integers(0, 14))
def test_top_k_keeps_exactly_those_that_fewer_than_k_surpass(
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]], k: int
) -> None:
    top_k = np.array([(k + row) % 15 for row in range(len(weights))])
    top_k[0] = max(k, 1)
    kept = filter_weights(torch.tensor(weights), replace(sampling(len(weights)), top_k=top_k))[0].numpy()
    for row, of_row in enumerate(top_k):
        for index, weight in enumerate(weights[row]):
            stays = of_row == 0 or (weights[row] > weight).sum() < of_row
            assert kept[row, index] == (weight if stays else 0)


@given(WEIGHTS, st.floats(0.01, 1.0))
def test_top_p_keeps_exactly_those_whose_betters_do_not_reach_p(
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]], p: float
) -> None:
    kept = filter_weights(torch.tensor(weights), sampling(len(weights), top_p=p))[0].numpy()
    for row in range(len(weights)):
        for index, weight in enumerate(weights[row].astype(np.float64)):
            betters = weights[row][weights[row] > weight].astype(np.float64).sum()
            stays = betters < p * weights[row].astype(np.float64).sum()
            assert kept[row, index] == (weight if stays else 0)


def test_parameters_are_kept_by_row() -> None:
    table = SamplingTable(4)
    table.put(2, SamplingParams(max_tokens=1, temperature=0.5, top_p=0.25, top_k=7, seed=-(2**63)))
    taken = table.take(np.array([1, 2], dtype=np.int32))
    assert (taken.temperature[1], taken.top_p[1], taken.top_k[1], taken.seed[1]) == (0.5, 0.25, 7, -(2**63))
    assert taken.temperature[0] == 0


def test_the_generator_is_what_it_was() -> None:
    """Pinned: another worker, of another version, must go on with the same draws."""
    seeds = np.array([0, 0, 1, -1, 2**62], dtype=np.int64)
    drawn = uniforms(seeds, np.array([0, 1, 0, 5, 1000]))
    assert drawn.tolist() == PINNED


def test_draws_are_uniform_over_positions_and_over_seeds() -> None:
    """100 bins, 20 000 draws: 99 degrees of freedom, the statistic over them has a deviation of 0.14."""
    for seeds, places in (
        (np.full(DRAWS, 7), np.arange(DRAWS)),
        (np.arange(DRAWS), np.full(DRAWS, 7)),
        (np.arange(DRAWS) * 2**32, np.arange(DRAWS)),
    ):
        drawn = uniforms(seeds.astype(np.int64), places.astype(np.int64))
        assert ((drawn >= 0) & (drawn < 1)).all()
        counts = np.bincount((drawn * 100).astype(np.int64), minlength=100)
        assert 0.6 < chi_square(counts, torch.ones(100)) < 1.45
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
        assert len(np.unique(drawn)) == DRAWS
