"""Guides: what a row may draw, against a matcher that reads the whole answer anew for every token."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.worker.sampling.grammar_cache import GrammarCache
from services.worker.sampling.guides import Guides, RowsBrokenError
from shared.grammars import GrammarCompiler, GrammarError
from shared.types import SamplingParams, Thinking
from tests.support.checkpoints import EOS, build_tokenizer
from tests.support.row_batches import Sequence, advance, batch_of

VOCAB = 384
END_IDS = (EOS, 2)
OPENING, CLOSING = 300, 301
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = (
    LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)).encode(),
    LLMatcher.grammar_from_regex("[a-f]{3,12}(-[0-9]+)?").encode(),
    LLMatcher.grammar_from_lark('start: "yes" | "no" | "per" /[a-z]{2}/').encode(),
)


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    source = build_tokenizer(VOCAB).backend_tokenizer.to_str()
    return GrammarCache(GrammarCompiler(source, VOCAB, END_IDS))


def may_draw(sampling: SamplingParams, outputs: list[int], grammars: GrammarCache) -> set[int]:
    """The definition, of the whole answer so far: by a matcher that reads it from the beginning."""
    everything, thinking, said = set(range(VOCAB)), sampling.thinking, outputs
    if thinking is not None and (thinking.is_open or outputs[:1] == [thinking.opening_id]):
        thoughts = outputs[not thinking.is_open :]
        if thinking.closing_id not in thoughts:
            if thinking.budget is not None and len(thoughts) >= thinking.budget:
                return {thinking.closing_id}
            return everything - set(END_IDS) if sampling.grammar else everything
        said = thoughts[thoughts.index(thinking.closing_id) + 1 :]
    if not sampling.grammar:
        return everything
    matcher = grammars.matcher(sampling.grammar)
    assert matcher.try_consume_tokens(said) == len(said)
    found = {token for token in everything if matcher.deep_copy().try_consume_tokens([token]) == 1} - set(END_IDS)
    found |= set(END_IDS) if matcher.is_accepting() else set()
    mask = allocate_token_bitmask(1, VOCAB)
    fill_next_token_bitmask(matcher, mask)
    likely = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert likely <= found, "of what follows without choice it takes the usual tokens"
    assert likely
    found = likely
    opens = thinking is not None and not thinking.is_open and not outputs
    return found | {OPENING} if opens else found


def random_sampling(rng: random.Random) -> SamplingParams:
    thinking = None
    if rng.random() < 0.6:
        budget = rng.choice([None, 0, 1, 5])
        thinking = Thinking(opening_id=OPENING, closing_id=CLOSING, is_open=rng.random() < 0.5, budget=budget)
    return SamplingParams(max_tokens=99, thinking=thinking, grammar=rng.choice([b"", *GRAMMARS]))


def masked(guides: Guides, rows: list[int], *, may_undo: bool = False, on_host: bool = True) -> list[set[int]]:
    """Return what each of the rows may draw, by their logits; check that these come back."""
    logits = torch.randn(len(rows), VOCAB)
    before = logits.clone()
    guides.prepare(np.array(rows, dtype=np.int32), on_host=on_host)
    undo = guides.apply(logits, may_undo=may_undo)
    allowed = [set(np.flatnonzero(np.isfinite(row.numpy())).tolist()) for row in logits]
    assert torch.equal(logits[logits.isfinite()], before[logits.isfinite()]), "the others stay"
    if may_undo:
        undo()
        assert torch.equal(logits, before)
    return allowed


class Table:
    """Five rows that come, go, fail and are computed anew, as an engine has it, and what is known of them.

    Args:
        seed: of all that happens.
        grammars: over the vocabulary.
    """

    def __init__(self, seed: int, grammars: GrammarCache) -> None:
        self.rng = random.Random(seed)
        self.grammars = grammars
        self.guides = Guides(5, END_IDS, VOCAB, grammars)
        self.living: list[Sequence] = []
        self.num_checked = 0
        self._rows = list(range(5))
        self._drops: list[int] = []

    def come(self) -> None:
        """Let a sequence come, which may go on after what another worker drew."""
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 9))]
        sampling = random_sampling(self.rng) if self.rng.random() < 0.8 else SamplingParams(max_tokens=99)
        outputs = list[int]()
        for _ in range(self.rng.choice([0, 0, 3, 9])):
            allowed = may_draw(sampling, outputs, self.grammars) - set(END_IDS)
            if allowed:
                outputs.append(self.rng.choice(sorted(allowed)))
        self.living.append(Sequence(self._rows.pop(), sampling, len(prompt), prompt + outputs))

    def step(self) -> None:
        """Compute some tokens of some rows; once in a while it fails, and is tried again."""
        rng = self.rng
        for sequence in self.living:
            if not sequence.new and rng.random() < 0.1:
                sequence.computed = rng.randrange(len(sequence.tokens))
        work = [(s, rng.randint(1, len(s.tokens) - s.computed)) for s in self.living if rng.random() < 0.8]
        rng.shuffle(work)
        while rng.random() < 0.3:
            self._run(work, is_whole=rng.random() < 0.5)
        self._run(work, is_whole=True)
        for sequence, count in work:
            sequence.computed += count
        drew = [sequence for sequence, _ in work if sequence.computed == len(sequence.tokens)]
        self._draw(drew)
        if drew and rng.random() < 0.5:
            self._go_ahead(drew)

    def _draw(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            allowed = may_draw(sequence.sampling, sequence.tokens[sequence.num_prompt :], self.grammars)
            sequence.tokens.append(self.rng.choice(sorted(allowed)))

    def _go_ahead(self, drew: list[Sequence]) -> None:
        """Launch the step behind before the host has the tokens; that they were drawn may turn out to be an error."""
        failed = self.rng.random() < 0.5
        for sequence in drew:
            if failed and self.rng.random() < 0.3:
                sequence.tokens[-1] = self.rng.randrange(VOCAB + 9)  # of logits that are no numbers
        ids = np.array([sequence.tokens[-1] for sequence in drew])
        self.guides.expect(np.array([sequence.row for sequence in drew], dtype=np.int32), lambda: ids)
        work = [(sequence, 1) for sequence in drew]
        self.rng.shuffle(work)
        if failed:
            batch = batch_of(work, [])
            self.guides.take_in(replace(batch, tokens=-1 - batch.rows))
            self.guides.prepare(batch.rows)
            with suppress(RowsBrokenError):
                self.guides.apply(torch.zeros(len(work), VOCAB), may_undo=False)
            for sequence in drew:
                del sequence.tokens[-1]
                sequence.computed -= 1
            self._run(work, is_whole=True)
        else:
            self._run(work, is_whole=True, is_ahead=True)
        for sequence in drew:
            sequence.computed += 1
        self._draw([sequence for sequence in drew if sequence.tokens[-1] not in END_IDS])

    def _run(self, work: list[tuple[Sequence, int]], *, is_whole: bool, is_ahead: bool = False) -> None:
        """Give the guides a batch, and compare.

        Args:
            work: sequences, and how many tokens of each are computed.
            is_whole: else the forward pass fails, and nobody asks.
            is_ahead: the host does not have the tokens.
        """
        batch = batch_of(work, self._drops)
        self.guides.take_in(replace(batch, tokens=-1 - batch.rows) if is_ahead else batch)
        self._drops.clear()
        ends = [s for s, count in work if s.computed + count == len(s.tokens)]
        if not is_whole:
            self.guides.prepare(np.array([s.row for s in ends], dtype=np.int32))
        elif ends:
            ways = {"may_undo": self.rng.random() < 0.5, "on_host": self.rng.random() < 0.5}
            found = masked(self.guides, [s.row for s in ends], **ways)
            for sequence, allowed in zip(ends, found, strict=True):
                outputs = sequence.tokens[sequence.num_prompt :]
                has_ended = bool(outputs) and outputs[-1] in END_IDS  # nobody hears of what it draws then
                assert has_ended or allowed == may_draw(sequence.sampling, outputs, self.grammars)
                self.num_checked += 1
        advance(work, 0)

    def leave(self) -> None:
        """Let those go that have ended, and some that have not."""
        for sequence in [s for s in self.living if s.tokens[-1] in END_IDS or (not s.new and self.rng.random() < 0.03)]:
            self.living.remove(sequence)
            self._drops.append(sequence.row)
            self._rows.insert(0, sequence.row)

    def end(self) -> None:
        self.guides.take_in(batch_of([], [*self._drops, *(s.row for s in self.living)]))
        assert not self.guides._rows, "a dropped row is forgotten"
        self.guides.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_row_may_draw_what_its_tokens_say_whatever_happens_to_the_batches(
    seed: int, grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, failed steps tried again, recomputing, rows that come with outputs, beside rows that are free."""
    monkeypatch.setattr("services.worker.sampling.guides.FEW_IDS", (0, 40, 8192)[seed % 3])
    table = Table(seed, grammars)
    for _ in range(40):
        if len(table.living) < 5 and table.rng.random() < 0.4:
            table.come()
        table.step()
        table.leave()
    table.end()
    assert table.num_checked > 20


