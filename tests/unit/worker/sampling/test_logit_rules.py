"""Bias, minimal length and penalties against loops in numpy and transformers' processors, after any batches."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.worker.sampling import logit_rules
from services.worker.sampling.logit_rules import LogitRules
from services.worker.sampling.token_counts import TokenCounts
from shared.types import SamplingParams
from tests.support.row_batches import Sequence, advance, batch_of

VOCAB = 60
EOS = (1, 3)


def oracle(logits: np.ndarray[Any, np.dtype[np.float32]], sequence: Sequence) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The definition, token by token."""
    s, changed = sequence.sampling, logits.astype(np.float32).copy()
    outputs = Counter(sequence.tokens[sequence.num_prompt :])
    seen = set(sequence.tokens)
    for token, bias in s.logit_bias:
        changed[token] += np.float32(bias)
    if len(sequence.tokens) - sequence.num_prompt < s.min_tokens:
        for token in {*EOS, *s.stop_token_ids} & set(range(VOCAB)):
            changed[token] = -np.inf
    for token in range(VOCAB):
        if token in seen:
            factor = np.float32(s.repetition_penalty)
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        changed[token] -= np.float32(s.frequency_penalty) * np.float32(outputs[token])
        changed[token] -= np.float32(s.presence_penalty) * np.float32(outputs[token] > 0)
    return changed


