"""Stop strings: where a text ends, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.answers.answer_text import AnswerText, json_text
from services.dispatcher.session.stop_strings import StopMatcher
from services.dispatcher.text.detokenizer import ByteLevelTable
from shared.types import FinishReason

LETTERS = st.text(alphabet="ab ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=4)
ALPHABET = ByteLevelTable([bytes([value]) for value in range(256)])
EOS = 300


def reference(text: str, stops: list[str]) -> str:
    """Read letter by letter; at the first place where a stop string is complete, cut before the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(borders)]


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
