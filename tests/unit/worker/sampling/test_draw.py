"""What the filters keep, against transformers, numpy and each other; how often each token is drawn, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from services.worker.contract.arrays import F64
from services.worker.sampling import draw as draw_module
from services.worker.sampling.draw import (
    BLOCK,
    RowSampling,
    draw,
    draw_at,
    filter_weights,
    finite_largest,
    first_largest,
    to_weights,
)
from services.worker.sampling.sampler import TokenSampler
from tests.support.row_samplings import row_sampling

REPEATABLE = settings(derandomize=True, deadline=None)
COMBINATIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.4, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 12, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.15},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.999, "min_p": 0.3},
    {"top_k": 1},
    {"min_p": 1.0},
    {"top_p": 1e-6},
]


def random_logits(vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def reference_shares(logits: torch.Tensor, **values: float) -> F64:
    """The distribution by transformers' own processors, in the order in which its `generate` applies them."""
    chain: list[Any] = [TemperatureLogitsWarper(float(values.get("temperature", 1.0)))]
    if "top_k" in values:
        chain.append(TopKLogitsWarper(int(values["top_k"])))
    if "top_p" in values:
        chain.append(TopPLogitsWarper(float(values["top_p"])))
    if "min_p" in values:
        chain.append(MinPLogitsWarper(float(values["min_p"])))
    scores = logits.double().unsqueeze(0)
    for warper in chain:
        scores = warper(torch.zeros((1, 1), dtype=torch.long), scores)
    shares: F64 = scores.softmax(-1)[0].numpy()
    return shares