def one_row(sampling: SamplingParams, outputs: list[int], grammars: GrammarCache | None) -> Guides:
    guides, sequence = Guides(1, END_IDS, VOCAB, grammars), Sequence(0, sampling, 1, [9, *outputs])
    guides.take_in(batch_of([(sequence, len(sequence.tokens))], []))
    return guides


def test_drawn_at_random_every_answer_ends_and_is_of_its_grammar(grammars: GrammarCache) -> None:
    rng = random.Random(0)
    compiler = GrammarCompiler(build_tokenizer(VOCAB).backend_tokenizer.to_str(), VOCAB, END_IDS)
    backend = build_tokenizer(VOCAB).backend_tokenizer
    for _ in range(20):
        guides, sequence = Guides(1, END_IDS, VOCAB, grammars), Sequence(0, SamplingParams(max_tokens=99), 1, [9])
        sequence.sampling = SamplingParams(max_tokens=99, grammar=GRAMMARS[0])
        while sequence.tokens[-1] not in END_IDS:
            work = [(sequence, len(sequence.tokens) - sequence.computed)]
            guides.take_in(batch_of(work, []))
            (allowed,) = masked(guides, [0])
            advance(work, rng.choice(sorted(allowed)))
        said = json.loads(backend.decode(sequence.tokens[1:-1]))
        assert set(said) == {"name", "age"}
        assert isinstance(said["age"], int)
        assert len(said["name"]) <= 8
    assert compiler.num_mask_words == grammars.num_mask_words


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_used_up_budget_forces_the_closing_tag(budget: int, is_open: bool) -> None:
    sampling = SamplingParams(
        max_tokens=99, thinking=Thinking(opening_id=OPENING, closing_id=CLOSING, is_open=is_open, budget=budget)
    )
    opening, everything = [] if is_open else [OPENING], set(range(VOCAB))
    for num_thoughts in range(budget + 1):
        (allowed,) = masked(one_row(sampling, [*opening, *range(20, 20 + num_thoughts)], None), [0])
        assert allowed == (everything if num_thoughts < budget else {CLOSING})
    (allowed,) = masked(one_row(sampling, [*opening, *range(20, 20 + budget), CLOSING, 40], None), [0])
    assert allowed == everything


