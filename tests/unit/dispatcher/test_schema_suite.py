"""Schemas hold, whatever the model: the public suite over three vocabularies, token by token.

What is served allows each valid instance, in some spelling, and its end; no spelling of an invalid one gets through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import demo_model
from services.dispatcher.endpoints.schema_rules import SchemaRefusedError, grammar_of_schema
from services.dispatcher.text.grammar_trial import try_grammar
from shared.grammars import GrammarCompiler
from tests.support.schema_suite import Group, groups, texts_of, tokens_of

END: Final = "</s>"
VOCABULARIES: Final = ("demo", "byte-level", "sentencepiece")
ASSERTED: Final = frozenset(
    f"{name} format"
    for name in ("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration")
)
"""Formats are asserted, as OpenAI does; for the suite proper they are annotations."""
NARROWER: Final = frozenset(
    {
        ("optional/format/email.json", '"joe bloggs"@example.com'),
        ("optional/format/email.json", '"joe..bloggs"@example.com'),
        ("optional/format/email.json", '"joe@bloggs"@example.com'),
        ("optional/format/email.json", "joe.bloggs@[IPv6:::1]"),
        ("optional/format/ipv6.json", "1::d6:192.168.0.1"),
        ("optional/format/ipv6.json", "1:2::192.168.0.1"),
        ("optional/format/ipv6.json", "::ffff:192.168.0.1"),
        ("optional/format/ipv6.json", "1000:1000:1000:1000:1000:1000:255.255.255.255"),
        ("optional/format/date-time.json", "1998-12-31T15:59:60.123-08:00"),
        ("optional/format/time.json", "01:29:60+01:30"),
        ("optional/format/time.json", "23:29:60+23:30"),
        ("optional/format/time.json", "15:59:60-08:00"),
        ("optional/format/time.json", "00:29:60-23:30"),
        ("optional/ecmascript-regex.json", "\u000b"),
        ("optional/ecmascript-regex.json", "\u0001"),
    }
)
"""Valid, but not written: rare forms of formats, leap seconds elsewhere than in Greenwich, control characters."""
NUM_SERVED: Final = 185
"""Schemas of the suite that are served. Less is a loss; more is welcome, and to be written here."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def suite() -> list[Group]:
    return groups()


@pytest.fixture(scope="module", params=VOCABULARIES)
def compiler(request: pytest.FixtureRequest, suite: list[Group]) -> GrammarCompiler:
    if request.param == "demo":
        folder = Path(demo_model.__file__).parent / "model"
        tokenizer, end = Tokenizer.from_file(str(folder / "tokenizer.json")), 4
    else:
        corpus = [json.dumps(group.schema, ensure_ascii=False) for group in suite]
        train = _train_byte_level if request.param == "byte-level" else _train_sentencepiece
        tokenizer = train(corpus)
        end = tokenizer.encode(END).ids[0]
    return GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])


def _train_byte_level(corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=alphabet, special_tokens=[END])
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _train_sentencepiece(corpus: list[str]) -> Tokenizer:
    """Return a BPE over `▁` for spaces, with a token for each byte beside what was learned."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learner.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    model = json.loads(learner.to_str())["model"]
    tokens = ["<unk>", END, *(f"<0x{value:02X}>" for value in range(256)), "▁", *model["vocab"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", END])
    return tokenizer


def is_allowed(compiler: GrammarCompiler, grammar: bytes, ids: list[int], end: int) -> bool:
    """Whether each of the tokens may follow the ones before, and the end may follow them all."""
    matcher = compiler.compile(grammar)
    for token_id in (*ids, end):
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        assert matcher.consume_token(token_id), matcher.get_error()
    return True


def spellings(compiler: GrammarCompiler, text: str) -> Iterator[list[int]]:
    """Give two tokenisations of a text: by long tokens, and character by character."""
    yield tokens_of(compiler, text)
    yield [token_id for char in text for token_id in tokens_of(compiler, char)]


def held(group: Group) -> bytes | None:
    """Return the grammar of what is served; None: it is refused before the library sees it."""
    if isinstance(group.schema, bool):  # no schema of a request is one
        return None
    try:
        return grammar_of_schema(group.schema)
    except SchemaRefusedError:
        return None


def test_every_valid_instance_is_allowed_and_every_invalid_one_is_stopped(
    compiler: GrammarCompiler, suite: list[Group]
) -> None:
    end = _end_of(compiler)
    served, differing, num_instances = 0, set(), 0
    for group in suite:
        grammar = held(group)
        if grammar is None or "reason" in try_grammar(compiler, grammar.decode()):
            continue
        served += 1
        for instance in group.instances:
            num_instances += 1
            is_through = any(
                is_allowed(compiler, grammar, ids, end)
                for text in texts_of(instance.value)
                for ids in spellings(compiler, text)
            )
            if is_through != instance.is_valid:
                differing.add((group.file, group.about, str(instance.value), is_through))
    assert not [case for case in differing if case[-1]], "invalid, and let through"
    assert {about for file, about, _, _ in differing if file == "format.json"} == ASSERTED
    assert {(file, value) for file, _, value, _ in differing if file != "format.json"} == NARROWER
    assert served == NUM_SERVED
    assert num_instances > 900


def _end_of(compiler: GrammarCompiler) -> int:
    """Return the token that may follow a whole answer."""
    matcher = compiler.compile(grammar_of_schema({"const": 1}))
    assert matcher.consume_tokens(tokens_of(compiler, "1"))
    mask = matcher.compute_bitmask()
    (end,) = (index for index in range(8 * len(mask)) if mask[index // 8] >> index % 8 & 1)
    return end
