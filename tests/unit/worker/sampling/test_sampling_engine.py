"""Sampling through engine and runner together: the text does not depend on what happens to a sequence on its way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.contract.executor import BatchFailedError
from services.worker.engine.invariants import check_engine
from services.worker.executor.model_runner import ModelRunner
from services.worker.sequences.config import AddRefusal, NewSequence
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason, SamplingParams, Thinking
from tests.support.checkpoints import CheckpointShape, build_tokenizer
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
LENGTH = 30
RULES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_tokens": 25, "stop_token_ids": (50, 51, 52)},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": -0.4, "logprobs": 2},
    {"temperature": 1.4, "top_p": 0.9, "min_p": 0.01, "logit_bias": ((7, 3.0),), "logprobs": 0},
    {"temperature": 0.8, "top_k": 40, "repetition_penalty": 0.8, "frequency_penalty": 0.3},
    {"temperature": 1.0, "grammar": b"start: /[a-z]{61,90}/", "logprobs": 1},
    {
        "temperature": 1.3,
        "thinking": Thinking(opening_id=300, closing_id=301, is_open=True, budget=9),
        "grammar": b'start: "{" /[0-9 ]{12}/ "}"',
    },
    {"temperature": 1.2},
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return open_runner(SHAPE, deterministic=True, max_rows=16)


class Run:
    """One engine over a runner; a step may be lost after the model has run it."""

    def __init__(self, runner: ModelRunner, num_blocks: int, failures: random.Random | None = None) -> None:
        info = runner.info
        self.engine = make_engine(
            num_blocks=num_blocks,
            max_batch_tokens=96,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            block_size=info.capacity.block_size,
            finished_kept=256,
        )
        self.runner = runner
        self.failures = failures
        self.texts: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.broken: list[int] = []
        """Streams that ended with an error."""

    def add(self, new: NewSequence) -> None:
        assert not isinstance(self.engine.registry.add(new), AddRefusal)
        self.texts[new.stream] = new.generated.tolist()
        self.logprobs[new.stream] = []

    def go(self, num_steps: int = 100_000) -> None:
        for _ in range(num_steps):
            batch = self.engine.next_batch(0.0)
            if batch is None:
                assert not self.engine.table.num_sequences
                return
            try:
                output = self.runner.run(batch)
            except BatchFailedError as error:
                ends = self.engine.roll_back(batch, error, 0.0)
                self.broken += ends.stream[ends.finish == FinishReason.ERROR].tolist()
                continue
            if self.failures is not None and len(batch.rows) > 1 and self.failures.random() < 0.15:
                self.engine.roll_back(batch, BatchFailedError(batch.step_id, "lost on the way back"), 0.0)
                continue
            events = self.engine.absorb(batch, output, 0.0)
            for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
                self.texts[stream].append(token)
            for extra in events.extras:
                self.logprobs[int(events.stream[extra.index])] += extra.logprobs
            check_engine(self.engine)


def sequences() -> list[NewSequence]:
    return [
        replace(
            new_sequence(i, num_prompt=10 + 9 * i, arrival_s=0.0),
            sampling=SamplingParams(max_tokens=LENGTH, seed=i, **rules),
        )
        for i, rules in enumerate(RULES)
    ]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> Run:
    """Every sequence by itself, one after the other."""
    run = Run(runner, 64)
    for new in sequences():
        run.add(new)
        run.go()
    return run


def test_rules_change_the_texts(runner: ModelRunner, alone: Run) -> None:
    """Shows that the tests below can tell: without its rules each text is another."""
    for new in sequences()[:-1]:
        plain = Run(runner, 64)
        seed, temperature = new.sampling.seed, new.sampling.temperature
        plain.add(replace(new, sampling=SamplingParams(max_tokens=LENGTH, seed=seed, temperature=temperature)))
        plain.go()
        assert plain.texts[new.stream] != alone.texts[new.stream]
    assert [len(said) for said in alone.logprobs.values()] == [0, LENGTH, LENGTH, 0, LENGTH, 0, 0]


def test_log_probabilities_are_of_what_the_model_would_say_without_a_grammar(alone: Run) -> None:
    ((stream, _),) = [(new.stream, 0) for new in sequences() if new.sampling.grammar and new.sampling.logprobs]
    said = alone.logprobs[stream]
    likeliest = [each.top[0] for each in said]
    tokenizer = build_tokenizer(SHAPE.vocab_size)
    assert tokenizer.decode(alone.texts[stream]).islower()
    assert not tokenizer.decode([token for token, _ in likeliest]).islower(), "those that are excluded are told too"
    assert all(each.logprob <= value for each, (_, value) in zip(said, likeliest, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_texts_and_log_probabilities_survive_preemption_and_failed_steps(
    runner: ModelRunner, alone: Run, seed: int
) -> None:
    """14 blocks of 16 hold 224 tokens; the seven sequences grow to 259 prompt and 210 output tokens."""
    run = Run(runner, 14, random.Random(seed))
    for new in sequences():
        run.add(new)
    run.go()
    assert run.engine.totals.num_preemptions > 0
    assert run.engine.totals.num_failed_steps > 0
    assert run.texts == alone.texts
    assert run.logprobs == alone.logprobs


def test_a_row_whose_grammar_fails_ends_alone(runner: ModelRunner, alone: Run) -> None:
    """One cannot be compiled, and one is broken by what another worker is said to have drawn."""
    run = Run(runner, 64)
    wrong = SamplingParams(max_tokens=LENGTH, grammar=b"start: /[")
    broken = SamplingParams(max_tokens=LENGTH, grammar=b"start: /[0-9]+/")
    first = replace(new_sequence(20, num_prompt=5, arrival_s=0.0), sampling=wrong)
    second = replace(new_sequence(21, num_prompt=5, arrival_s=0.0), sampling=broken)
    for new in (first, *sequences(), replace(second, generated=np.array([200, 201], dtype=np.uint32))):
        run.add(new)
    run.go()
    assert sorted(run.broken) == [first.stream, second.stream]
    assert {stream: run.texts[stream] for stream in alone.texts} == alone.texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_closing_tag_that_has_to_come_comes_though_it_is_a_stop_id_before_the_minimal_length(
    runner: ModelRunner, temperature: float
) -> None:
    thinking = Thinking(opening_id=300, closing_id=301, is_open=True, budget=2)
    sampling = SamplingParams(
        max_tokens=LENGTH, temperature=temperature, min_tokens=9, stop_token_ids=(301,), thinking=thinking
    )
    run = Run(runner, 64)
    new = replace(new_sequence(0, num_prompt=5, arrival_s=0.0), sampling=sampling)
    run.add(new)
    run.go()
    assert run.texts[new.stream][2] == 301
    assert len(run.texts[new.stream]) >= 9, "it is no end yet"


@pytest.mark.parametrize("num_steps", [3, 11, 24])
def test_another_worker_goes_on_with_the_same_texts(runner: ModelRunner, alone: Run, num_steps: int) -> None:
    first = Run(runner, 64)
    for new in sequences():
        first.add(new)
    first.go(num_steps)
    second = Run(open_runner(SHAPE, deterministic=True, max_rows=16), 64)
    for new in reversed(sequences()):
        generated = first.texts[new.stream]
        if generated != alone.texts[new.stream]:  # else it has ended
            second.add(replace(new, generated=np.array(generated, dtype=np.uint32)))
    assert second.texts
    second.go()
    assert second.texts == {stream: alone.texts[stream] for stream in second.texts}
    for stream in second.texts:
        assert first.logprobs[stream] + second.logprobs[stream] == alone.logprobs[stream]
