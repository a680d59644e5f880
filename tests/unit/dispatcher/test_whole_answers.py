"""Answers that are sent whole: pieces of one size, and log-probabilities kept as numbers until they are sent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.answers.answer_text import PART_CHARS, json_text, json_text_parts
from services.dispatcher.answers.logprobs import KeptLogprobs
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.http.sse import PIECE_BYTES, in_pieces
from shared.stream_extras import TokenLogprob

singles = st.floats(max_value=0.0, width=32, allow_nan=False)
ids = st.integers(0, 2**32 - 1)
tokens = st.tuples(
    ids,
    st.integers(0, 2**40),
    st.none() | st.builds(TokenLogprob, singles, st.lists(st.tuples(ids, singles), max_size=20).map(tuple)),
)


@given(st.lists(tokens, max_size=30), st.integers(0, 30))
def test_kept_numbers_come_back_as_they_were_and_take_eight_bytes_for_an_alternative(
    given_tokens: list[tuple[int, int, TokenLogprob | None]], cut: int
) -> None:
    session = SimpleNamespace(
        tokens=[token_id for token_id, _, _ in given_tokens],
        take_logprob=lambda index: given_tokens[index][2],
    )
    choice = cast("Choice", SimpleNamespace(opened=session))
    shown = [(index, offset) for index, (_, offset, _) in enumerate(given_tokens)]
    kept = KeptLogprobs()
    kept.add(choice, shown[:cut])
    kept.add(choice, shown[cut:])
    assert list(kept) == given_tokens
    num_alternatives = sum(len(known.top) for _, _, known in given_tokens if known is not None)
    assert len(kept._packed) == 20 * len(given_tokens) + 8 * num_alternatives


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=6), st.integers(0, 255))
def test_pieces_are_of_one_size_and_say_what_the_parts_say(sizes: list[int], first: int) -> None:
    parts = [bytes([(first + index) % 256]) * size for index, size in enumerate(sizes)]
    pieces = list(in_pieces(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert [len(piece) for piece in pieces[:-1]] == [PIECE_BYTES] * max(len(pieces) - 1, 0)
    assert all(pieces)


def test_no_piece_is_made_before_the_one_before_it_was_taken() -> None:
    made: list[int] = []

    def parts() -> Any:
        for number in range(100):
            made.append(number)
            yield bytes(PIECE_BYTES // 4)

    pieces = in_pieces(parts())
    for number in range(1, 5):
        next(pieces)
        assert len(made) == 4 * number


@given(st.text(alphabet='ab"\\\n\u2028\x85🦊é', max_size=50), st.integers(0, 3))
def test_a_long_text_is_written_as_a_short_one_is(text: str, times: int) -> None:
    long = text + "x" * (PART_CHARS * times - 3) + text
    assert b"".join(json_text_parts(long)) == json_text(long)
    assert json.loads(json_text(long)) == long
