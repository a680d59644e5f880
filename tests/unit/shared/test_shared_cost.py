from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.cost import (
    PROFILES,
    CostModel,
    load_profile,
    prefill_pairs,
    profile_names,
    profile_toml,
)
from shared.errors import ProfileError, StartupError
from tests.support.engine_builders import per_token

A800 = "qwen2.5-14b-tp1-a800"

# model, tp, GPU, g0, b0, g1, b1, d, a in milliseconds, mean error in percent; None where one branch was fitted
TABLE = {
    "llama-2-7b-tp1-a100": (9.81, 0.0329, 4.74, 0.0522, 4.68e-4, 2.92e-6, 1.9),
    "llama-3-8b-tp1-a100": (10.89, 0.0344, 5.19, 0.0553, 8.39e-5, 2.86e-6, 2.6),
    "llama-2-13b-tp1-a100": (18.87, 0.0405, 13.23, 0.0919, 7.15e-4, 4.58e-6, 2.1),
    "opt-13b-tp2-a100": (10.70, 0.0554, 5.49, 0.0577, 3.37e-4, 2.73e-6, 3.9),
    "opt-30b-tp4-a100": (12.58, 0.0652, 6.46, 0.0679, 2.83e-4, 2.29e-6, 3.9),
    A800: (20.60, 0.0510, 14.64, 0.0975, 1.33e-4, 5.44e-6, 2.4),
    "llama-3-70b-tp4-a100": (27.30, 0.1553, 26.62, 0.1658, 4.99e-5, 3.71e-6, 3.0),
    "llama-3-70b-tp8-a100": (17.07, 0.1207, 0.0, 0.0, 2.57e-5, 1.97e-6, 3.9),
    "qwen2.5-72b-tp4-a100": (28.68, 0.1095, 22.12, 0.1769, 5.98e-5, 2.75e-6, 2.7),
    "qwen2.5-14b-tp1-h100": (11.34, 0.0169, 3.59, 0.0377, 6.15e-5, 1.35e-6, 1.5),
    "llama-3-70b-tp4-h100": (15.62, 0.0457, 6.78, 0.0736, 2.65e-5, 8.73e-7, 1.6),
    "llama-3-8b-tp1-h200": (4.94, 0.0121, 0.80, 0.0204, 3.17e-5, 7.68e-7, 2.2),
    "qwen2.5-14b-tp1-h200": (8.88, 0.0184, 1.78, 0.0380, 4.89e-5, 1.49e-6, 2.2),
    "llama-3-70b-tp4-h200": (12.43, 0.0476, 6.12, 0.0717, 1.88e-5, 8.87e-7, 1.8),
}


def test_the_profiles_that_ship_are_those_of_the_table() -> None:
    assert profile_names() == sorted(TABLE)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_profile_holds_the_table_in_seconds_and_its_provenance(name: str) -> None:
    profile = load_profile(name)
    cost = profile.cost
    milliseconds = [1000 * x for x in (cost.g0_s, cost.b0_s, cost.g1_s, cost.b1_s, cost.d_s, cost.a_s)]
    assert milliseconds == pytest.approx(TABLE[name][:6], rel=1e-12)
    assert profile.mean_error_ratio == pytest.approx(TABLE[name][6] / 100)
    assert cost.era_s == 0.0
    assert "Apache-2.0" in profile.source
    assert name == f"{profile.model.lower()}-tp{profile.tp}-{name.rsplit('-', 1)[1]}"
    assert name.rsplit("-", 1)[1].upper() in profile.gpu


def test_a_prefill_of_2048_tokens_on_an_a800_takes_225_7_ms() -> None:
    """14.64 + 0.0975 · 2048 + 5.44e-6 · (2048² + 2048) / 2 = 14.64 + 199.68 + 11.41 ms."""
    cost = load_profile(A800).cost
    assert cost.step_s(2048, 0, prefill_pairs(0, 2048)) * 1000 == pytest.approx(225.7, abs=0.05)


def test_decoding_128_requests_over_243_k_tokens_takes_59_4_ms() -> None:
    """20.60 + 0.0510 · 128 + 1.33e-4 · 243 000 = 20.60 + 6.53 + 32.32 ms."""
    assert load_profile(A800).cost.step_s(128, 243_000, 0) * 1000 == pytest.approx(59.4, abs=0.05)


def test_overhead_of_the_imitated_engine_is_added_to_each_step() -> None:
    plain = CostModel(g0_s=1, b0_s=2, g1_s=0, b1_s=3, d_s=4, a_s=5)
    late = CostModel(g0_s=1, b0_s=2, g1_s=0, b1_s=3, d_s=4, a_s=5, era_s=0.5)
    assert plain.step_s(1, 0, 0) == 3
    assert plain.step_s(2, 1, 1) == 6 + 4 + 5
    assert late.step_s(2, 1, 1) == plain.step_s(2, 1, 1) + 0.5


