"""The text of an answer: where it ends, however it is cut into pieces, and which tokens make it up."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.dispatcher.answers.answer_text import AnswerText, json_text
from services.dispatcher.session.stop_strings import StopMatcher
from services.dispatcher.text.detokenizer import ByteLevelTable, load_table
from services.dispatcher.text.token_names import TokenNames
from shared.types import FinishReason
from tests.support.text_models import byte_level_json, sentencepiece_json

LETTERS = st.text(alphabet="ab ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=4)
ALPHABET = ByteLevelTable([bytes([value]) for value in range(256)])
EOS = 300
WORDS = st.text(alphabet="ab🦊é", max_size=20)
FOX_STOPS = st.lists(st.text(alphabet="ab🦊", min_size=1, max_size=3), max_size=3)


def reference(text: str, stops: list[str], num_spared: int = 0) -> str:
    """Read letter by letter; at the first place where a stop string is complete, cut before the longest one there.

    One that is complete within the first `num_spared` letters does not count.
    """
    for end in range(num_spared + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(borders)]


@pytest.mark.slow
@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
@settings(max_examples=500, deadline=None)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, shown, hit = StopMatcher(stops), "", False
    for piece in pieces_of(text, cuts):
        part, hit = matcher.push(piece)
        shown += part
        if hit:
            break
    assert shown + matcher.flush() == reference(text, stops)
    assert hit == (reference(text, stops) != text or any(text.endswith(stop) for stop in stops))


@given(LETTERS, STOPS)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for index, letter in enumerate(text):
        part, hit = matcher.push(letter)
        shown += part
        if hit:
            return
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(st.text(alphabet="ab", max_size=20), STOPS, st.lists(st.integers(0, 30)))
@settings(max_examples=300, deadline=None)
def test_the_bill_ends_with_the_token_that_completes_the_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """One letter is one token here: the tokens billed are the letters up to the end of the stop string."""
    answer, shown = AnswerText(ALPHABET.start(), stops, ()), ""
    for piece in pieces_of(text, cuts):
        shown += answer.push([*piece.encode()], FinishReason.NONE)
    cut = reference(text, stops)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert answer.num_tokens == (ends[0] if ends else len(text))
    assert shown == cut if ends else cut.startswith(shown)


def test_the_token_that_ends_an_answer_has_no_text_unless_the_request_named_it() -> None:
    ids = [*b"ab"]
    assert AnswerText(ALPHABET.start(), (), ()).push(ids, FinishReason.STOP) == "a"
    assert AnswerText(ALPHABET.start(), (), (ids[1],)).push(ids, FinishReason.STOP) == "ab"
    assert AnswerText(ALPHABET.start(), (), ()).push(ids, FinishReason.LENGTH) == "ab"
    assert AnswerText(ALPHABET.start(), ("zz",), ()).push(ids, FinishReason.STOP) == "a"


def test_the_end_of_an_answer_is_billed_and_flushes_what_was_held_back() -> None:
    answer = AnswerText(ALPHABET.start(), ("abc",), ())
    assert answer.push([*b"xab"], FinishReason.NONE) == "x"
    assert answer.push([EOS], FinishReason.STOP) == "ab"
    assert answer.num_tokens == 4
    assert not answer.was_cut


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_a_character_that_max_tokens_cuts_in_half_is_shown_as_the_library_shows_it(stops: tuple[str, ...]) -> None:
    answer = AnswerText(ALPHABET.start(), stops, ())
    assert answer.push([*"🦊".encode()][:3], FinishReason.NONE) == ""
    assert answer.push([], FinishReason.LENGTH) == "\ufffd"


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", '"\\\n\x00', "🦊", "plain", "\x1c\x0b"])
def test_a_text_in_a_chunk_is_one_line_for_every_client_and_valid_json(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@given(WORDS, FOX_STOPS, st.lists(st.integers(1, 7)), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_tokens_of_each_part_spell_its_text(text: str, stops: list[str], sizes: list[int], ends: bool) -> None:
    """One byte is one token. What is shown is spelled by its tokens, but for a stop string that cuts the last one."""
    data, at = [*text.encode()], 0
    answer = AnswerText(ALPHABET.start(), stops, with_tokens=True)
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
    plain = AnswerText(ALPHABET.start(), stops)
    assert plain.push(data, FinishReason.NONE) + (plain.push([], FinishReason.LENGTH) if ends else "") == visible


@given(WORDS, FOX_STOPS, st.integers(0, 12), st.lists(st.integers(0, 60)))
@settings(max_examples=300, deadline=None)
def test_only_what_is_complete_after_the_first_tokens_ends_the_text(
    text: str, stops: list[str], min_tokens: int, cuts: list[int]
) -> None:
    """One byte is one token. Where the stop string begins makes no difference, nor in which batches the tokens come."""
    data = [*text.encode()]
    answer, found = AnswerText(ALPHABET.start(), stops, min_tokens=min_tokens), ""
    for start, end in pairwise(sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})):
        found += answer.push(data[start:end], FinishReason.NONE)
    if not answer.was_cut:
        found += answer.push([], FinishReason.LENGTH)
    assert found == reference(text, stops, len(bytes(data[:min_tokens]).decode(errors="ignore")))
    assert answer.num_tokens >= min(min_tokens, len(data))


def test_a_stop_string_that_begins_in_the_first_tokens_ends_the_text_at_the_first_token_after_them() -> None:
    answer = AnswerText(ALPHABET.start(), ("aab",), min_tokens=3)
    assert [answer.push([byte], FinishReason.NONE) for byte in b"aaab"] == ["", "", "a", ""]
    assert (answer.was_cut, answer.num_tokens) == (True, 4)


def test_half_a_character_at_the_end_ends_nothing_within_the_first_tokens() -> None:
    for min_tokens, text in ((2, "a\ufffd"), (1, "a")):
        answer = AnswerText(ALPHABET.start(), ("\ufffd",), min_tokens=min_tokens)
        assert answer.push([*b"a\xf0"], FinishReason.LENGTH) == text


def test_a_token_without_text_comes_with_what_follows_or_with_the_end() -> None:
    control = 300  # beyond the table: no text
    answer = AnswerText(ALPHABET.start(), with_tokens=True)
    assert answer.push([control], FinishReason.NONE) == ""
    assert answer.take_shown() == []
    assert answer.push([*b"a"], FinishReason.NONE) == "a"
    assert answer.take_shown() == [(0, 0), (1, 0)]
    assert answer.push([control], FinishReason.LENGTH) == ""
    assert answer.take_shown() == [(2, 1)]


def test_the_token_that_ends_the_answer_is_no_part_of_it() -> None:
    answer = AnswerText(ALPHABET.start(), with_tokens=True)
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
