"""How text is cut into words, and which text is not paced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_client.segment import MAX_UNIT_CODE_POINTS, Fragment, Segmenter

ALPHABET = st.sampled_from(list('ab  \n\t`~{["1中文。か\u3099ーé\u0301👩\u200d👍🏽강ไ\u3000-'))
PIECES = st.lists(st.text(ALPHABET, max_size=8), max_size=30)


def cut(*pieces: str) -> list[Fragment]:
    segmenter = Segmenter()
    return [fragment for piece in pieces for fragment in segmenter.feed(piece)]


def units(*pieces: str) -> list[str]:
    """Text of each unit, its fragments joined."""
    joined: list[str] = []
    for fragment in cut(*pieces):
        if fragment.starts_unit:
            joined.append(fragment.text)
        else:
            joined[-1] += fragment.text
    return joined


def paced_text(*pieces: str) -> str:
    return "".join(fragment.text for fragment in cut(*pieces) if fragment.paced)


@given(PIECES)
def test_joined_fragments_are_the_text(pieces: list[str]) -> None:
    segmenter = Segmenter()
    for piece in pieces:
        fragments = segmenter.feed(piece)
        assert "".join(f.text for f in fragments) == piece
        assert all(f.text for f in fragments)


@given(PIECES)
def test_where_pieces_are_cut_does_not_change_the_units(pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert units(*pieces) == units(whole) == units(*whole)


@given(st.text(st.sampled_from("ab/.:-é강ไ "), max_size=200))
def test_no_word_is_longer_than_the_limit(text: str) -> None:
    assert all(len(unit.strip(" ")) <= MAX_UNIT_CODE_POINTS for unit in units(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two  three", ["one ", "two  ", "three"]),
        ("  leading\n\nlines ", ["  leading\n\n", "lines "]),
        ("中文，字。", ["中", "文，", "字。"]),
        ("中a b", ["中", "a ", "b"]),
        ("か\u3099ら", ["か\u3099", "ら"]),
        ("サーバー", ["サー", "バー"]),
        ("강은 산이", ["강은 ", "산이"]),
        ("👩\u200d👩\u200d👧 ok", ["👩\u200d👩\u200d👧 ", "ok"]),
        ("e\u0301 👍🏽", ["e\u0301 ", "👍🏽"]),
        ("x" * 50, ["x" * 24, "x" * 24, "xx"]),
        ("a\u3000b\u00a0c", ["a\u3000", "b\u00a0", "c"]),
    ],
)
def test_units_are_words_or_single_characters(text: str, expected: list[str]) -> None:
    assert units(text) == expected
    assert units(*text) == expected


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("Say:\n```py\nx = 1\n```\nDone.", "Say:\n``Done."),
        ("Say:\n  - item\n      ~~~\n      x\n      ~~~\nDone.", "Say:\n  - item\n      ~~Done."),
        ("````\n```\nstill\n````\nDone.", "``Done."),
        ("```\n``` not closed by this\n```\nDone.", "``Done."),
        ("~~~\n```\n~~~\nDone.", "~~Done."),
        ("A `word` and ```three``` in a line", "A `word` and ```three``` in a line"),
        ("```open\nto the end", "``"),
        (' {"a": 1}', " "),
        ("[ \n{}]", ""),
        ('["a"]', ""),
        ("[[1], 2]", ""),
        ("[text](link) goes on", "text](link) goes on"),
        ("Use {braces} and [this] within prose", "Use {braces} and [this] within prose"),
    ],
)
def test_code_and_json_are_not_paced(text: str, prose: str) -> None:
    """Backticks before the third cannot be known as a fence when they arrive, and are prose."""
    assert paced_text(text) == prose
    assert paced_text(*text) == prose


def test_inline_backticks_at_a_lines_start_end_the_doubt_within_the_line() -> None:
    """Three backticks at a line's start look like a fence until a fourth follows in the line."""
    assert paced_text("```x``` is inline\nprose again").endswith("` is inline\nprose again")
