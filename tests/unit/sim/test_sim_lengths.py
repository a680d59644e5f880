from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import StartupError
from sim.workload.clipped_log_normal import fit_log_normal, moment
from sim.workload.lengths import LogNormal, Quantiles, find_lengths, fit_context, named_lengths
from sim.workload.readers import AGE_GROUPS, andes_readers

NUM_SAMPLES = 200_000
# KunServe, version 1, table 2; the conversations of BurstGPT: mean, then percentiles
PERCENTILES = {
    "burstgpt": ((603, {50: 400, 80: 1146, 95: 1804, 99: 2009}), (289, {50: 249, 80: 462, 95: 715, 99: 1161})),
    "azureconv": ((1013, {50: 998, 80: 1159, 95: 4080, 99: 4096}), (247, {50: 202, 80: 411, 95: 451, 99: 585})),
    "agieval-cot": ((237, {50: 128, 80: 556, 95: 619, 99: 651}), (390, {50: 363, 80: 450, 95: 578, 99: 698})),
    "burstgpt-conversation": (
        (584, {25: 97, 50: 422, 80: 1113, 95: 1695, 99: 1893}),
        (259, {25: 96, 50: 219, 80: 384, 95: 704, 99: 923}),
    ),
}
# Andes, table 2; BROS, table 2; KunServe, version 2, section 5.1 (no deviation): mean and standard deviation
MOMENTS = {
    "sharegpt-multi-round": ((3171, 7943), (385, 300)),
    "arxiv": ((17855, 11401), (605, 153)),
    "coding": ((675, 1552), (5423, 21293)),
    "sharegpt-bros": ((222.76, 256.36), (234.51, 268.50)),
    "lmsys": ((90.50, 148.52), (237.04, 228.21)),
    "be-synthetic": ((784.14, 151.17), (80.96, 28.23)),
    "sharegpt": ((1660, None), (373, None)),
    "longbench": ((5900, None), (499, None)),
}


def _sample(name: str) -> tuple[np.ndarray, np.ndarray]:
    return find_lengths(name).sample(NUM_SAMPLES, np.random.default_rng(11))


def test_every_name_is_checked_against_a_table() -> None:
    assert set(named_lengths()) == set(PERCENTILES) | set(MOMENTS)


@pytest.mark.parametrize("name", sorted(PERCENTILES))
def test_samples_have_the_percentiles_and_the_mean_of_the_table(name: str) -> None:
    """Of 200 000 samples as many lie below a percentile as should, within 0.3 % of all (2.7 deviations at P50)."""
    for sample, (mean, percentiles) in zip(_sample(name), PERCENTILES[name], strict=True):
        assert sample.mean() == pytest.approx(mean, rel=0.01)
        for percent, tokens in percentiles.items():
            assert np.mean(sample < tokens) - 0.003 <= percent / 100 <= np.mean(sample <= tokens) + 0.003


@pytest.mark.parametrize("name", sorted(MOMENTS))
def test_samples_have_the_moments_of_the_table(name: str) -> None:
    """3 %; 6 % for the deviation. BROS's table has a finite sample of the uniform distribution that its text states."""
    for sample, (mean, std) in zip(_sample(name), MOMENTS[name], strict=True):
        assert sample.mean() == pytest.approx(mean, rel=0.03)
        if std is not None:
            assert sample.std() == pytest.approx(std, rel=0.06)


@pytest.mark.parametrize("name", sorted(named_lengths()))
def test_lengths_are_whole_and_stay_in_their_range(name: str) -> None:
    for sample, family in zip(_sample(name), (find_lengths(name).input, find_lengths(name).output), strict=True):
        assert sample.dtype == np.int32
        assert sample.min() >= 1
        largest = {"quantiles": "percentiles", "log-normal": "max", "uniform": "high"}[family.kind]
        limit = getattr(family, largest)
        assert sample.max() <= (max(limit.values()) if isinstance(limit, dict) else limit)


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.asarray(np.corrcoef(first, second))[0, 1])


def test_long_prompts_of_conversations_tend_to_get_long_answers() -> None:
    prompt, output = _sample("burstgpt-conversation")
    ranks = [np.argsort(np.argsort(column)) for column in (prompt, output)]
    assert _correlation(*ranks) == pytest.approx(0.24, abs=0.02)
    prompt, output = _sample("burstgpt")
    assert abs(_correlation(prompt, output)) < 0.02


