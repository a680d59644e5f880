"""Sampling through the runner: text with penalties against transformers, the same text after any detour, logprobs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from services.worker.contract.executor import BatchFailedError
from services.worker.executor.model_runner import ModelRunner
from services.worker.sampling.sampler import TokenChoice, TokenSampler
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.runner_driver import Driven, Driver
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
PROMPT = list(range(10, 40))
LENGTH = 40
EVERYTHING: dict[str, Any] = {
    "temperature": 1.1,
    "top_k": 200,
    "top_p": 0.97,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((50, 2.0), (51, -100.0)),
    "min_tokens": 20,
    "stop_token_ids": (60, 61),
    "seed": 9,
    "logprobs": 3,
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return open_runner(SHAPE)


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, **values)


def alone(runner: ModelRunner, params: SamplingParams, generated: Sequence[int] = ()) -> Driven:
    driver = Driver(runner)
    sequence = driver.add(PROMPT, params, generated=generated)
    driver.run(LENGTH, chunk=60, max_tokens=96)
    return sequence


def test_greedy_text_with_repetition_penalty_and_minimal_length_is_transformers(runner: ModelRunner) -> None:
    """At every step the two best differ by 1e-3 or more, so that rounding cannot excuse a difference."""
    reference, text = stored_checkpoint(SHAPE)[1], list[int]()
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 25, [1, 60], device="cpu"),
        ]
    )
    with torch.inference_mode():
        while len(text) < LENGTH:
            known = torch.tensor([PROMPT + text])
            scores = chain(known, reference(known).logits[:, -1])[0]
            best = scores.topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "choose another seed: the checkpoint has near-ties"
            text.append(int(best.indices[0]))
    params = sampling(temperature=0, repetition_penalty=1.3, min_tokens=25, stop_token_ids=(60,))
    assert alone(runner, params).output == text
    assert alone(runner, sampling(temperature=0)).output != text


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_parameter_at_once_says_the_same_after_any_detour(runner: ModelRunner, deterministic: bool) -> None:
    """Beside others, in chunks, preempted and computed again, continued at another worker, after a failed step."""
    made = open_runner(SHAPE, deterministic=True) if deterministic else runner
    expected = alone(made, sampling(**EVERYTHING))
    assert len(set(expected.output)) > 15
    driver = Driver(made, seed=4)
    for i in range(4):
        others = {} if i % 2 else {"repetition_penalty": 1.5, "frequency_penalty": 1.0}
        driver.add(PROMPT[: 6 * i + 1], sampling(temperature=0.4 * i, seed=i, logprobs=i, **others))
    sequence = driver.add(PROMPT, sampling(**EVERYTHING), row=6)
    for length in (1, 7, 23):
        driver.run(length, chunk=9, max_tokens=96)
        driver.preempt(sequence)
    driver.run(LENGTH, chunk=13, max_tokens=96)
    assert sequence.output[:LENGTH] == expected.output
    if deterministic:
        assert sequence.logprobs == expected.logprobs
    another = open_runner(SHAPE, deterministic=deterministic)
    for split in (1, 22):
        continued = alone(another, sampling(**EVERYTHING), expected.output[:split])
        assert continued.output == expected.output


def test_a_failed_step_counts_its_tokens_once(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    params = sampling(temperature=0, frequency_penalty=1.5, repetition_penalty=1.4)
    expected = alone(runner, params).output
    honest, rng = TokenSampler.begin, random.Random(2)

    def failing(self: TokenSampler, *arguments: Any) -> TokenChoice:
        chosen = honest(self, *arguments)
        if rng.random() < 0.4:
            raise RuntimeError("out of luck")
        return chosen

    monkeypatch.setattr(TokenSampler, "begin", failing)
    driver, failures = Driver(runner), 0
    sequence = driver.add(PROMPT, params)
    while len(sequence.output) < LENGTH:
        try:
            driver.step([(sequence, len(sequence.tokens) - sequence.num_computed)])
        except BatchFailedError:
            failures += 1
    assert failures > 5
    assert sequence.output == expected


def test_a_row_taken_over_by_another_sequence_keeps_nothing(runner: ModelRunner) -> None:
    driver = Driver(runner)
    first = driver.add(PROMPT, sampling(**EVERYTHING), row=3)
    driver.run(10, chunk=40, max_tokens=96)
    driver.drop(first)
    second = driver.add(PROMPT, sampling(temperature=0), row=3)
    driver.run(LENGTH, chunk=40, max_tokens=96)
    assert second.output == alone(runner, sampling(temperature=0)).output
    assert not second.logprobs


def test_log_probabilities_are_transformers_log_softmax_before_any_processing(runner: ModelRunner) -> None:
    sequence = alone(runner, sampling(**{**EVERYTHING, "logprobs": 20, "temperature": 1.8}))
    with torch.inference_mode():
        logits = stored_checkpoint(SHAPE)[1](torch.tensor([PROMPT + sequence.output])).logits[0]
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(sequence.logprobs) == LENGTH
    for token, said, row in zip(sequence.output, sequence.logprobs, expected, strict=True):
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        ids, values = zip(*said.top, strict=True)
        assert list(values) == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
        assert torch.allclose(row[list(ids)], torch.tensor(values), atol=1e-4)
        assert list(values) == sorted(values, reverse=True)
        assert dict(said.top).get(token, said.logprob) == said.logprob


def test_only_rows_that_ask_get_log_probabilities_and_as_many_as_they_ask_for(runner: ModelRunner) -> None:
    driver = Driver(runner)
    asked = [None, 0, 5, 20]
    sequences = [driver.add(PROMPT, sampling(temperature=0, logprobs=count)) for count in asked]
    driver.run(6, chunk=40, max_tokens=96)
    assert [len(sequence.logprobs) for sequence in sequences] == [0, *(len(s.output) for s in sequences[1:])]
    for sequence, count in zip(sequences[1:], asked[1:], strict=True):
        assert {len(said.top) for said in sequence.logprobs} == {count}
    batch = driver.batch([(sequences[0], 1)])
    assert runner.run(batch).logprobs is None
