"""How families of models write calls of tools in their answers.

    hermes    <tool_call>{"name": "f", "arguments": {…}}</tool_call>                     Hermes, Qwen
    llama3    {"name": "f", "parameters": {…}}; {…}      the whole answer, or behind <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]      or      [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…
    phi       <|tool_call|>[{"name": "f", "arguments": {…}}, …]<|/tool_call|>      or      functools[…]

A tag may be one token or several, and a special one, which has no text of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256
from typing import Final

from services.dispatcher.text.prompts import PromptCodec
from shared.process.config import ToolParser

BLANKS: Final = " \t\r\n"
MAX_HEAD_CHARS: Final = 512
"""Of what stands before the arguments of a call, and between two calls; what is longer is text."""
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*("|\\?\Z)', re.DOTALL)
_WORD: Final = re.compile(r"[\w.-]+", re.ASCII)


class HeadPart(Enum):
    """What stands in a call's head and is not the same in each."""

    NAME = auto()
    """The tool's name, as a JSON string."""
    STRING = auto()
    """Any JSON string; it means nothing."""
    WORD = auto()
    """The tool's name as it is; a second one means nothing."""


class HeadReading(Enum):
    """What a text is that is no whole head of a call."""

    UNDECIDED = auto()
    """It may become one."""
    OTHER = auto()


Head = tuple[str | tuple[str, ...] | HeadPart, ...]
"""What stands before the arguments, in order, with any blanks between: texts (one of several), and parts."""
_MEMBERS: Final[Head] = ('"name"', ":", HeadPart.NAME, ",", ('"arguments"', '"parameters"'), ":")
_OBJECT: Final[Head] = ("{", *_MEMBERS)
_TYPED: Final[Head] = ("{", ('"type"', '"id"'), ":", HeadPart.STRING, ",", *_MEMBERS)


@dataclass(frozen=True, slots=True)
class Written:
    """How calls stand in an answer that is held to them: tags and texts, in order."""

    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...] = ()
    name_end: str = ""
    """Tag between a name as it is and its arguments; empty: both are members of an object."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of one family. Pure data."""

    name: str
    tags: tuple[str, ...]
    """Texts in it that may be tokens."""
    openings: tuple[str, ...]
    heads: tuple[Head, ...]
    """What may follow an opening."""
    written: tuple[Written, ...]
    """The last one, unless a tag of an earlier one is a token."""
    following: tuple[Head, ...] = ()
    """What may follow a call, and makes another one."""
    closings: tuple[str, ...] = ()
    """What may stand behind the last one, in this order; any of them may be missing."""
    is_bare: bool = False
    """An answer may begin with a call that nothing opens."""
    arguments_name: str = "arguments"
    """Which member has them, as the model has learnt it."""
    id_prefix: str = "call_"
    num_id_chars: int = 24
    """Letters and digits of an id, behind the prefix."""

    def call_id(self, answer: str, index: int) -> str:
        """Return the id of a call: always the same for the same call of the same answer.

        Args:
            answer: names the choice among all answers.
            index: of the call in it.
        """
        return self.id_prefix + sha256(f"{answer} {index}".encode()).hexdigest()[: self.num_id_chars]