def test_the_generator_decides() -> None:
    lengths = find_lengths("lmsys")
    first, again, other = (lengths.sample(50, np.random.default_rng(seed))[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_fixed_lengths_are_written_as_a_product() -> None:
    prompt, output = find_lengths("512x128").sample(100, np.random.default_rng(1))
    assert set(prompt.tolist()) == {512}
    assert set(output.tolist()) == {128}


def test_an_unknown_name_is_told_the_near_one_and_all() -> None:
    with pytest.raises(StartupError, match=r"no lengths 'sharegtp'\. Did you mean sharegpt\? There are burstgpt, "):
        find_lengths("sharegtp")


@st.composite
def quantile_functions(draw: st.DrawFn) -> Quantiles:
    percents = sorted(draw(st.sets(st.integers(1, 99), max_size=5)))
    values = sorted(draw(st.lists(st.integers(1, 5000), min_size=len(percents) + 2, max_size=len(percents) + 2)))
    points, weights = np.array([0, *percents, 100]) / 100, np.diff([0, *percents, 100]) / 100
    low, high = float(weights @ values[:-1]), float(weights @ values[1:])
    assume(high - low > 1 and low > 1)
    mean = low + draw(st.floats(0.05, 0.95)) * (high - low)
    return Quantiles(
        kind="quantiles", mean=mean, percentiles=dict(zip([f"{100 * p:g}" for p in points], values, strict=True))
    )


@given(quantile_functions())
def test_a_quantile_function_rises_through_its_points_and_has_its_mean(quantiles: Quantiles) -> None:
    """The mean as a sum over scores at the middles of 4 000 equal shares of probability."""
    found = quantiles.tokens(_normal_scores(MIDDLES))
    assert np.all(np.diff(found) >= -1e-9)
    values = list(quantiles.percentiles.values())
    assert found.mean() == pytest.approx(quantiles.mean, rel=2e-3, abs=0.002 * (values[-1] - values[0]))
    for percent, value in list(quantiles.percentiles.items())[1:-1]:
        score = _normal_scores(np.array([float(percent) / 100]))
        assert quantiles.tokens(score)[0] == pytest.approx(value, rel=1e-6, abs=1e-3 * (values[-1] - values[0]))


def _normal_scores(p: np.ndarray) -> np.ndarray:
    return np.array([NormalDist().inv_cdf(x) for x in p.tolist()])


MIDDLES = (np.arange(4000) + 0.5) / 4000


@pytest.mark.parametrize(
    ("mean", "percentiles"),
    [
        (99.0, {"0": 1, "50": 200, "100": 201}),  # the upper half alone makes 100
        (400.0, {"0": 1, "50": 200, "100": 300}),
        (150.0, {"0": 1, "50": 200, "80": 100, "100": 300}),
        (150.0, {"10": 1, "100": 300}),
    ],
)
def test_percentiles_that_contradict_each_other_or_the_mean_are_refused(
    mean: float, percentiles: dict[str, float]
) -> None:
    with pytest.raises(ValidationError):
        Quantiles(kind="quantiles", mean=mean, percentiles=percentiles)


@given(st.floats(0, 8), st.floats(0.05, 2), st.floats(-2, 3), st.sampled_from([1, 2]))
def test_a_moment_of_the_cut_distribution_is_its_integral(mu: float, sigma: float, cut: float, order: int) -> None:
    """Cut `cut` deviations above the median; integrated over the score by the midpoint rule in steps of 1/1000."""
    largest = math.exp(mu + cut * sigma)
    scores = np.arange(-12, 12, 0.001) + 0.0005
    density = np.exp(-scores * scores / 2) / math.sqrt(2 * math.pi) * 0.001
    integral = float(np.sum(np.minimum(np.exp(mu + sigma * scores), largest) ** order * density))
    assert moment(order, mu, sigma, largest) == pytest.approx(integral, rel=1e-4)


@pytest.mark.slow
@given(st.floats(2, 9), st.floats(0.1, 1.5), st.floats(0.5, 4))
def test_the_fit_finds_the_distribution_that_made_the_moments(mu: float, sigma: float, cut: float) -> None:
    largest = math.exp(mu + cut * sigma)
    mean = moment(1, mu, sigma, largest)
    std = math.sqrt(moment(2, mu, sigma, largest) - mean * mean)
    assert fit_log_normal(mean, largest, std=std) == pytest.approx((mu, sigma), rel=1e-3, abs=1e-3)
    assert fit_log_normal(mean, largest, sigma=sigma)[0] == pytest.approx(mu, abs=1e-6)


def test_a_deviation_that_the_cut_forbids_is_refused() -> None:
    """Between 0 and 100 with mean 50 no deviation exceeds 50."""
    with pytest.raises(ValueError, match="no log-normal distribution"):
        fit_log_normal(50, 100, std=60)
    with pytest.raises(ValidationError, match="either std or sigma"):
        LogNormal(kind="log-normal", mean=50, max=100)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(2, 10**5))
def test_what_does_not_fit_the_context_is_cut(prompt: int, output: int, limit: int) -> None:
    columns = fit_context(np.array([prompt], dtype=np.int32), np.array([output], dtype=np.int32), limit)
    cut_prompt, cut_output = (int(column[0]) for column in columns)
    assert cut_prompt + cut_output <= limit
    assert cut_output == min(output, limit // 2)
    assert cut_prompt == min(prompt, limit - cut_output)
    assert min(cut_prompt, cut_output) >= 1


def test_readers_are_the_paper_s() -> None:
    """Mean 4.8 tokens/s; the first token is due after 1 s, or a five-thousandth of the prompt."""
    prompts = np.array([10, 5000, 5001, 20_000] * 50_000, dtype=np.int32)
    ttft_s, speed = andes_readers(prompts, np.random.default_rng(5))
    assert ttft_s[:4].tolist() == pytest.approx([1, 1, 1.0002, 4])
    assert speed.mean() == pytest.approx(4.8, rel=0.002)
    values, counts = np.unique(speed, return_counts=True)
    assert (counts / prompts.size).tolist() == pytest.approx([share for share, _ in reversed(AGE_GROUPS)], abs=0.005)
    assert (values / values[0]).tolist() == pytest.approx([words / 175 for _, words in reversed(AGE_GROUPS)])