def random_sampling(rng: random.Random) -> SamplingParams:
    values: dict[str, Any] = {}
    if rng.random() < 0.5:
        values["repetition_penalty"] = rng.choice([0.5, 1.2, 2.0])
    if rng.random() < 0.4:
        values["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.4:
        values["frequency_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.4:
        values["logit_bias"] = tuple((rng.randrange(VOCAB), rng.uniform(-100, 100)) for _ in range(rng.randint(1, 5)))
    if rng.random() < 0.4:
        values |= {"min_tokens": rng.randint(1, 12), "stop_token_ids": (rng.randrange(VOCAB), 10_000, 7)}
    return SamplingParams(max_tokens=99, **values)


def check_step(rules: LogitRules, work: list[tuple[Sequence, int]], rng: random.Random) -> None:
    """Choose tokens as a step does, compare the logits with the oracle's, and put them back."""
    ended = [s for s, count in work if s.computed + count == len(s.tokens)]
    if not ended:
        return
    logits = torch.randn(len(ended), VOCAB, generator=torch.Generator().manual_seed(rng.randrange(2**30))) * 4
    before = logits.clone()
    rows = np.array([s.row for s in ended], dtype=np.int32)
    put_back = rules.apply(logits, rows, np.array([len(s.tokens) for s in ended], dtype=np.int64))
    for i, sequence in enumerate(ended):
        assert np.allclose(logits[i].numpy(), oracle(before[i].numpy(), sequence), rtol=1e-6, atol=1e-5)
    put_back()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(12))
def test_logits_are_changed_as_the_tokens_say_whatever_happens_to_the_batches(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, failed steps tried again, recomputing, prefixes that need no computing, rows that go and come."""
    monkeypatch.setattr(logit_rules, "MAX_EDITS", 70)
    rng = random.Random(seed)
    rules, rows, drops = LogitRules(6, EOS, VOCAB), list(range(6)), list[int]()
    living: list[Sequence] = []
    for _ in range(120):
        if rows and rng.random() < 0.3:
            known = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
            living.append(Sequence(rows.pop(), random_sampling(rng), rng.randint(1, len(known)), known))
        for sequence in living:
            if not sequence.new and rng.random() < 0.1:
                sequence.computed = rng.randrange(len(sequence.tokens))  # preempted; a part of its KV is found again
        work = [(s, rng.randint(1, len(s.tokens) - s.computed)) for s in living if rng.random() < 0.7]
        if not work:
            continue
        rng.shuffle(work)
        for _ in range(1 + (rng.random() < 0.2)):  # a failed step comes back as it was, without its admits
            rules.take_in(batch_of(work, drops))
            check_step(rules, work, rng)
            drops.clear()
            advance(work, 0)
        advance(work, rng.randrange(1, VOCAB))
        for sequence in [s for s in living if not s.new and rng.random() < 0.05]:
            living.remove(sequence)
            drops.append(sequence.row)
            rows.insert(0, sequence.row)
    rules.take_in(batch_of([], [*drops, *(s.row for s in living)]))
    assert not rules._rules, "a dropped row is forgotten"


def one_row(prompt: list[int], outputs: list[int], **values: Any) -> tuple[LogitRules, Sequence]:
    sequence = Sequence(0, SamplingParams(max_tokens=99, **values), len(prompt), [*prompt, *outputs])
    rules = LogitRules(1, EOS, VOCAB)
    rules.take_in(batch_of([(sequence, len(sequence.tokens))], []))
    return rules, sequence


def changed(rules: LogitRules, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    row = logits.clone().unsqueeze(0)
    rules.apply(row, np.zeros(1, dtype=np.int32), np.array([len(sequence.tokens)]))
    return row[0]


LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 3
PROMPT, OUTPUTS = [5, 9, 9, 20, 1], [7, 9, 7, 7, 33]
KNOWN = torch.tensor([PROMPT + OUTPUTS])


@pytest.mark.parametrize("penalty", [0.6, 1.3, 2.0])
def test_repetition_is_transformers_processor_to_the_bit(penalty: float) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(KNOWN, LOGITS.unsqueeze(0))[0]
    assert torch.equal(changed(*one_row(PROMPT, OUTPUTS, repetition_penalty=penalty), LOGITS), expected)


def test_the_smallest_penalty_leaves_numbers_to_draw_from() -> None:
    got = changed(*one_row(PROMPT, OUTPUTS, repetition_penalty=1e-300, frequency_penalty=-2, min_tokens=9), LOGITS)
    assert not got.isnan().any()
    assert torch.isfinite(got.amax())
    assert int(got.argmax()) in {*PROMPT, *OUTPUTS}


def test_bias_is_transformers_processor_and_entries_of_one_id_add_up() -> None:
    expected = SequenceBiasLogitsProcessor([[[4], 7.5], [[9], -100.0]])(KNOWN, LOGITS.unsqueeze(0))[0]
    bias = ((9, -100.0), (4, 5.0), (4, 2.5))
    assert torch.equal(changed(*one_row(PROMPT, OUTPUTS, logit_bias=bias), LOGITS), expected)


@pytest.mark.parametrize("num_outputs", range(5))
def test_stops_are_impossible_before_the_minimal_length_as_in_transformers(num_outputs: int) -> None:
    outputs = OUTPUTS[:num_outputs]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [*EOS, 40], device="cpu")
    expected = processor(torch.tensor([PROMPT + outputs]), LOGITS.unsqueeze(0))[0]
    values = {"min_tokens": 3, "stop_token_ids": (40,), "ignore_eos": True}
    got = changed(*one_row(PROMPT, outputs, **values), LOGITS)
    assert torch.equal(got, expected)
    assert bool(torch.isinf(got).any()) == (num_outputs < 3)


def test_rows_without_rules_are_neither_changed_nor_kept() -> None:
    rules, plain = one_row(PROMPT, OUTPUTS, temperature=0.5, top_k=3, logprobs=4, stop_token_ids=(3,))
    assert torch.equal(changed(rules, plain, LOGITS), LOGITS)
    assert not rules._rules


def test_tokens_that_never_came_are_a_fault_and_not_a_wrong_count() -> None:
    rules, sequence = one_row(PROMPT, OUTPUTS, presence_penalty=1.0)
    sequence.new, sequence.computed = False, len(sequence.tokens) + 1
    sequence.tokens += [2, 2, 2]
    with pytest.raises(AssertionError, match="skips tokens"):
        rules.take_in(batch_of([(sequence, 1)], []))


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_counter_and_ids_stay_sorted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 500, size=rng.integers(0, 300)).astype(np.int32)
    counts, outputs = TokenCounts(prompt), Counter[int]()
    for size in rng.integers(0, 60, size=40):
        more = rng.integers(0, 500, size=size).astype(np.int32)
        counts.add(more)
        outputs.update(more.tolist())
        assert counts.ids.tolist() == sorted({*prompt.tolist(), *outputs})
        assert counts.counts.tolist() == [outputs[token] for token in counts.ids.tolist()]