def test_only_the_rows_whose_guides_fail_are_named(grammars: GrammarCache) -> None:
    sound = Sequence(0, SamplingParams(max_tokens=9, grammar=GRAMMARS[1]), 1, [9])
    broken = Sequence(3, SamplingParams(max_tokens=9, grammar=GRAMMARS[1]), 1, [9, 200, 201])
    no_grammar = Sequence(5, SamplingParams(max_tokens=9, grammar=b"start: /["), 1, [9])
    guides = Guides(6, END_IDS, VOCAB, grammars)
    guides.take_in(batch_of([(each, len(each.tokens)) for each in (sound, broken, no_grammar)], []))
    for _ in range(2):  # and again, when they are tried again
        guides.prepare(np.array([5, 0, 3], dtype=np.int32))
        with pytest.raises(RowsBrokenError) as caught:
            guides.apply(torch.zeros(3, VOCAB), may_undo=False)
        assert caught.value.rows == (5, 3)
    (allowed,) = masked(guides, [0])
    assert allowed == may_draw(sound.sampling, [], grammars)


def test_without_a_tokenizer_a_row_with_a_grammar_fails_and_a_budget_holds() -> None:
    guides = one_row(SamplingParams(max_tokens=9, grammar=GRAMMARS[1]), [], None)
    guides.prepare(np.zeros(1, dtype=np.int32))
    with pytest.raises(RowsBrokenError, match="no tokenizer"):
        guides.apply(torch.zeros(1, VOCAB), may_undo=False)


def test_a_grammar_is_compiled_once_and_no_more_than_some_are_kept(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bytes] = []

    def count(self: GrammarCompiler, grammar: bytes, compile_it: Any = GrammarCompiler.compile) -> LLMatcher:
        compiled.append(grammar)
        matcher: LLMatcher = compile_it(self, grammar)
        return matcher

    monkeypatch.setattr(GrammarCompiler, "compile", count)
    monkeypatch.setattr("services.worker.sampling.grammar_cache.MAX_GRAMMARS", 2)
    cache = GrammarCache(GrammarCompiler(build_tokenizer(VOCAB).backend_tokenizer.to_str(), VOCAB, END_IDS))
    first = cache.matcher(GRAMMARS[2])
    assert first.consume_token(compiler_tokens("yes")[0])
    assert cache.matcher(GRAMMARS[2]).try_consume_tokens(compiler_tokens("no")) > 0, "each begins at the beginning"
    assert compiled == [GRAMMARS[2]]
    for grammar in (GRAMMARS[0], GRAMMARS[1], GRAMMARS[2]):
        cache.prepare(grammar)
    assert compiled == [GRAMMARS[2], GRAMMARS[0], GRAMMARS[1], GRAMMARS[2]]
    with pytest.raises(GrammarError):
        cache.prepare(b"start: /[")


def compiler_tokens(text: str) -> list[int]:
    ids: list[int] = build_tokenizer(VOCAB).backend_tokenizer.encode(text).ids
    return ids
