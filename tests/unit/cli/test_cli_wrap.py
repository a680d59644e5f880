"""Lines break between words as text comes: what a terminal shows then is what `textwrap` would have made of it."""

from __future__ import annotations

import re
import textwrap

from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from cli.wrap import WordWrap

WORDS = st.text("abcdeé", min_size=1, max_size=14)


class Screen:
    """What a terminal of so many columns shows; it must never be filled to its last column."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[DK]|.|\n", text, re.DOTALL):
            if part == "\n":
                self.lines.append("")
            elif part.endswith("D") and part.startswith("\x1b"):
                self.lines[-1] = self.lines[-1][: -int(part[2:-1])]
            elif not part.startswith("\x1b"):
                self.lines[-1] += part
        assert max(map(wcswidth, self.lines)) < self.width


def shown(text: str, width: int, size: int) -> list[str]:
    """Return the lines of a screen after a text that came in pieces of this size."""
    screen, wrap = Screen(width), WordWrap(lambda: width)
    for start in range(0, len(text), size):
        screen.write(wrap.feed(text[start : start + size]))
    return screen.lines


@given(st.lists(WORDS, max_size=30), st.integers(5, 30), st.integers(1, 9))
def test_words_stay_whole_unless_they_are_longer_than_a_line(words: list[str], width: int, size: int) -> None:
    text = " ".join(words)
    expected = textwrap.wrap(text, width - 1, break_long_words=True) or [""]
    if all(len(word) < width for word in words):
        assert [line.rstrip() for line in shown(text, width, size)] == expected
    assert "".join(shown(text, width, size)).replace(" ", "") == "".join(words)


@given(st.text("ab 你好🦊\n\t", max_size=80), st.integers(4, 20), st.integers(1, 5))
def test_nothing_but_blanks_is_lost_and_no_line_is_too_long(text: str, width: int, size: int) -> None:
    lines = shown(text, width, size)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    assert len(lines) >= text.count("\n") + 1


def test_code_stays_as_it_is() -> None:
    code = "```\n" + "x = 1 + 2 " * 9 + "\n```\n"
    assert WordWrap(lambda: 20).feed(code) == code
    assert WordWrap(lambda: 20).feed(f"{code}one two three four five") == f"{code}one two three four \nfive"


def test_characters_that_stand_alone_may_end_a_line_and_a_column_may_come_before() -> None:
    assert shown("你好世界你好", 8, 1) == ["你好世", "界你好"]
    assert WordWrap(lambda: 11, 6).feed("abc de") == "abc \nde"
    assert WordWrap(lambda: 11, 6).feed("ab defg") == "ab d\x1b[1D\x1b[K\ndefg"


def test_a_terminal_that_gets_narrower_breaks_earlier_from_then_on() -> None:
    widths = iter([20] * 10 + [8] * 90)
    screen, wrap = [], WordWrap(lambda: next(widths))
    screen.append(wrap.feed("one two three four"))
    assert "".join(screen).endswith("\nfour")
