"""Calls of tools, told apart from what a model says: a state machine over the text of an answer. Pure.

                        head of a call                  end of its arguments
    text ─► opening ─────────────────────► arguments ─────────────────────────► between ─► next head, or text
      ▲        │ anything else: it is text                                         │
      └────────┴───────────────────────────────────────────────────────────────────┘

A call is shown from the beginning of its arguments on: before, it is not clear that it is one. What cannot be read as a
call is text. What is shown after some text depends on that text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from services.dispatcher.text.tool_forms import (
    BLANKS,
    MAX_HEAD_CHARS,
    CallForm,
    HeadFound,
    HeadReading,
    read_head,
    skip_blanks,
)

_SIGNS: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What has become visible of one call."""

    index: int
    """Of the call in its answer."""
    arguments: str
    """The next characters, exactly as the model wrote them."""
    call_id: str = ""
    name: str = ""
    """Both only in the first piece of a call."""


class JsonEnd:
    """Finds where an object ends whose text comes piece by piece, by its brackets alone.

    Args:
        depth: brackets that are open before the text.
    """

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int | None:
        """Return how much of the piece belongs to it; None if it goes on behind the piece."""
        start = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        for match in _SIGNS.finditer(text, start):
            sign = match[0]
            if sign[0] == "\\":
                self._is_escaped = len(sign) == 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return match.end()
        return None


class _Stage(Enum):
    """Where in an answer its next character stands."""

    BEGIN = auto()
    """At its beginning, where a call needs no opening."""
    TEXT = auto()
    HEAD = auto()
    """At an opening, which is held."""
    ARGUMENTS = auto()
    REST = auto()
    """Behind the arguments, in the object of which they are a member."""
    BETWEEN = auto()
    """Behind a call."""