@given(prefix=st.integers(0, 300), chunk=st.integers(0, 300))
def test_pairs_count_each_token_with_all_up_to_itself(prefix: int, chunk: int) -> None:
    assert prefill_pairs(prefix, chunk) == sum(prefix + i + 1 for i in range(chunk))


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=8))
def test_chunks_of_a_prompt_have_the_pairs_of_the_whole(chunks: list[int]) -> None:
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    assert sum(map(prefill_pairs, starts, chunks)) == prefill_pairs(0, sum(chunks))


TWO_COSTS = [load_profile(name).cost for name in (A800, "llama-3-70b-tp8-a100")]


@given(
    token_s=st.sampled_from([1.0, 1e-4]),
    pair_s=st.sampled_from([0.0, 1e-3, 1.0]),
    prefix=st.integers(0, 5000),
    limit_s=st.floats(0, 1e4),
)
def test_the_largest_chunk_is_the_largest(token_s: float, pair_s: float, prefix: int, limit_s: float) -> None:
    cost = per_token(token_s, pair_s=pair_s)
    chunk = cost.largest(prefix, limit_s)
    assert not chunk or cost.chunk_s(prefix, chunk) <= limit_s
    assert cost.chunk_s(prefix, chunk + 1) > limit_s
    assert cost.largest(prefix, cost.chunk_s(prefix, 17)) in (16, 17), "rounding aside"
    assert cost.largest(prefix, -1.0) == 0


@given(prefix=st.integers(0, 5000), chunk=st.integers(0, 2000), cut=st.floats(0, 1))
def test_the_work_of_a_chunk_is_the_papers_without_the_constant_part(prefix: int, chunk: int, cut: float) -> None:
    """KunServe, version 2, equation (1), with α and β as fitted for Qwen2.5-14B on an A800."""
    alpha_s, beta_s = 5.33e-9, 9.76e-5
    cost = CostModel(1.53e-2, beta_s, 0, 0, 1e-7, alpha_s)
    work_s = alpha_s * (prefix * chunk + (chunk**2 + chunk) / 2) + beta_s * chunk
    assert cost.chunk_s(prefix, chunk) == pytest.approx(work_s)
    first = int(cut * chunk)
    assert cost.chunk_s(prefix, first) + cost.chunk_s(prefix + first, chunk - first) == pytest.approx(work_s)
    assert cost.step_s(chunk, 0, prefill_pairs(prefix, chunk)) == pytest.approx(work_s + cost.g0_s)


@given(tokens=st.integers(1, 10_000), kv=st.integers(0, 10**6), pairs=st.integers(0, 10**8))
def test_more_work_never_takes_less_time(tokens: int, kv: int, pairs: int) -> None:
    for cost in TWO_COSTS:
        base = cost.step_s(tokens, kv, pairs)
        assert base > 0
        assert min(cost.step_s(tokens + 1, kv, pairs), cost.step_s(tokens, kv + 1, pairs)) > base
        assert cost.step_s(tokens, kv, pairs + 1) > base


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("qwen2.5-14b-a800")
    assert isinstance(caught.value, StartupError)
    assert str(caught.value) == (f"sluice: there is no cost profile 'qwen2.5-14b-a800'. Did you mean {A800}?")
    with pytest.raises(ProfileError):
        load_profile("../profiles/" + A800)


def test_a_profile_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((PROFILES / f"{A800}.toml").read_text())
    mine, shipped = load_profile(path), load_profile(A800)
    assert (mine.name, mine.cost) == ("mine", shipped.cost)
    assert load_profile(str(path)) == mine


@pytest.mark.parametrize("name", [A800, "llama-3-70b-tp8-a100"])
def test_a_written_profile_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    profile = replace(load_profile(name), model='Odd "Näme" 🦊\\\n', p95_error_ratio=0.0625)
    path = tmp_path / f"{name}.toml"
    path.write_text(profile_toml(profile), encoding="utf-8")
    found = load_profile(path)
    assert replace(found, cost=profile.cost) == profile
    assert asdict(found.cost) == pytest.approx(asdict(profile.cost), rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("g0 = 20.60", "g0 = nan", "step_ms.g0"),
        ("g0 = 20.60", "g0 = -1.0", "step_ms.g0"),
        ("g0 = 20.60\n", "", "step_ms.g0"),
        ("b1 = ", "bee = ", "step_ms.bee"),
        ("tp = 1", "tp = 0", "tp"),
        ("[step_ms]", "[step_ms", "not valid TOML"),
    ],
)
def test_a_malformed_profile_is_refused_by_its_field(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "bad.toml"
    text = (PROFILES / f"{A800}.toml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=reason) as caught:
        load_profile(path)
    assert "bad.toml" in str(caught.value)
    assert not isinstance(caught.value, ValidationError)


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load_profile(tmp_path / "none.toml")
