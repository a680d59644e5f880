"""Cuts streamed text into the units that the pacer shows one by one, and tells text to pace from text to pass on.

A unit is a word with the blanks after it, or one Chinese or Japanese character with the punctuation and marks after it.
Joined, the fragments are the text that came in, whatever the borders of the pieces. The rules are plain ranges of code
points (no regular expressions, no Unicode tables of the runtime), so that `client/js/segment.js` cuts alike. They are a
part of UAX 29: Korean and every script with blanks go by words; Thai, Lao, Khmer and Myanmar, written without blanks,
go by runs of at most `MAX_UNIT_CODE_POINTS`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MAX_UNIT_CODE_POINTS = 24
"""A longer run without a blank (a URL, Thai) is cut here, in code points, so that it does not appear as one block."""

_BLANKS = frozenset(
    "\t\n\v\f\r \u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
_ZERO_WIDTH_JOINER = 0x200D

_CJK_RANGES = (
    (0x2E80, 0x2FDF),  # radicals
    (0x3005, 0x3007),  # iteration mark, closing mark, zero
    (0x3021, 0x3029),  # Hangzhou numerals
    (0x3031, 0x303C),
    (0x3041, 0x3096),  # hiragana
    (0x309D, 0x309F),
    (0x30A1, 0x30FA),  # katakana
    (0x30FD, 0x30FF),
    (0x3100, 0x312F),  # bopomofo
    (0x31A0, 0x31BF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # ideographs, extension A
    (0x4E00, 0x9FFF),  # ideographs
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0xFF66, 0xFF6F),  # halfwidth katakana
    (0xFF71, 0xFF9D),
    (0x20000, 0x3FFFF),  # extensions B and later
)

_ATTACHED_RANGES = (  # never begin a unit
    (0x0300, 0x036F),  # combining marks
    (0x1AB0, 0x1AFF),
    (0x1DC0, 0x1DFF),
    (_ZERO_WIDTH_JOINER, _ZERO_WIDTH_JOINER),
    (0x20D0, 0x20FF),
    (0x3001, 0x3002),  # ideographic comma, full stop
    (0x3009, 0x3009),  # closing brackets
    (0x300B, 0x300B),
    (0x300D, 0x300D),
    (0x300F, 0x300F),
    (0x3011, 0x3011),
    (0x3099, 0x309C),  # voicing marks
    (0x30FC, 0x30FC),  # long vowel
    (0xFE00, 0xFE0F),  # variation selectors
    (0xFE20, 0xFE2F),
    (0xFF01, 0xFF01),  # fullwidth closing punctuation
    (0xFF09, 0xFF09),
    (0xFF0C, 0xFF0C),
    (0xFF0E, 0xFF0E),
    (0xFF1A, 0xFF1B),
    (0xFF1F, 0xFF1F),
    (0xFF61, 0xFF61),
    (0xFF63, 0xFF64),
    (0xFF70, 0xFF70),
    (0xFF9E, 0xFF9F),
    (0x1F3FB, 0x1F3FF),  # skin tones
    (0xE0100, 0xE01EF),  # variation selectors
)


class _Kind(Enum):
    BLANK = "blank"
    CJK = "cjk"
    ATTACHED = "attached"
    OTHER = "other"


class Fragment(NamedTuple):
    """A stretch of text within one piece."""

    text: str
    """Never empty."""
    starts_unit: bool
    """False: it continues the unit before it, perhaps one already shown."""
    paced: bool
    """False: code or JSON, which is shown as soon as what stands before it is shown."""


class Segmenter:
    """Cuts one answer, piece by piece; remembers how the last piece ended."""

    def __init__(self) -> None:
        self._markup = _Markup()
        self._unit_size = 0  # code points of the open unit; 0: the next character begins one
        self._unit_is_cjk = False
        self._unit_is_blank = True  # nothing but blanks so far: the word after them belongs to it
        self._previous_is_blank = False
        self._previous_is_joiner = False
        self._previous_paced = True

    def feed(self, text: str) -> list[Fragment]:
        """Cut the next piece. The fragments joined are `text`."""
        fragments: list[Fragment] = []
        start, starts_unit = 0, False
        for position, char in enumerate(text):
            paced = self._markup.feed(char)
            begins = self._begins_unit(char, paced=paced)
            if begins or paced != self._previous_paced:
                if position > start:
                    fragments.append(Fragment(text[start:position], starts_unit, self._previous_paced))
                start, starts_unit = position, begins
            self._previous_paced = paced
        if start < len(text):
            fragments.append(Fragment(text[start:], starts_unit, self._previous_paced))
        return fragments

    def _begins_unit(self, char: str, *, paced: bool) -> bool:
        kind = _kind_of(char)
        begins = self._unit_size == 0 or (
            kind not in (_Kind.BLANK, _Kind.ATTACHED)
            and not self._previous_is_joiner
            and not self._unit_is_blank
            and (
                kind is _Kind.CJK
                or self._unit_is_cjk
                or self._previous_is_blank
                or self._unit_size >= MAX_UNIT_CODE_POINTS
            )
        )
        if paced != self._previous_paced:
            begins = True
        elif not paced:
            begins = False
        self._unit_size = 1 if begins else self._unit_size + 1
        self._unit_is_cjk = kind is _Kind.CJK or (self._unit_is_cjk and not begins)
        self._unit_is_blank = kind is _Kind.BLANK and (self._unit_is_blank or begins)
        self._previous_is_blank = kind is _Kind.BLANK
        self._previous_is_joiner = ord(char) == _ZERO_WIDTH_JOINER
        return begins


class _Markup:
    """Follows code fences and an answer that is JSON as a whole.

    Fences as in CommonMark, three or more ` or ~ at a line's start; deviation: any indent is allowed, because answers
    indent fences under list items.
    """

    def __init__(self) -> None:
        self._json: bool | None = None  # None: not decided yet
        self._opened_by_bracket = False
        self._in_fence = False
        self._fence_char = ""
        self._fence_size = 0
        self._start_line()

    def feed(self, char: str) -> bool:
        """Take the next character; True if it is to be paced."""
        if self._json is None:
            self._json = self._decide_json(char)
        is_prose = not self._json and not self._opened_by_bracket
        if char != "\n":
            self._scan(char)
        paced = is_prose and not self._in_fence and not self._opens_fence
        if char == "\n":
            self._end_line()
        return paced

    def _decide_json(self, char: str) -> bool | None:
        """An answer that begins with { or [{ or [[ or [" is JSON; blanks before and between do not matter."""
        if char in _BLANKS:
            return None
        if self._opened_by_bracket:
            self._opened_by_bracket = False
            return char in '{["'
        if char == "[":
            self._opened_by_bracket = True
            return None
        return char == "{"

    def _start_line(self) -> None:
        self._run_char = ""  # the fence character that the line begins with, after blanks
        self._run_size = 0
        self._in_rest = False  # past that run, or the line begins otherwise
        self._rest_is_blank = True
        self._fence_broken = False

    @property
    def _opens_fence(self) -> bool:
        return not self._in_fence and self._run_size >= 3 and not self._fence_broken

    def _scan(self, char: str) -> None:
        """Skip the line's indent, count its leading run of fence characters, then look at the rest."""
        if not self._in_rest:
            if self._run_size == 0 and char in " \t":
                return
            if char in "`~" and self._run_char in ("", char):
                self._run_char = char
                self._run_size += 1
                return
            self._in_rest = True
        self._rest_is_blank = self._rest_is_blank and char in " \t\r"
        # a backtick after a run of them means that this is code within a line of prose
        self._fence_broken = self._fence_broken or (self._run_char == "`" and char == "`")

    def _end_line(self) -> None:
        closes = self._run_char == self._fence_char and self._run_size >= self._fence_size and self._rest_is_blank
        if self._opens_fence:
            self._in_fence, self._fence_char, self._fence_size = True, self._run_char, self._run_size
        elif self._in_fence and closes:
            self._in_fence = False
        self._start_line()


def _kind_of(char: str) -> _Kind:
    if char in _BLANKS:
        return _Kind.BLANK
    point = ord(char)
    if point < 0x300:
        return _Kind.OTHER
    if _is_in(point, _CJK_RANGES):
        return _Kind.CJK
    return _Kind.ATTACHED if _is_in(point, _ATTACHED_RANGES) else _Kind.OTHER


def _is_in(point: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= point <= high for low, high in ranges)