class ToolCallParser:
    """Tells calls and text of one answer apart, while it comes piece by piece.

    Text that is only blanks is none if the answer has a call.

    Args:
        form: of the model's calls.
        make_id: returns the id of a call by its index.
        is_parallel: there may be several calls; else the answer is over with the first.
    """

    __slots__ = (
        *("_blanks", "_end", "_first_chars", "_form", "_held", "_is_ending", "_is_fresh", "_is_in_object", "_make_id"),
        *("_num_calls", "_num_closed", "_openings", "_pieces", "_said", "_stage", "_steps", "is_over", "is_parallel"),
        "num_completed",
    )

    def __init__(self, form: CallForm, make_id: Callable[[int], str], *, is_parallel: bool = True) -> None:
        self._form = form
        self._make_id = make_id
        self.is_parallel = is_parallel
        """The answer may go on behind a call."""
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._first_chars = frozenset(opening[0] for opening in form.openings)
        self._stage = _Stage.BEGIN if form.is_bare else _Stage.TEXT
        self._steps: dict[_Stage, Callable[[], bool]] = {
            _Stage.BEGIN: self._begin,
            _Stage.TEXT: self._text,
            _Stage.HEAD: self._head,
            _Stage.ARGUMENTS: self._arguments,
            _Stage.REST: self._rest,
            _Stage.BETWEEN: self._between,
        }
        self._held = ""  # not decided yet
        self._is_ending = False  # nothing follows: all is decided
        self._said: list[str] = []
        self._blanks: list[str] = []  # at the beginning of a text, until it has anything else
        self._is_fresh = True  # nothing but blanks was said since the last call
        self._pieces: list[CallPiece] = []
        self._num_calls = 0
        self._end = JsonEnd()
        self._is_in_object = False
        self._num_closed = 0  # of the form's closings
        self.num_completed = 0
        """Calls whose arguments are whole."""
        self.is_over = False
        """The answer ends here: it has the only call that it may have."""

    def push(self, text: str) -> str:
        """Return what is said, as far as it is decided now; the calls are in `take`."""
        if self._is_plain(text):
            return text
        self._held += text
        while self._held and not self.is_over and self._steps[self._stage]():
            pass
        return self._take_said()

    def flush(self) -> str:
        """Return what was held back, as `push`; the text ends here, so that half a head is no call."""
        self._is_ending = True
        said = self.push("")
        if not self._num_calls and self._is_fresh:
            said += "".join(self._blanks)
        return said

    def take(self) -> list[CallPiece]:
        """Return what has become visible of calls since the last time: of each one piece, in order."""
        if not self._pieces:
            return []
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1:
            return pieces
        joined: dict[int, list[CallPiece]] = {}
        for piece in pieces:
            joined.setdefault(piece.index, []).append(piece)
        return [
            CallPiece(index, "".join(each.arguments for each in own), own[0].call_id, own[0].name)
            for index, own in joined.items()
        ]

    def _is_plain(self, text: str) -> bool:
        """Return whether nothing in a text can begin a call: most tokens of most answers."""
        is_saying = self._stage is _Stage.TEXT and not self._held and not self._is_fresh
        return is_saying and self._first_chars.isdisjoint(text)

    def _begin(self) -> bool:
        return self._try_head(0, _Stage.TEXT)

    def _text(self) -> bool:
        found = self._openings.search(self._held)
        if found is not None:
            self._say_held(found.start())
            self._stage = _Stage.HEAD
            return True
        self._say_held(len(self._held) - (0 if self._is_ending else self._num_undecided()))
        return False

    def _head(self) -> bool:
        opening = self._openings.match(self._held)
        assert opening is not None, "an opening is held"
        if self._try_head(opening.end(), _Stage.TEXT):
            if self._stage is _Stage.TEXT:
                self._say_held(opening.end())
            return True
        return False

    def _try_head(self, at: int, otherwise: _Stage) -> bool:
        """Begin the call whose head stands there, or go on with another stage; False: it is not decided."""
        found = read_head(self._held, at, self._form.heads)
        if isinstance(found, HeadFound):
            self._begin_call(found)
        elif found is HeadReading.UNDECIDED and not self._is_ending:
            return False
        else:
            self._stage = otherwise
        return True

    def _begin_call(self, found: HeadFound) -> None:
        self._blanks.clear()
        self._is_fresh = True
        self._pieces.append(CallPiece(self._num_calls, "", self._make_id(self._num_calls), found.name))
        self._num_calls += 1
        self._num_closed = 0
        self._is_in_object = found.is_in_object
        self._end = JsonEnd()
        self._held = self._held[found.end :]
        self._stage = _Stage.ARGUMENTS

    def _arguments(self) -> bool:
        end = self._end.push(self._held)
        self._pieces.append(CallPiece(self._num_calls - 1, self._held[:end]))
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self.num_completed += 1
        self.is_over = not self.is_parallel
        self._stage = _Stage.REST if self._is_in_object else _Stage.BETWEEN
        return True

    def _rest(self) -> bool:
        """Pass over what else an object has; where it goes on as none does, it is over."""
        text = self._held
        at = skip_blanks(text, 0)
        next_at = skip_blanks(text, at + 1)
        end: int | None = 0
        if at == len(text) or (text[at] == "," and next_at == len(text)):
            end = None
        elif text[at] == "}":
            end = at + 1
        elif text[at] == "," and text[next_at] == '"':
            end = JsonEnd(depth=1).push(text)
        if end is None and len(text) <= MAX_HEAD_CHARS and not self._is_ending:
            return False
        self._held = text[end if end is not None and end <= MAX_HEAD_CHARS else 0 :]
        self._stage = _Stage.BETWEEN
        return True

    def _between(self) -> bool:
        found = HeadReading.OTHER if self._num_closed else read_head(self._held, 0, self._form.following)
        if isinstance(found, HeadFound):
            self._begin_call(found)
            return True
        at = skip_blanks(self._held, 0)
        is_open = found is HeadReading.UNDECIDED or at == len(self._held)
        for number, closing in enumerate(self._form.closings):
            if number < self._num_closed:
                continue
            if self._held.startswith(closing, at) and at + len(closing) <= MAX_HEAD_CHARS:
                self._held = self._held[at + len(closing) :]
                self._num_closed = number + 1
                return True
            is_open = is_open or closing.startswith(self._held[at:])
        if is_open and len(self._held) <= MAX_HEAD_CHARS and not self._is_ending:
            return False
        self._stage = _Stage.TEXT
        return True

    def _num_undecided(self) -> int:
        """Return how many characters at the end of what is held may be the beginning of an opening."""
        longest = max(map(len, self._form.openings)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(opening.startswith(end) for opening in self._form.openings):
                return size
        return 0

    def _say_held(self, num_chars: int) -> None:
        self._say(self._held[:num_chars])
        self._held = self._held[num_chars:]

    def _say(self, text: str) -> None:
        if self._is_fresh:
            rest = text.lstrip(BLANKS)
            self._blanks.append(text[: len(text) - len(rest)])
            if not rest:
                return
            self._said += self._blanks
            self._blanks.clear()
            self._is_fresh = False
            text = rest
        self._said.append(text)

    def _take_said(self) -> str:
        text = "".join(self._said)
        self._said.clear()
        return text
