"""Breaks lines between words as text comes, piece by piece, so that no word is cut at the terminal's edge.

    … the quick bro│     the word has begun when it turns out not to fit:
    … the quick    │     what is there of it is taken back
    brown          │     and goes on in the next line

Lines between ``` fences are code and stay as they are, and so do words longer than a line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from wcwidth import wcwidth

FENCE: Final = "```"
TAB: Final = 8


class WordWrap:
    """One text on its way to a terminal.

    Args:
        width: returns the columns of the terminal; asked for every character, since a person may resize it.
        column: where the text begins.
    """

    def __init__(self, width: Callable[[], int], column: int = 0) -> None:
        self._width = width
        self._column = column
        self._word = ""
        """What the last blank is followed by, and its columns."""
        self._word_columns = 0
        self._line_start = ""
        self._is_code = False

    def feed(self, text: str) -> str:
        """Return what to write for the next piece."""
        return "".join(map(self._write, text))

    def _write(self, char: str) -> str:
        if char == "\n":
            self._column, self._line_start = 0, ""
            self._end_word()
            return char
        if len(self._line_start) < len(FENCE):
            self._line_start = (self._line_start + char).lstrip()
            self._is_code ^= self._line_start == FENCE
        # the last column stays empty: a terminal that has filled it is between two lines
        limit = self._width() - 1
        if char in " \t":
            return self._write_blank(char, limit)
        columns = max(wcwidth(char), 0)
        before = self._make_place(columns, limit)
        self._column += columns
        if columns > 1:  # one may break the line after each of these
            self._end_word()
        else:
            self._word += char
            self._word_columns += columns
        return before + char

    def _write_blank(self, char: str, limit: int) -> str:
        columns = TAB - self._column % TAB if char == "\t" else 1
        self._end_word()
        if self._column + columns > limit and not self._is_code:
            self._column = 0
            return "\n"
        self._column += columns
        return char

    def _make_place(self, columns: int, limit: int) -> str:
        """Return what ends a line that the next character does not fit in; empty if it fits."""
        if self._is_code or self._column + columns <= limit:
            return ""
        if self._word_columns == self._column or columns > 1:  # nothing but this word, or a place to break
            self._end_word()
            self._column = 0
            return "\n"
        self._column = self._word_columns
        back = f"\x1b[{self._word_columns}D\x1b[K" if self._word else ""
        return f"{back}\n{self._word}"

    def _end_word(self) -> None:
        self._word, self._word_columns = "", 0
