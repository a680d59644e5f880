"""The text of one answer while its tokens come: detokenised, cut at a stop string, split, counted.

tokens ─► detokeniser ─► stop strings ─► thinking ─► calls of tools ─► what is said
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Final

from services.dispatcher.session.stop_strings import StopMatcher
from services.dispatcher.text.detokenizer import Detokenizer
from services.dispatcher.text.thinking import ThinkSplitter, ThinkStage, ThinkTags
from services.dispatcher.text.tool_calls import CallPiece, ToolCallParser
from shared.types import FinishReason

MAX_LOGPROB_TOKENS: Final = 32
"""Tokens with log-probabilities in one event: with 20 alternatives each takes some 2 kB, and readers have limits."""

PART_CHARS: Final = 16 * 1024
"""Characters of a long text that are written as JSON at a time."""


class AnswerText:
    """Turns tokens into text that may be shown.

    Args:
        detokenizer: a fresh one.
        stops: stop strings.
        shown_stop_ids: stop ids that the request named; any other token that stops the answer (EOS) has no text.
        min_tokens: tokens at the beginning that no stop string ends; one that is complete later may begin in them.
        with_tokens: say which tokens are in the text (`take_shown`).
    """

    __slots__ = (
        *("_calls", "_detokenizer", "_is_one_by_one", "_ledger", "_min_tokens", "_shown_stop_ids", "_splitter"),
        *("_special_tags", "_stops", "_thoughts", "num_tokens", "was_cut"),
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        shown_stop_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        with_tokens: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._is_one_by_one = bool(stops) or with_tokens
        self._shown_stop_ids = frozenset(shown_stop_ids)
        self._min_tokens = min_tokens
        self._ledger = _TokenLedger() if with_tokens else None
        self._splitter: ThinkSplitter | None = None
        self._thoughts: list[str] = []
        self._calls: ToolCallParser | None = None
        self._special_tags: Mapping[int, str] = {}
        self.num_tokens = 0
        """Tokens of the answer so far, for the bill: up to the one that completed a stop string."""
        self.was_cut = False
        """A stop string has ended the text, or the only call that the answer may have."""

    def split_thinking(self, tags: ThinkTags, stage: ThinkStage) -> None:
        """Tell the model's thinking apart from now on; called before the first token.

        Args:
            tags: of the model.
            stage: where the answer begins (`ThinkTags.stage_after`).
        """
        self._splitter = ThinkSplitter(tags, stage)

    def tell_calls(self, parser: ToolCallParser, special_tags: Mapping[int, str]) -> None:
        """Tell calls of tools apart from now on; called before the first token.

        Args:
            parser: a fresh one.
            special_tags: tags of calls that are special tokens: their texts, by id.
        """
        self._calls = parser
        self._special_tags = special_tags
        self._is_one_by_one = self._is_one_by_one or not parser.is_parallel

    def push(self, token_ids: Sequence[int], finish: FinishReason) -> str:
        """Return the text that becomes visible; "" if it is not decided yet, or the text has been cut.

        What the model thinks is not in it (`take_thoughts`), nor are calls (`take_calls`); stop strings end them all.
        """
        visible = token_ids
        if finish is FinishReason.STOP and token_ids and token_ids[-1] not in self._shown_stop_ids:
            visible = token_ids[:-1]
        if not self._is_one_by_one and not self._has_tags(visible):
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(visible) if visible else ""
            text = text + self._detokenizer.flush() if finish else text
            if self._calls is None:
                return text
            return self._calls.push(text) + (self._calls.flush() if finish else "")
        return self._push_one_by_one(visible, len(token_ids) - len(visible), finish)

    def take_thoughts(self) -> str:
        """Return what has become visible of the thinking since the last call."""
        if not self._thoughts:
            return ""
        text = "".join(self._thoughts)
        self._thoughts.clear()
        return text

    def _has_tags(self, token_ids: Sequence[int]) -> bool:
        """Return whether some of the tokens count as such: those of the thinking, and tags that have no text."""
        is_thinking = self._splitter is not None and self._splitter.stage is not ThinkStage.SPEAKING
        return is_thinking or not self._special_tags.keys().isdisjoint(token_ids)

    def take_calls(self) -> list[CallPiece]:
        """Return what has become visible of calls since the last time, of each one piece."""
        return [] if self._calls is None else self._calls.take()

    @property
    def has_called(self) -> bool:
        """Whether one of its calls is whole."""
        return self._calls is not None and self._calls.num_completed > 0

    @property
    def tells_thinking(self) -> bool:
        """Whether the model's thinking is told apart."""
        return self._splitter is not None

    @property
    def num_thinking_tokens(self) -> int:
        """Tokens of the thinking so far, tags included; part of `num_tokens`."""
        return 0 if self._splitter is None else self._splitter.num_tokens

    def take_shown(self) -> list[tuple[int, int]]:
        """Return the tokens whose text has become visible since the last call: (index in the answer, offset).

        A token comes with the first text of which it is a part, one without text (half a character, a control token)
        with what follows, or when `MAX_LOGPROB_TOKENS` wait. The offset is where its text begins, in characters of the
        answer.
        """
        return self._ledger.take() if self._ledger is not None else []

    @property
    def num_waiting(self) -> int:
        """Tokens not yet due for `take_shown`: fewer than `MAX_LOGPROB_TOKENS`, or a stop string may have begun."""
        return self._ledger.num_waiting if self._ledger is not None else 0

    def _push_one_by_one(self, token_ids: Sequence[int], num_hidden: int, finish: FinishReason) -> str:
        """One by one: the bill ends with the token that completes a stop string, the thinking with its tag.

        So it does with the end of the only call.
        """
        texts: list[str] = []
        num_shown = 0
        for token_id in token_ids:
            if self.was_cut:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,)) + self._special_tags.get(token_id, "")
            if self._ledger is not None:
                self._ledger.add(len(text))
            if self._splitter is not None:
                self._splitter.note(token_id, len(text))
            text, self.was_cut = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
            num_shown += len(text)
            texts.append(self._split(text))
            self.was_cut = self.was_cut or (self._calls is not None and self._calls.is_over)
        if finish and not self.was_cut:
            self.num_tokens += num_hidden
            flushed = self._detokenizer.flush()
            text, self.was_cut = self._stops.push(flushed, may_end=self.num_tokens > self._min_tokens)
            text = text if self.was_cut else text + self._stops.flush()
            num_shown += len(text)
            texts.append(self._split(text))
        if finish or self.was_cut:
            texts.append(self._flush_parts())
        if self._ledger is not None:
            self._ledger.show(num_shown, is_end=bool(finish) and not self.was_cut)
        return "".join(texts)

    def _split(self, text: str) -> str:
        """Return what is said of the text; what is thought, and calls, are kept."""
        if self._splitter is not None:
            thought, text = self._splitter.push(text)
            if thought:
                self._thoughts.append(thought)
        return text if self._calls is None else self._calls.push(text)

    def _flush_parts(self) -> str:
        """Return what is said of the text that was held back."""
        text = ""
        if self._splitter is not None:
            thought, text = self._splitter.flush()
            self._thoughts.append(thought)
        return text if self._calls is None else self._calls.push(text) + self._calls.flush()


