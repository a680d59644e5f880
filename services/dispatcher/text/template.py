"""The model's chat template: Jinja from the model folder, never from a request, in an immutable sandbox.

Same settings and helpers as transformers' `apply_chat_template`, so that the same messages give the same text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.dispatcher.text.template_forms import (
    Forms,
    Shape,
    ToolForms,
    find_forms,
    find_left_out,
    find_tool_forms,
    in_form,
    shape_of,
)
from shared.errors import StartupError
from shared.model_files import SPECIAL_TOKEN_NAMES

MAX_REASON_CHARS = 200
"""Longest sentence of a template's own refusal that is passed on."""
MAX_MESSAGES: Final = 10_000
"""Messages of a conversation."""
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
"""Longest prompt that a template may make: several times the text that the largest request brings."""
RENDER_LIMIT_S: Final = 10.0
"""Seconds after which a template is stopped, at its next piece of text."""
MAX_SHAPES: Final = 64
"""Kinds of conversations of which it is kept what the template leaves out."""
MAX_SHAPE_MESSAGES: Final = 256
"""Of longer ones it is found out each time."""
_OWN_VARIABLES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self", *SPECIAL_TOKEN_NAMES}
)
"""What a template reads that no request names."""

TemplateKwargs = Mapping[str, bool | int | float | str]
"""What a request gives to variables of the template."""
ToolDefinitions = Sequence[Mapping[str, Any]] | None
"""`{"type": "function", "function": {…}}` each; None: there are no tools."""


class TemplateRefusalError(ValueError):
    """The template does not take these messages.

    Args:
        reason: its own sentence (`raise_exception`), printable and short; empty if it simply failed.
        index: of the message that is not taken, if it is one.
    """

    def __init__(self, reason: str = "", index: int | None = None) -> None:
        super().__init__(reason or "the chat template failed")
        self.reason = reason
        self.index = index


class _RaisedByTemplateError(jinja2.TemplateError):
    """`raise_exception(message)` was called in the template."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said (for training); serving only prints what stands in it."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body's nodes."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled template. Thread-safe.

    Args:
        source: Jinja.
        special_tokens: variables such as `bos_token`.
        now: the clock of `strftime_now`.
        max_messages: longer conversations are refused (`template_trial.py` says how many it takes in good time).

    Raises:
        StartupError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        *,
        max_messages: int = MAX_MESSAGES,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self.source = source
        self.max_messages = max_messages
        self._special_tokens = dict(special_tokens)
        try:
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, MemoryError) as error:
            # the last four: what Jinja accepts and Python cannot compile, such as loops nested too deep
            raise StartupError(f"the model's chat template is not valid Jinja ({error})") from None
        self.variables = frozenset(read - _OWN_VARIABLES - environment.globals.keys())
        """Names that a request may give a value."""
        self.forms: Forms = find_forms(self._try)
        """How it reads what messages say."""
        forms, has_parts = find_tool_forms(self._try, self.forms.part_roles)
        self.tool_forms: ToolForms = forms
        """How it reads tools and their calls."""
        if has_parts:
            self.forms = replace(self.forms, part_roles=self.forms.part_roles | {"tool"})
        self._left_out = lru_cache(MAX_SHAPES)(self._find_left_out)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: TemplateKwargs | None = None,
        tools: ToolDefinitions = None,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: `role`, `content`, and what else the template may read.
            add_generation_prompt: it ends where the assistant's answer begins; else after the last message.
            kwargs: values of some of `variables`.
            tools: that the model may call.

        Raises:
            TemplateRefusalError: the template refuses the messages, fails on them, or makes too much of them.
        """
        if len(messages) > self.max_messages:
            raise TemplateRefusalError(f"it takes at most {self.max_messages} messages in good time")
        try:
            return self._render(messages, kwargs or {}, tools, add_generation_prompt=add_generation_prompt)
        except _RaisedByTemplateError as error:
            reason = "".join(char for char in str(error.message) if char.isprintable())
            raise TemplateRefusalError(reason[:MAX_REASON_CHARS]) from None
        except (TemplateRefusalError, MemoryError):
            raise
        except Exception as error:  # whatever a filter raises that is given what it does not expect
            raise TemplateRefusalError from error

    def in_form(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[dict[str, Any]]:
        """Return the messages as the template reads them.

        Args:
            messages: `content` is a text, or parts `{"type": "text", "text": …}`.
            add_generation_prompt: as in `render`.

        Raises:
            TemplateRefusalError: the template would leave one of them out.
        """
        formed = [in_form(message, self.forms.part_roles, self.tool_forms) for message in messages]
        find = self._left_out if len(formed) <= MAX_SHAPE_MESSAGES else self._find_left_out
        left_out = find(shape_of(formed), add_generation_prompt) if len(formed) <= self.max_messages else ()
        for index in sorted(left_out):
            has_calls = "tool_calls" in formed[index]
            if has_calls or not _is_blank(formed[index]["content"]):
                role, what = formed[index]["role"], "calls" if has_calls else "says"
                raise TemplateRefusalError(f"it leaves out what message {index} (role '{role}') {what}", index)
        return formed

    def _find_left_out(self, shape: Shape, add_generation_prompt: bool) -> frozenset[int]:  # noqa: FBT001  a cache's key
        def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
            return self._try(messages, add_generation_prompt=add_generation_prompt)

        return find_left_out(render, shape, self.tool_forms)

    def _try(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: ToolDefinitions = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        except TemplateRefusalError:
            return None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: TemplateKwargs,
        tools: ToolDefinitions,
        *,
        add_generation_prompt: bool,
    ) -> str:
        pieces: list[str] = []
        num_chars, end_s = 0, time.monotonic() + RENDER_LIMIT_S
        for piece in self._template.generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
            **kwargs,
        ):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise TemplateRefusalError(f"it makes more than {MAX_RENDERED_CHARS} characters of them")
            if time.monotonic() > end_s:
                raise TemplateRefusalError(f"it takes more than {RENDER_LIMIT_S:g} s for them")
        prompt = "".join(pieces)
        prompt.encode()  # half of a surrogate pair, which Jinja can write, is no character
        return prompt


def _is_blank(content: str | Sequence[Mapping[str, str]]) -> bool:
    return not (content if isinstance(content, str) else "".join([part["text"] for part in content])).strip()


def _raise_exception(message: object) -> None:
    raise _RaisedByTemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates call it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002  same
) -> str:
    """Jinja's own filter escapes HTML; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