_IN_TAGS: Final = Written(
    ("<tool_call>", "\n"), ("\n", "</tool_call>", "\n", "<tool_call>", "\n"), ("\n", "</tool_call>")
)
_BY_NAME: Final = Written(("[TOOL_CALLS]",), ("[TOOL_CALLS]",), name_end="[ARGS]")
_LIST: Final[tuple[Head, ...]] = (("[", *_OBJECT), ("[", *_TYPED))
_NEXT: Final[tuple[Head, ...]] = ((",", *_OBJECT), (",", *_TYPED))
FORMS: Final = {
    form.name: form
    for form in (
        CallForm(
            "hermes",
            ("<tool_call>", "</tool_call>"),
            ("<tool_call>",),
            (_OBJECT, _TYPED),
            (_IN_TAGS,),
            closings=("</tool_call>",),
        ),
        CallForm(
            "llama3",
            ("<|python_tag|>",),
            ("<|python_tag|>",),
            (_OBJECT, _TYPED),
            (Written((), ("; ",)),),
            following=tuple((*before, *head) for before in ((), (";",)) for head in (_OBJECT, _TYPED)),
            is_bare=True,
            arguments_name="parameters",
        ),
        CallForm(
            "mistral",
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            ("[TOOL_CALLS]",),
            (
                *_LIST,
                (HeadPart.WORD,),
                (HeadPart.WORD, "[ARGS]"),
                (HeadPart.WORD, "[CALL_ID]", HeadPart.WORD, "[ARGS]"),
            ),
            (_BY_NAME, Written(("[TOOL_CALLS]", "["), (", ",), ("]",))),
            following=_NEXT,
            closings=("]",),
            id_prefix="",
            num_id_chars=9,  # its templates take no others
        ),
        CallForm(
            "phi",
            ("<|tool_call|>", "<|/tool_call|>"),
            ("<|tool_call|>", "functools"),
            _LIST,
            (
                Written(("<|tool_call|>", "["), (", ",), ("]", "<|/tool_call|>")),
                Written(("functools", "["), (", ",), ("]",)),
            ),
            following=_NEXT,
            closings=("]", "<|/tool_call|>"),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """How a model calls tools."""

    form: CallForm
    tag_ids: Mapping[str, int] = field(default_factory=dict)
    """Tags that are tokens."""
    special_tags: Mapping[int, str] = field(default_factory=dict)
    """Those that are special ones, which have no text elsewhere, by id."""

    @property
    def written(self) -> Written:
        """How an answer is written that is held to calls."""
        *firsts, last = self.form.written
        return next((each for each in firsts if self._has_tokens(each)), last)

    def _has_tokens(self, written: Written) -> bool:
        pieces = (*written.before, *written.after, written.name_end)
        return all(tag in self.tag_ids for tag in self.form.tags if tag in pieces)


def find_model_calls(parser: ToolParser, codec: PromptCodec) -> ModelCalls | None:
    """Return how the model calls tools; None if it is not known."""
    name = _seen_in("" if codec.tool_template is None else codec.tool_template.source) if parser == "auto" else parser
    if name == "none":
        return None
    form = FORMS[name]
    added = codec.tokenizer.get_added_tokens_decoder().items()
    tags = {token.content: token_id for token_id, token in added if token.content in form.tags}
    special = {token_id: token.content for token_id, token in added if token.special and token.content in tags}
    return ModelCalls(form, tags, special)


def _seen_in(template: str) -> str:
    """Return the family that a chat template is written for."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # others write members as XML
        return "hermes" if "arguments" in template and not re.search("<function=|<arg_key>", template) else "none"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    return "phi" if re.search(r"<\|tool_call\|>|<\|tool\|>|functools", template) else "none"


@dataclass(frozen=True, slots=True)
class HeadFound:
    """The head of a call."""

    name: str
    end: int
    """Where the arguments begin."""
    is_in_object: bool
    """They are a member of an object, which goes on behind them."""


def read_head(text: str, at: int, heads: Sequence[Head]) -> HeadFound | HeadReading:
    """Return the head of a call that stands there, with any blanks before it.

    Args:
        text: whose end need not be the answer's.
        at: where it begins.
        heads: one of these.
    """
    start = skip_blanks(text, at)
    readings = [_read(text, start, head) for head in heads]
    for reading in readings:
        if isinstance(reading, HeadFound) and reading.end - at <= MAX_HEAD_CHARS:
            return reading
    is_open = HeadReading.UNDECIDED in readings and len(text) - at <= MAX_HEAD_CHARS
    return HeadReading.UNDECIDED if is_open else HeadReading.OTHER


def _read(text: str, at: int, head: Head) -> HeadFound | HeadReading:
    name = ""
    for step in (*head, "{"):
        at = skip_blanks(text, at)
        if at == len(text):
            return HeadReading.UNDECIDED
        if isinstance(step, HeadPart):
            read = _read_part(text, at, step)
            if isinstance(read, HeadReading):
                return read
            found, at = read
            name = name if step is HeadPart.STRING else name or found
            continue
        whole = [choice for choice in ((step,) if isinstance(step, str) else step) if text.startswith(choice, at)]
        if not whole:
            return _read_beginning(text[at:], step)
        at += len(whole[0])
    return HeadFound(name, at - 1, "{" in head) if name else HeadReading.OTHER


def _read_beginning(end: str, step: str | tuple[str, ...]) -> HeadReading:
    choices = (step,) if isinstance(step, str) else step
    return HeadReading.UNDECIDED if any(choice.startswith(end) for choice in choices) else HeadReading.OTHER


def _read_part(text: str, at: int, part: HeadPart) -> tuple[str, int] | HeadReading:
    match = (_WORD if part is HeadPart.WORD else _STRING).match(text, at)
    if match is None:
        return HeadReading.OTHER
    if part is HeadPart.WORD:
        return HeadReading.UNDECIDED if match.end() == len(text) else (match[0], match.end())
    if match[1] != '"':
        return HeadReading.UNDECIDED
    try:
        name: str = json.loads(match[0])
        name.encode()
    except ValueError:
        return HeadReading.OTHER
    return name, match.end()


def skip_blanks(text: str, at: int) -> int:
    """Return where the next character stands that is none."""
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at