class _TokenLedger:
    """Which tokens make up the text that has been shown."""

    __slots__ = ("_num_chars", "_num_shown", "_num_tokens", "_shown", "_waiting")

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_chars = 0  # of all tokens so far, shown or held back
        self._num_shown = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._shown: list[tuple[int, int]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, num_chars: int) -> None:
        """Take the next token, which completes so many characters."""
        self._waiting.append((self._num_tokens, self._num_chars))
        self._num_tokens += 1
        self._num_chars += num_chars

    def show(self, num_chars: int, *, is_end: bool) -> None:
        """So many characters more are visible; at the end nothing follows that a token could wait for."""
        self._num_shown += num_chars
        waiting = self._waiting
        while waiting and (is_end or waiting[0][1] < self._num_shown or self._is_too_long()):
            self._shown.append(waiting.popleft())

    def _is_too_long(self) -> bool:
        """The queue is, and its head waits only because it has no text of its own: none that may yet be cut."""
        waiting = self._waiting
        return len(waiting) >= MAX_LOGPROB_TOKENS and waiting[0][1] == waiting[1][1] == self._num_shown

    def take(self) -> list[tuple[int, int]]:
        shown, self._shown = self._shown, []
        return shown


def json_text(text: str) -> bytes:
    """Return the text as a JSON string in UTF-8; characters that some clients take for ends of lines are escaped."""
    return escape_line_ends(encode_basestring(text)).encode()


def json_text_parts(text: str) -> Iterator[bytes]:
    """Return `json_text`, of `PART_CHARS` at a time: a text may be as long as a context."""
    yield b'"'
    for start in range(0, len(text), PART_CHARS):
        yield json_text(text[start : start + PART_CHARS])[1:-1]
    yield b'"'


def escape_line_ends(encoded: str) -> str:
    """Return JSON with the characters escaped that some clients take for ends of lines."""
    if encoded.isascii():
        return encoded
    return encoded.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
