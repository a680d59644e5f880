"""Which tokens make up the text that is shown, and how they are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.text.detokenizer import ByteLevelTable, load_table
from services.dispatcher.text.token_names import TokenNames
from shared.types import FinishReason
from tests.support.text_models import byte_level_json, sentencepiece_json

BYTES = ByteLevelTable([bytes([value]) for value in range(256)])
WORDS = st.text(alphabet="ab🦊é", max_size=20)
STOPS = st.lists(st.text(alphabet="ab🦊", min_size=1, max_size=3), max_size=3)


@given(WORDS, STOPS, st.lists(st.integers(1, 7)), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_tokens_of_each_part_spell_its_text(text: str, stops: list[str], sizes: list[int], ends: bool) -> None:
    """One byte is one token. What is shown is spelled by its tokens, but for a stop string that cuts the last one."""
    data, at = [*text.encode()], 0
    answer = AnswerText(BYTES.start(), stops, with_tokens=True)
    shown: list[tuple[int, int]] = []
    visible = ""
    while at < len(data):
        size = sizes.pop() if sizes else len(data)
        visible += answer.push(data[at : at + size], FinishReason.NONE)
        shown += answer.take_shown()
        at += size
        assert bytes(data[index] for index, _ in shown).decode() == visible
    if ends and not answer.was_cut:
        visible += answer.push([], FinishReason.LENGTH)
        shown += answer.take_shown()
        assert bytes(data[index] for index, _ in shown).decode() == visible
    assert [index for index, _ in shown] == list(range(len(shown)))
    for index, offset in shown:
        assert bytes(data[:index]).decode(errors="ignore") == visible[:offset]
    plain = AnswerText(BYTES.start(), stops)
    assert plain.push(data, FinishReason.NONE) + (plain.push([], FinishReason.LENGTH) if ends else "") == visible


@given(WORDS, STOPS, st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_no_stop_string_ends_the_text_of_the_first_tokens(text: str, stops: list[str], min_tokens: int) -> None:
    """The answer is that of a text of which only the rest, after `min_tokens` tokens, is searched."""
    data = [*text.encode()]
    answer = AnswerText(BYTES.start(), stops, min_tokens=min_tokens)
    found = answer.push(data, FinishReason.LENGTH)
    reference = AnswerText(BYTES.start(), stops)
    detokenizer = BYTES.start()
    free = detokenizer.push(data[:min_tokens])
    rest = detokenizer.push(data[min_tokens:]) + detokenizer.flush()
    assert found == free + reference.push([*rest.encode()], FinishReason.LENGTH)
    assert answer.num_tokens >= min(min_tokens, len(data))


def test_a_token_without_text_comes_with_what_follows_or_with_the_end() -> None:
    control = 300  # beyond the table: no text
    answer = AnswerText(BYTES.start(), with_tokens=True)
    assert answer.push([control], FinishReason.NONE) == ""
    assert answer.take_shown() == []
    assert answer.push([*b"a"], FinishReason.NONE) == "a"
    assert answer.take_shown() == [(0, 0), (1, 0)]
    assert answer.push([control], FinishReason.LENGTH) == ""
    assert answer.take_shown() == [(2, 1)]


def test_the_token_that_ends_the_answer_is_no_part_of_it() -> None:
    answer = AnswerText(BYTES.start(), with_tokens=True)
    assert answer.push([*b"ab", 300], FinishReason.STOP) == "ab"
    assert answer.take_shown() == [(0, 0), (1, 1)]
    assert answer.num_tokens == 3


@pytest.mark.parametrize("source", [byte_level_json(), sentencepiece_json()])
def test_the_names_of_all_tokens_are_their_texts_or_their_bytes(source: str) -> None:
    tokenizer = Tokenizer.from_str(source)
    names = TokenNames(tokenizer, load_table(tokenizer))
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        data, name = names.bytes_of(token_id), names.name_of(token_id)
        assert data
        if name.startswith("bytes:"):
            assert bytes.fromhex(name.removeprefix("bytes:").replace("\\x", " ")) == data
            continue
        assert name.encode() == data
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        assert decoded in (name, name.removeprefix(" "))  # a sentencepiece decoder strips a text's first space


def test_an_id_without_a_token_has_no_text() -> None:
    tokenizer = Tokenizer.from_str(byte_level_json())
    names = TokenNames(tokenizer, load_table(tokenizer))
    assert (names.bytes_of(10**6), names.name_of(10**6)) == (b"", "")
