"""What a model thinks, told apart from what it says: `<think>` … `</think>` at the beginning of an answer.

An answer may begin with an opening tag, or inside the thinking: then the chat template has opened it in the prompt.
Only the first thought is one; later tags are text. The tags, and the empty lines around them, belong to neither part.
What the parts hold after some text depends on that text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import ChatTemplate, TemplateRefusalError
from services.dispatcher.text.template_forms import TALKS
from shared.process.config import ReasoningParser
from shared.types import Thinking

OPENING: Final = "<think>"
CLOSING: Final = "</think>"
SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates switch the model's thinking: true or false."""
_LINE_ENDS: Final = "\r\n"
_BLANKS: Final = " \t\r\n"
_MAX_BLANK_TOKENS: Final = 16
"""Behind a tag that ends a prompt."""


class ThinkStage(Enum):
    """Where in an answer its next character stands."""

    UNDECIDED = auto()
    """At the beginning: with an opening tag it thinks, else it speaks."""
    OPENED = auto()
    """At the beginning, and it thinks, for its prompt has opened the tag; it may repeat it."""
    BEGUN = auto()
    """Behind the opening tag, if not for ends of lines."""
    THINKING = auto()
    CLOSED = auto()
    """Behind the closing tag, if not for ends of lines."""
    SPEAKING = auto()


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How a model marks its thinking."""

    opening_id: int | None
    """Token that is the opening tag; None: the tags are found in the text, across tokens."""
    closing_id: int | None
    """None together with the other one."""
    at_start: ThinkStage
    """Where an answer begins if its prompt does not end with a tag."""
    bytes_of: Callable[[int], bytes]
    """Text of a token; special ones have their names."""
    opened_by_switch: bool = False
    """The chat template opens the thinking where a request switches it on."""

    def stage_after(self, prompt_ids: Sequence[int]) -> ThinkStage:
        """Return where the answer to a prompt begins: its template may have opened the thinking, or closed it."""
        tail = list(prompt_ids[-_MAX_BLANK_TOKENS:])
        while tail and not self.bytes_of(tail[-1]).strip():
            tail.pop()
        end = "".join(self.bytes_of(token_id).decode("utf-8", "replace") for token_id in tail).rstrip()
        if self.closing_id is not None and tail and tail[-1] not in {self.opening_id, self.closing_id}:
            return self.at_start  # a user may have written it
        if end.endswith(OPENING):
            return ThinkStage.OPENED
        return ThinkStage.SPEAKING if end.endswith(CLOSING) else self.at_start

    def stage_within(self, text: str, prompt_ids: Sequence[int]) -> ThinkStage:
        """Return where an answer goes on that a prompt has begun with a text.

        Args:
            text: of the message that is continued; if there is nothing in it the prompt's end counts.
            prompt_ids: the whole prompt.
        """
        if not text.strip(_BLANKS):
            return self.stage_after(prompt_ids)
        by_text = ThinkTags(None, None, ThinkStage.UNDECIDED, self.bytes_of)
        begun = ThinkSplitter(by_text, by_text.at_start)
        begun.push(text)
        return ThinkStage.SPEAKING if begun.stage is ThinkStage.UNDECIDED else begun.stage

    def stage_of_form(self, stage: ThinkStage) -> ThinkStage:
        """Return where an answer begins that is held to a form, and without it at a stage.

        Where the template would open the thinking if it were switched on, there is none: among the few tokens that a
        mask leaves, the opening tag would be drawn, which such a model does not write by itself.
        """
        return ThinkStage.SPEAKING if self.opened_by_switch and stage is ThinkStage.UNDECIDED else stage

    def thinking(self, stage: ThinkStage, budget: int | None) -> Thinking | None:
        """Return what a worker is told of an answer that begins at a stage; None: it has nothing to look for."""
        is_over = stage in (ThinkStage.CLOSED, ThinkStage.SPEAKING)
        if self.opening_id is None or self.closing_id is None or is_over:
            return None
        is_open = stage is not ThinkStage.UNDECIDED
        return Thinking(opening_id=self.opening_id, closing_id=self.closing_id, is_open=is_open, budget=budget)


def find_think_tags(parser: ReasoningParser, codec: PromptCodec) -> ThinkTags | None:
    """Return how the model marks its thinking; None if it is not told apart."""
    if parser == "auto":
        source = "" if codec.template is None else codec.template.source
        parser = "qwen3" if CLOSING in source else "none"
    if parser == "none":
        return None
    added = {token.content: token_id for token_id, token in codec.tokenizer.get_added_tokens_decoder().items()}
    has_tokens = OPENING in added and CLOSING in added
    return ThinkTags(
        opening_id=added[OPENING] if has_tokens else None,
        closing_id=added[CLOSING] if has_tokens else None,
        at_start=ThinkStage.OPENED if parser == "deepseek_r1" else ThinkStage.UNDECIDED,
        bytes_of=codec.names.bytes_of,
        opened_by_switch=codec.template is not None and _is_opened_by_switch(codec.template),
    )


def _is_opened_by_switch(template: ChatTemplate) -> bool:
    for roles in TALKS:
        with suppress(TemplateRefusalError):
            talk = template.in_form([{"role": role, "content": "a"} for role in roles], add_generation_prompt=True)
            return template.render(talk, kwargs=dict.fromkeys(SWITCHES, True)).rstrip().endswith(OPENING)
    return False


class ThinkSplitter:
    """Tells the two parts of one answer apart, while its text comes piece by piece. Pure.

    Args:
        tags: of the model.
        stage: where the answer begins.
    """

    __slots__ = ("_at", "_blanks", "_held", "_marks", "_num_chars", "_tags", "num_tokens", "stage")

    def __init__(self, tags: ThinkTags, stage: ThinkStage) -> None:
        self._tags = tags
        self.stage = stage
        """Of what comes next."""
        self.num_tokens = 0
        """Of the thinking so far, tags included."""
        self._blanks: list[str] = []  # before what is held, in pieces: a model may write any number of them
        self._held = ""  # not decided yet
        self._at = 0  # where in the text it begins
        self._num_chars = 0  # of all tokens so far, also of those whose text did not come yet
        self._marks: deque[tuple[str, int, int]] = deque()  # tags that are tokens: which, begin, end

    def note(self, token_id: int, num_chars: int) -> None:
        """Take the next token, which completes so many characters; `push` may get them later."""
        if self.stage in (ThinkStage.CLOSED, ThinkStage.SPEAKING):
            return
        self.num_tokens += 1
        self._num_chars += num_chars
        if token_id in (self._tags.opening_id, self._tags.closing_id):
            tag = OPENING if token_id == self._tags.opening_id else CLOSING
            # a special token has no text
            self._marks.append((tag, self._num_chars - min(len(tag), num_chars), self._num_chars))

    def push(self, text: str) -> tuple[str, str]:
        """Return what is decided now: of the thinking, and of what is said.

        Args:
            text: the next piece.
        """
        self._held += text
        thought = said = ""
        if self.stage in (ThinkStage.UNDECIDED, ThinkStage.OPENED):
            self._begin()
        if self.stage in (ThinkStage.BEGUN, ThinkStage.THINKING):
            thought = self._think()
        if self.stage is ThinkStage.CLOSED:
            self._held = self._held.lstrip(_LINE_ENDS)
            self.stage = ThinkStage.SPEAKING if self._held else ThinkStage.CLOSED
        if self.stage is ThinkStage.SPEAKING:
            said, self._held = self._held, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """Return what was held back, as `push`; the text ends here."""
        text = self._take_blanks() + self._held
        self._held = ""
        if self.stage is ThinkStage.UNDECIDED:
            self._speak()
            return "", text
        text = text.rstrip(_LINE_ENDS)
        return (text if self.stage is ThinkStage.THINKING else text.lstrip(_LINE_ENDS)), ""

    def _begin(self) -> None:
        """Leave the beginning once it is clear what it is."""
        num_blank = len(self._held) - len(self._held.lstrip(_BLANKS))
        place = self._find(OPENING)
        if place is not None and place[0] <= num_blank:
            self._blanks.clear()
            self._drop(place[1], OPENING)
            self.stage = ThinkStage.BEGUN
        elif self._may_open(num_blank):
            self._blanks.append(self._held[:num_blank])
            self._drop(num_blank)
        else:
            blanks = self._take_blanks()
            self._held = blanks + self._held
            self._at -= len(blanks)
            if self.stage is ThinkStage.UNDECIDED:
                self._speak()
            else:
                self.stage = ThinkStage.BEGUN

    def _may_open(self, num_blank: int) -> bool:
        """Return whether an opening tag may come, or be complete later."""
        if self._tags.opening_id is None:
            return OPENING.startswith(self._held[num_blank:])
        is_blank = num_blank == len(self._held) - self._num_undecided(OPENING)
        return is_blank and self._find(CLOSING) is None

    def _speak(self) -> None:
        """There is no thinking."""
        self.stage = ThinkStage.SPEAKING
        self.num_tokens = 0

    def _think(self) -> str:
        place = self._find(CLOSING)
        end = len(self._held) - self._num_undecided(CLOSING) if place is None else place[0]
        piece = self._held[:end] if self.stage is ThinkStage.THINKING else self._held[:end].lstrip(_LINE_ENDS)
        text = piece.rstrip(_LINE_ENDS)
        blanks = piece[len(text) :]
        if text:
            self.stage = ThinkStage.THINKING
            text = self._take_blanks() + text
        if place is not None:
            self._blanks.clear()
            self._drop(place[1], CLOSING)
            self.stage = ThinkStage.CLOSED
        else:
            self._drop(end)
            if blanks:
                self._blanks.append(blanks)
        return text

    def _take_blanks(self) -> str:
        text = "".join(self._blanks)
        self._blanks.clear()
        return text

    def _find(self, tag: str) -> tuple[int, int] | None:
        """Return where the tag begins and ends in what is held; None if it is not there as a whole."""
        if self._tags.opening_id is None:
            at = self._held.find(tag)
            return None if at < 0 else (at, at + len(tag))
        for name, begin, end in self._marks:
            if name == tag and end <= self._at + len(self._held):
                return begin - self._at, end - self._at
        return None

    def _num_undecided(self, tag: str) -> int:
        """Return how many characters at the end of what is held may be the beginning of the tag."""
        if self._tags.opening_id is None:
            sizes = range(min(len(tag) - 1, len(self._held)), 0, -1)
            return next((size for size in sizes if tag.startswith(self._held[-size:])), 0)
        at = self._at + len(self._held)  # of a token, a stop string may hold back a part
        return next((at - begin for name, begin, end in self._marks if name == tag and begin < at < end), 0)

    def _drop(self, num_chars: int, tag: str = "") -> None:
        """Go on behind some characters, and behind the next tag of this name: others without text may follow there."""
        self._held = self._held[num_chars:]
        self._at += num_chars
        while self._marks and self._marks[0][2] < self._at:
            self._marks.popleft()
        while tag and self._marks and self._marks.popleft()[0] != tag:
            pass
