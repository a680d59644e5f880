"""What `sluice bench` sends: lengths, arrivals, data sets, prompts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.datasets import DatasetSample, read_samples, read_trace
from cli.bench.load import BenchLoad
from cli.bench.prompts import PromptMaker, TokenScale, scale_of
from cli.bench.stream import BenchRecord
from cli.bench.workload import Planned, arrive_at, first, fit_context, poisson_arrivals, synthetic, upscale
from shared.errors import StartupError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_arrivals_have_exponential_gaps_of_the_asked_mean() -> None:
    """20 000 gaps of mean 0.25 s: mean within 4 standard errors (0.25 / √20 000 = 0.0018), deviation = mean."""
    times = np.array(poisson_arrivals(4.0, 20_001, rng()))
    gaps = np.diff(times)
    assert times[0] == 0
    assert abs(gaps.mean() - 0.25) < 4 * 0.0018
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05
    assert abs(float((gaps > 0.25).mean()) - math.exp(-1)) < 0.02


def test_the_seed_decides_the_arrivals() -> None:
    assert poisson_arrivals(2, 50, rng(1)) == poisson_arrivals(2, 50, rng(1)) != poisson_arrivals(2, 50, rng(2))


def test_an_infinite_rate_sends_everything_at_once() -> None:
    planned = arrive_at(synthetic(5, 7, 9), math.inf, rng())
    assert planned == [Planned(0.0, 7, 9)] * 5


@pytest.mark.slow
@given(factor=st.floats(0.1, 5), count=st.integers(1, 60), seed=st.integers(0, 9))
def test_an_upscaled_trace_keeps_its_instants_and_the_order_of_its_requests(
    factor: float, count: int, seed: int
) -> None:
    trace = [Planned(float(i), i + 1, 1) for i in range(count)]
    scaled = upscale(trace, factor, rng(seed))
    for i in range(count):
        copies = sum(request.arrival_s == i for request in scaled)
        assert math.floor(factor) <= copies <= math.floor(factor) + 1
    assert [request.num_input for request in scaled] == [i % count + 1 for i in range(len(scaled))]


def test_upscaling_multiplies_the_load() -> None:
    """2 000 arrivals at 2.3: 4 600 expected, standard deviation √(2 000 · 0.3 · 0.7) = 20."""
    trace = [Planned(float(i), 1, 1) for i in range(2000)]
    assert abs(len(upscale(trace, 2.3, rng())) - 4600) < 4 * 20.5
    assert upscale(trace, 1.0, rng()) == trace


def test_the_first_requests_of_a_trace_begin_at_0() -> None:
    assert first([Planned(3.0, 1, 1), Planned(5.0, 2, 2), Planned(9.0, 3, 3)], 2) == [
        Planned(0.0, 1, 1),
        Planned(2.0, 2, 2),
    ]


@pytest.mark.slow
@given(st.integers(2, 300), st.integers(1, 1000), st.integers(1, 1000))
def test_what_is_cut_to_the_context_fits(context: int, num_input: int, num_output: int) -> None:
    fitted, num_cut = fit_context([Planned(0.0, num_input, num_output)], context)
    assert fitted[0].num_input + fitted[0].num_output <= context
    assert min(fitted[0].num_input, fitted[0].num_output) >= 1
    assert num_cut == (fitted[0] != Planned(0.0, num_input, num_output))


def test_a_request_that_fits_is_not_cut() -> None:
    assert fit_context([Planned(0.0, 128, 128)], 512) == ([Planned(0.0, 128, 128)], 0)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,log_type\n7.5,10,2,api\n3.0,20,5,conversation\n")
    assert read_trace(path) == [Planned(0.0, 20, 5), Planned(4.5, 10, 2)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "is no trace"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no request"),
        ("arrival_s,input_tokens,output_tokens\n1.0,0,5\n", "line 2: input_tokens is '0'"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,5\n", "line 2: arrival_s is 'nan'"),
        ("arrival_s,input_tokens,output_tokens\n1.0,3\n", "line 2: output_tokens is ''"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(StartupError, match=reason):
        read_trace(path)
    with pytest.raises(StartupError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_conversations_and_lines_are_read(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "x"}]
    bot_first = [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Hi"}]
    conversations = tmp_path / "a.json"
    conversations.write_text(json.dumps([{"conversations": turns}, {"conversations": bot_first}, {"id": 3}]))
    assert read_samples(conversations) == [DatasetSample("Hi there", "Hello")]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "A b", "max_tokens": 5}\n\n{"prompt": "C", "completion": "d e f"}\n{"prompt": " "}\n')
    assert read_samples(lines) == [DatasetSample("A b", max_tokens=5), DatasetSample("C", "d e f")]


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"a": 1}'), ("a.json", "[1"), ("a.jsonl", '{"a": 1}')])
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError, match=name):
        read_samples(tmp_path / name)


def test_the_scale_goes_through_both_prompts() -> None:
    """20 words are 40 tokens, 120 words are 190: 1.5 tokens a word, 10 more."""
    scale = scale_of((20, 40), (120, 190))
    assert (scale.tokens_per_word, scale.overhead, scale.is_measured) == (1.5, 10.0, True)
    assert scale.num_words(160) == 100
    assert scale.num_words(3) == 1
    assert not scale_of((20, 40), (120, 40)).is_measured


@given(num_tokens=st.integers(1, 500), prefix=st.integers(0, 600))
def test_ids_are_exactly_as_many_as_asked_and_share_the_prefix_only(num_tokens: int, prefix: int) -> None:
    maker = PromptMaker(rng(), TokenScale(), vocab_size=50_000, num_prefix=prefix)
    one, two = maker.make(num_tokens), maker.make(num_tokens)
    shared = min(prefix, num_tokens - 1)
    assert len(one) == len(two) == num_tokens
    assert one[:shared] == two[:shared]
    assert num_tokens < 3 or one[shared:] != two[shared:] or num_tokens - shared < 3
    assert isinstance(one, list)
    assert all(3 <= token < 50_000 for token in one)


def test_words_are_as_many_as_the_scale_says_and_share_the_prefix() -> None:
    maker = PromptMaker(rng(), TokenScale(2.0, 10.0), num_prefix=40)
    one, two = (str(maker.make(110)).split() for _ in range(2))
    assert len(one) == len(two) == 50
    assert one[:20] == two[:20]
    assert one[20:] != two[20:]


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    most = running = 0

    async def send(_index: int, outcome: BenchRecord) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        outcome.end_s = 0.0
        if outcome.index % 4 == 0:
            outcome.fail("timeout")

    load = BenchLoad(synthetic(20, 1, 1), send, 3)
    await load.run()
    assert most == 3
    assert "20/20 done, 0 under way, 5 failed" in load.describe()
    assert [outcome.index for outcome in load.outcomes] == list(range(20))