def numpy_shares(logits: torch.Tensor, **values: float) -> F64:
    """The same by the definition: one token after the other, the likeliest first."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    heated = logits.double().numpy() / values["temperature"]
    shares = np.exp(heated - heated.max())
    order = np.argsort(-shares, kind="stable")
    if values["top_k"]:
        shares[order[int(values["top_k"]) :]] = 0
    shares /= shares.sum()
    reached, kept = 0.0, []
    for token in order:
        if reached < values["top_p"] and shares[token] > 0:
            kept.append(token)
        reached += shares[token]
    filtered = np.zeros_like(shares)
    filtered[kept] = shares[kept]
    filtered[filtered < values["min_p"] * filtered.max()] = 0
    result: F64 = filtered / filtered.sum()
    return result


def stratified(logits: torch.Tensor, num_points: int, **values: float) -> NDArray[np.int64]:
    """How often each token is drawn when the points are spread evenly: its share of them, give or take one."""
    points = (np.arange(num_points) + 0.5) / num_points
    tokens = draw(logits.expand(num_points, -1), row_sampling(num_points, **values), points)
    return np.bincount(tokens, minlength=len(logits))


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [41, 5000])
def test_every_token_is_drawn_as_often_as_transformers_and_numpy_say(values: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(vocab_size, seed=vocab_size)
    shares = reference_shares(logits, **values)
    assert np.allclose(shares, numpy_shares(logits, **values), atol=1e-12)
    counts = stratified(logits, 1500, **values)
    assert np.abs(counts - shares * 1500).max() <= 1 + 1e-3
    assert not counts[shares == 0].any()


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
def test_seeded_draws_follow_the_reference_distribution(values: dict[str, float]) -> None:
    """Chi-square over the tokens expected five times or more: its mean is the freedom d, its variance 2d."""
    logits, num_draws = random_logits(41, seed=5), 4000
    tokens = TokenSampler().sample(
        logits.expand(num_draws, -1), row_sampling(num_draws, **values), np.full(num_draws, 17, dtype=np.int64)
    )
    expected = numpy_shares(logits, **values) * num_draws
    counts = np.bincount(tokens, minlength=41)
    assert not counts[expected == 0].any()
    often = expected >= 5
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = max(int(often.sum()) - 1, 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


ROW = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 3, 7, 8, 9, 31, 40, 1000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.8, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


@pytest.mark.slow
@REPEATABLE
@given(st.lists(ROW, min_size=1, max_size=6), st.integers(0, 2**30), st.sampled_from([0.0, 1.0, 6.0]), st.booleans())
def test_looking_at_the_largest_weights_first_changes_nothing(
    rows: list[dict[str, float]], seed: int, scale: float, rounded: bool
) -> None:
    """Rounded logits tie often; scale 0 ties them all."""
    logits = torch.stack([random_logits(40, seed + i, scale) for i in range(len(rows))])
    logits = logits.round() if rounded else logits
    logits[:, seed % 40] = -torch.inf
    weights = to_weights(logits, np.ones(len(rows)))
    columns = {name: np.array([row[name] for row in rows]) for name in ("top_p", "top_k", "min_p")}
    sampling = RowSampling(temperature=np.ones(len(rows)), seed=np.zeros(len(rows), np.int64), **columns)
    expected = filter_weights_by_definition(weights, sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "CANDIDATES", 8)
        patch.setattr(draw_module, "_SMALL_VOCABULARY", 100 * (seed % 2))
        assert torch.equal(filter_weights(weights.clone(), sampling)[0], expected)
    assert torch.equal(filter_weights(weights.clone(), sampling)[0], expected)


def filter_weights_by_definition(weights: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """A token stays if fewer than k surpass it, what surpasses it is less than p, and it is not too small itself."""
    kept = weights.clone()
    for row, top_k, top_p, min_p in zip(kept, sampling.top_k, sampling.top_p, sampling.min_p, strict=True):
        if top_k:
            row[torch.tensor([int((row > value).sum()) >= top_k for value in row])] = 0
        if top_p < 1:
            exact = row.double()
            row[torch.tensor([float(exact[exact > value].sum()) >= top_p * float(exact.sum()) for value in exact])] = 0
        row[row < np.float32(min_p)] = 0
    return kept


@pytest.mark.parametrize("count", [1, 7, 90])
def test_host_and_device_find_the_same_largest_weights(count: int) -> None:
    weights = torch.stack([random_logits(90, i).exp().round() for i in range(5)])
    expected = weights.sort(dim=-1, descending=True).values[:, :count]
    assert torch.equal(draw_module._largest_on_host(weights, count), expected)
    assert torch.equal(draw_module._largest_on_device(weights, count), expected)


def test_a_flat_row_needs_the_whole_vocabulary_and_takes_nothing_from_its_neighbour() -> None:
    flat, peaked = torch.zeros(3000), random_logits(3000, 1, 8.0)
    logits, values = torch.stack([flat, peaked]), {"top_p": 0.9}
    points = np.array([0.7, 0.7])
    tokens = draw(logits, row_sampling(2, **values), points)
    assert tokens.tolist() == [draw(logits[[i]], row_sampling(1, **values), points[[i]])[0] for i in range(2)]
    assert tokens[0] == 2100  # all weights tie, so all stay


@pytest.mark.parametrize("vocab_size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK - 7, 5000])
def test_the_whole_row_is_searched_as_one_cdf(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are an inner matter: the token is the first whose running sum passes the point."""
    monkeypatch.setattr(draw_module, "_SMALL_VOCABULARY", 1 + vocab_size % 2 * 300)
    weights = random_logits(vocab_size, 3).exp()
    weights[::3] = 0
    weights[-1] = 1
    cdf = weights.double().cumsum(0)
    points = np.concatenate([np.random.default_rng(0).random(500), [0.0, 1 - 2**-53]])
    expected = torch.searchsorted(cdf, torch.from_numpy(points) * cdf[-1], right=True).numpy()
    drawn = draw_at(weights.expand(len(points), -1), points).numpy()
    assert (weights[torch.from_numpy(drawn)] > 0).all()
    differ = drawn != expected
    assert np.count_nonzero(differ) <= 1, "a point within rounding of a border may fall on either side"


@pytest.mark.parametrize("vocab_size", [40, 4096, 5000, 8191])
def test_the_first_of_the_largest_is_found_wherever_it_is(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "_FEW_LOGITS", 0)
    logits = random_logits(vocab_size, 1).clamp_max(3.0).repeat(40, 1)
    logits[-1] = -torch.inf
    places = [0, vocab_size // 2, vocab_size - 1, *range(7, vocab_size, vocab_size // 30)]
    for row, place in enumerate(places[:39]):
        logits[row, place] = 9.0
        logits[row, min(place + 300 * (row % 2), vocab_size - 1)] = 9.0
    assert first_largest(logits).tolist() == [int((row == row.amax()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("vocab_size", [40, 4096, 5000])
def test_a_row_without_a_finite_largest_logit_is_told(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Excluded tokens, minus infinity, are no fault as long as one is left."""
    monkeypatch.setattr(draw_module, "_FEW_LOGITS", 0)
    logits = random_logits(vocab_size, 1).repeat(6, 1)
    expected = [int(logits[0].argmax()), *[vocab_size] * 4, 7]
    logits[1, 0] = logits[2, vocab_size - 1] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 7] = -3.0
    assert finite_largest(logits).tolist() == expected
