"""Parameters of sampling: the model's defaults, seeds of choices, and whose cache a request may share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.build import load_text
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.salt import cache_salt
from services.dispatcher.endpoints.sampling import parse_sampling
from services.dispatcher.text.generation_config import SamplingDefaults, read_sampling_defaults
from shared.errors import StartupError
from shared.types import MAX_SEED, SamplingParams
from tests.support.dispatchers import make_settings
from tests.support.text_models import write_model_folder

GIVEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def write(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_models_own_defaults_hold_for_what_a_request_does_not_give(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(write(tmp_path, **GIVEN, do_sample=False, max_new_tokens=7, eos_token_id=[1, 2]))
    assert defaults == SamplingDefaults(**GIVEN)  # type: ignore[arg-type]  # the right types, by name
    sampling = parse_sampling(Fields({}), 100, defaults, None)
    assert {name: getattr(sampling.common, name) for name in GIVEN} == GIVEN
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    sampling = parse_sampling(Fields(neutral), 100, defaults, None)
    assert {name: getattr(sampling.common, name) for name in GIVEN} == {**neutral, "top_k": 0}


def test_without_a_file_or_a_value_openais_defaults_hold(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert read_sampling_defaults(write(tmp_path, temperature=None, top_k=0)) == SamplingDefaults()
    params = parse_sampling(Fields({}), 100, SamplingDefaults(), None).choices(1, 16, 5)
    assert params == [SamplingParams(max_tokens=16, seed=5)]


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_k": 1.5},
        {"top_k": -2},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
def test_a_file_that_asks_for_the_impossible_stops_the_start_unless_it_is_left_out(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    (name,) = content
    folder = write(write_model_folder(tmp_path), **content)
    with pytest.raises(StartupError, match=rf"{name} in .*generation_config.json.*--generation-config none"):
        load_text(make_settings(folder))
    assert load_text(make_settings(folder, generation_config="none")).defaults == SamplingDefaults()


@pytest.mark.slow
@given(st.integers(-(2**63), MAX_SEED), st.integers(1, 128))
def test_seeds_count_up_and_go_on_from_the_smallest_after_the_largest(seed: int, count: int) -> None:
    sampling = parse_sampling(Fields({"seed": seed, "temperature": 0.5}), 100, SamplingDefaults(), 2)
    params = sampling.choices(count, 10, drawn_seed=77)
    assert [(each.seed - seed) % 2**64 for each in params] == list(range(count))
    assert all(-(2**63) <= each.seed <= MAX_SEED for each in params)
    assert {each.model_copy(update={"seed": 0}) for each in params} == {params[0].model_copy(update={"seed": 0})}


def test_as_many_tokens_as_the_context_holds_are_enough_for_min_tokens() -> None:
    (params,) = parse_sampling(Fields({"min_tokens": 50}), 100, SamplingDefaults(), None).choices(1, 10, 0)
    assert params.min_tokens == 10


KEYS = st.sampled_from(["", "Bearer a", "Bearer b", "Bearer ab", "Bearer ü"])
SALTS = st.sampled_from(["", "a", "b", "Bearer a", "ü"])


@given(KEYS, SALTS, KEYS, SALTS)
def test_requests_share_cached_prompts_only_under_the_same_key_and_salt(
    key: str, salt: str, other_key: str, other_salt: str
) -> None:
    first, second = cache_salt(key, salt), cache_salt(other_key, other_salt)
    assert (first == second) == ((key, salt) == (other_key, other_salt))
    assert len(first) == (32 if key or salt else 0)


def test_the_salt_is_the_same_in_every_dispatcher() -> None:
    assert cache_salt("Bearer x", "y") == "70ee21b878aa04305b7904cf0f972bf7"
