"""The sampler: what a row is given depends on nothing but the row. How often it draws what: test_draw.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.contract.arrays import I64
from services.worker.sampling.draw import RowSampling
from services.worker.sampling.random import uniforms
from services.worker.sampling.sampler import SamplingTable, TokenSampler
from shared.types import SamplingParams
from tests.support.row_samplings import row_sampling

DRAWS = 20_000
PINNED = [0.28176129772258496, 0.6524484863740322, 0.8628561488610587, 0.5118143779284616, 0.8897992113579962]


def positions(count: int) -> I64:
    return np.arange(count, dtype=np.int64)


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-5.0, -6.0, -4.0]])
    assert TokenSampler().sample(logits, row_sampling(3, temperature=0.0), positions(3)).tolist() == [1, 0, 2]


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
    tokens = TokenSampler().sample(logits, mixed, positions(6) + 40)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    for row in range(6):
        one = mixed.select(np.array([row]))
        for row_by_row in (False, True):
            alone = TokenSampler(row_by_row=row_by_row).sample(logits[[row]], one, np.array([40 + row]))
            assert alone[0] == tokens[row], "a draw depends on its seed and position, not on its neighbours"


def test_many_rows_of_a_large_vocabulary_are_drawn_in_parts_without_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    params = RowSampling(
        np.full(7, 1.0), np.full(7, 0.9), np.array([0, 5] * 3 + [0]), np.zeros(7), np.arange(7, dtype=np.int64)
    )
    whole = TokenSampler().sample(logits, params, positions(7))
    monkeypatch.setattr("services.worker.sampling.sampler.DRAW_ELEMENTS", 90)
    assert TokenSampler().sample(logits, params, positions(7)).tolist() == whole.tolist()


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
    expected = TokenSampler().sample(logits, params, positions(12))
    monkeypatch.setattr("services.worker.memory.host_link.BESIDE", ("cpu",))
    asked = TokenSampler().begin(logits, params, positions(12)).columns
    assert any(bool(column.any()) for column in asked if column.dtype == torch.bool)
    assert TokenSampler().sample(logits, params, positions(12)).tolist() == expected.tolist()


def test_a_vanishing_temperature_is_greedy_and_extreme_logits_are_no_nan() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [5.0, 5.0 - 1e-3, -torch.inf]])
    assert TokenSampler().sample(logits, row_sampling(2, temperature=1e-300), positions(2)).tolist() == [0, 0]
    assert TokenSampler().sample(logits, row_sampling(2, temperature=2.0), positions(2)).tolist()[0] == 0


@pytest.mark.parametrize(("point", "expected"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_distribution_never_draw_a_token_without_weight(
    monkeypatch: pytest.MonkeyPatch, point: float, expected: int
) -> None:
    """Tokens 1 and 3 have one half each, their neighbours nothing."""
    monkeypatch.setattr(
        "services.worker.sampling.sampler.uniforms", lambda seeds, _positions: np.full(len(seeds), point)
    )
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]])
    assert TokenSampler().sample(logits, row_sampling(1), positions(1)).tolist() == [expected]


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
        excess = np.bincount((drawn * 100).astype(np.int64), minlength=100) - DRAWS / 100
        assert 0.6 < (excess**2).sum() / (DRAWS / 100) / 99 < 1.45
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
        assert len(np.unique(drawn)) == DRAWS
