"""The model's chat template: Jinja from the model folder, never from a request, in an immutable sandbox.

Same settings and helpers as transformers' `apply_chat_template`, so that the same messages give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import StartupError

MAX_REASON_CHARS = 200
"""Longest sentence of a template's own refusal that is passed on."""


class TemplateRefusalError(ValueError):
    """The template does not take these messages.

    Args:
        reason: its own sentence (`raise_exception`), printable and short; empty if it simply failed.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the chat template failed")
        self.reason = reason


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

    Raises:
        StartupError: the source is not a template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template is not valid Jinja ({error})") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: `role`, `content`, and what else the template may read.
            add_generation_prompt: it ends where the assistant's answer begins; else after the last message.

        Raises:
            TemplateRefusalError: the template refuses the messages or fails on them.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _RaisedByTemplateError as error:
            reason = "".join(char for char in str(error.message) if char.isprintable())
            raise TemplateRefusalError(reason[:MAX_REASON_CHARS]) from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateRefusalError from error


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
