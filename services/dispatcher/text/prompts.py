"""Messages and texts to token ids, such that what a user writes never becomes a control token.

All texts are encoded by a tokenizer that knows control tokens by secret names only (`aliases.py`): the names are put
where the template writes control tokens. To tell these from what a user wrote, each control string in a message is
replaced by a placeholder of private-use characters while the template is rendered. Without such a string the ids are
exactly those of transformers' `apply_chat_template` (or of plain encoding); with one, those of a text in which it is a
word like others.

A control token is an added token that is marked as special, or that the model's own template writes (`<tool_call>`).
The latter stays itself in an assistant's message: there it is the model's own earlier output. Tools, the arguments of
their calls and their results are texts of users: in each of their strings, names of members too, all of them are words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tokenizers import Tokenizer

from services.dispatcher.text.aliases import alias_tokens, load_tokenizer
from services.dispatcher.text.detokenizer import DetokenizerTable, load_table
from services.dispatcher.text.model_folder import ModelFolder
from services.dispatcher.text.placeholders import (
    cut_at,
    each_string,
    last_text,
    place_text,
    spellings,
    strings_of,
    unused_mark,
    with_end,
)
from services.dispatcher.text.template import ChatTemplate, TemplateKwargs, TemplateRefusalError, ToolDefinitions
from services.dispatcher.text.template_forms import TALKS, in_form
from services.dispatcher.text.token_finder import TokenFinder
from services.dispatcher.text.token_names import TokenNames
from shared.errors import StartupError
from shared.messages.request import MAX_PROMPT_TOKENS
from shared.model_files import COPY_AGAIN, TOKENIZER_HINT

_TRIALS: Final = tuple([{"role": role, "content": "a"} for role in roles] for roles in TALKS)
"""Conversations of which the template's own tokens are seen."""

_HARMLESS: Final = re.compile(r"[\w .,:+-]*")
"""Values of template variables of which no control token can be put together, with whatever stands beside them."""


class TooManyTokensError(ValueError):
    """A text has more tokens than any request may have."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class UntokenizableError(ValueError):
    """The tokenizer makes no ids of a text that the model has.

    Args:
        reason: printable and short; goes on after "cannot be tokenised: ".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PromptCodec:
    """Tokenizer and template of one model. Thread-safe; the methods take time, so they run off the event loop.

    Added tokens whose ids the model does not have are plain text.

    Raises:
        StartupError: tokenizer or template cannot be used, or write ids that the model does not have.
    """

    def __init__(
        self, folder: ModelFolder, template: ChatTemplate | None = None, tool_template: ChatTemplate | None = None
    ) -> None:
        self.tokenizer = load_tokenizer(folder.tokenizer_json)
        _add_tokens(self.tokenizer, folder)
        self.vocab_size = folder.vocab_size or self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.unknown_tokens = _tokens_from(self.tokenizer, self.vocab_size)
        """Added tokens whose ids the model does not have."""
        if self.unknown_tokens:
            self.tokenizer = _without_tokens(self.tokenizer, self.unknown_tokens)
        _mark_special(self.tokenizer, folder.special_tokens.values())
        self.has_unknown_pieces = any(i >= self.vocab_size for i in self.tokenizer.get_vocab().values())
        """The tokenizer's own vocabulary goes beyond the model; a text that needs such a piece is refused."""
        self.template = template
        if template is None and folder.template is not None:
            self.template = ChatTemplate(folder.template, folder.special_tokens)
        if tool_template is None and folder.tool_template is not None:
            tool_template = ChatTemplate(folder.tool_template, folder.special_tokens)
        self.tool_template = self.template if tool_template is None else tool_template
        """For conversations with tools."""
        special, by_template = _control_tokens(self.tokenizer, self._templates())
        self._control = TokenFinder(special | by_template)
        self._special_only = TokenFinder(special) if by_template else self._control
        self._aliased = alias_tokens(self.tokenizer, special | by_template)
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise StartupError("the tokenizer's vocabulary is empty", TOKENIZER_HINT)
        self._check_writers()
        self.table: DetokenizerTable = load_table(self.tokenizer)
        self.names = TokenNames(self.tokenizer, self.table)
        self.max_token_bytes = max(len(token.encode()) for token in vocabulary)
        """No token stands for more bytes of text than this."""

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt without template.

        Args:
            text: nothing in it becomes a control token.
            add_special_tokens: with the tokenizer's own BOS or EOS, if it has any.

        Raises:
            TooManyTokensError: more than `MAX_PROMPT_TOKENS`.
            UntokenizableError: the tokenizer makes no ids of it that the model has.
        """
        try:
            encoding = self._aliased.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception: no token for a character, and none for unknown
            raise UntokenizableError(f"the tokenizer fails on it ({str(error)[:200]})") from None
        if len(encoding) > MAX_PROMPT_TOKENS:  # before a list of them holds up every other thread
            raise TooManyTokensError(len(encoding))
        ids: list[int] = encoding.ids
        if self.has_unknown_pieces and (largest := max(ids, default=0)) >= self.vocab_size:
            token = str(self.tokenizer.id_to_token(largest))[:80]
            raise UntokenizableError(f"{token!r} in it has id {largest}, and the model 0 to {self.vocab_size - 1}")
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        continues_last: bool = False,
        kwargs: TemplateKwargs | None = None,
        tools: ToolDefinitions = None,
    ) -> list[int]:
        """Return the ids of a conversation.

        Args:
            messages: `role` and `content` (a string, or parts of type `text`), and what else the template may read.
            add_generation_prompt: they end where the assistant's answer begins.
            add_special_tokens: with the tokenizer's own BOS or EOS; most templates write theirs.
            continues_last: they end where the text of the last message ends; then without `add_generation_prompt`.
            kwargs: values of some of the template's variables; nothing in them becomes a control token.
            tools: that the model may call; the same holds for them.

        Raises:
            TemplateRefusalError: the template does not take them all, or the model has none.
            TooManyTokensError: more than `MAX_PROMPT_TOKENS`.
            UntokenizableError: as `encode_text`.
        """
        template = self.template_for(messages, tools)
        if template is None:
            raise TemplateRefusalError("this model has no chat template; use /v1/completions")
        messages = template.in_form(messages, add_generation_prompt=add_generation_prompt)
        kwargs = dict(kwargs or {})
        texts = {name: value for name, value in kwargs.items() if isinstance(value, str)}
        mark = ""
        hidden: list[str] = []
        is_hidden = any(map(self._find, messages)) or any(map(self._is_suspect, texts.values()))
        if continues_last or is_hidden or self._find_inside(tools):
            mark = unused_mark([*messages, texts, tools])
            place = partial(place_text, mark, hidden)
            messages = [self._hide(message, place) for message in messages]
            kwargs |= {name: place(value) for name, value in texts.items() if self._is_suspect(value)}
            tools = each_string(tools, lambda text: self._guard(text, place))
        if continues_last:
            end = place_text(mark, hidden, "")
            messages = [*messages[:-1], with_end(messages[-1], end)]
        rendered = template.render(messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs, tools=tools)
        if continues_last:
            rendered = cut_at(rendered, end, last_text(messages[-1]))
        text = self._name_tokens(rendered, mark, hidden)
        return self.encode_text(text, add_special_tokens=add_special_tokens)

    def template_for(self, messages: Sequence[Mapping[str, Any]], tools: ToolDefinitions) -> ChatTemplate | None:
        """Return the template for a conversation: that for tools if it has some, or calls; None: the model has none."""
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        return self.tool_template if tools or has_calls else self.template

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of some ids."""
        # the library holds the GIL for one text, and lets it go for a batch
        texts: list[str] = self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the entries of the vocabulary, as the tokenizer writes them (`Ġthe`); "" for an id without one."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _find(self, message: Mapping[str, Any]) -> bool:
        """Return whether a control token is, or could be put together with what a template writes beside it."""
        if self._find_inside(message.get("tool_calls")):
            return True
        texts = (_joined(value) for name, value in message.items() if name != "tool_calls")
        return any(map(self._finder_for(message).stands_in, texts))

    def _find_inside(self, value: Any) -> bool:
        """The same of every string in tools or calls."""
        control = self._control
        strings = set(strings_of(value))
        return any(control.may_begin_in(text) or control.may_end_in(text) for text in strings) or any(
            map(control.stands_in, strings)
        )

    def _finder_for(self, message: Mapping[str, Any]) -> TokenFinder:
        return self._special_only if message.get("role") == "assistant" else self._control

    def _hide(self, message: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
        """Return the message with placeholders.

        Between two parts stands one for nothing: what they make together is no control token either.
        """
        finder = self._finder_for(message)

        def guard(name: str, value: Any) -> Any:
            if name == "role" or value is None:
                return value
            if name == "tool_calls":
                return each_string(value, lambda text: self._guard(text, place))
            if isinstance(value, str):
                return finder.replace(value, place)
            texts = [finder.replace(part["text"], place) for part in value]
            return [{**part, "text": (place("") if i else "") + texts[i]} for i, part in enumerate(value)]

        return {name: guard(name, value) for name, value in message.items()}

    def _guard(self, text: str, place: Callable[[str], str]) -> str:
        """Return the text with placeholders, also at an end where a control token could be made with its neighbour."""
        before = place("") if self._control.may_end_in(text) else ""
        after = place("") if self._control.may_begin_in(text) else ""
        return before + self._control.replace(text, place) + after

    def _is_suspect(self, value: str) -> bool:
        """Return whether a control token could be made of the value of a variable, alone or with its neighbours.

        Such a value is hidden as a whole; others stay as they are, because templates compare them.
        """
        return not _HARMLESS.fullmatch(value) or self._control.stands_in(value)

    def _name_tokens(self, rendered: str, mark: str, hidden: Sequence[str]) -> str:
        """Return the text with the secret names of what the template wrote, and in it what users wrote."""
        any_mark = "|".join(map(re.escape, spellings(mark)))
        parts = re.split(f"(?:{any_mark})([0-9]+)(?:{any_mark})", rendered) if mark else [rendered]
        aliases = self._aliased.aliases
        parts[::2] = [self._control.replace(part, aliases.__getitem__) for part in parts[::2]]
        parts[1::2] = [hidden[int(number)] for number in parts[1::2]]
        return "".join(parts)

    def _templates(self) -> list[ChatTemplate]:
        """Return both templates, or the one that there is."""
        return [each for each in dict.fromkeys((self.template, self.tool_template)) if each is not None]

    def _check_writers(self) -> None:
        """Check that what is written around every text has ids of the model."""
        try:
            plain, whole = (set(self.tokenizer.encode("", add_special_tokens=added).ids) for added in (False, True))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"the tokenizer fails on every text ({str(error)[:200]})", TOKENIZER_HINT) from None
        ids = [token_id for token_id in whole - plain if token_id >= self.vocab_size]
        if ids:
            what = f"the tokenizer puts id {ids[0]} around every prompt, and the model has 0 to {self.vocab_size - 1}"
            raise StartupError(what, "Correct post_processor in tokenizer.json")
        for template in self._templates() if self.unknown_tokens else ():
            self._check_template(template)

    def _check_template(self, template: ChatTemplate) -> None:
        """Check that it writes no token whose id the model does not have."""
        for messages in _TRIALS:
            for is_prompt in (True, False):
                with suppress(TemplateRefusalError):
                    given = [in_form(message, template.forms.part_roles, template.tool_forms) for message in messages]
                    text = template.render(given, add_generation_prompt=is_prompt)
                    if written := [token for token in sorted(self.unknown_tokens) if token in text]:
                        raise _refused_template(written[0], self.vocab_size)


def _add_tokens(tokenizer: Tokenizer, folder: ModelFolder) -> None:
    """Add the tokens that stand beside `tokenizer.json`, as transformers does, but never under another id."""
    own = tokenizer.get_added_tokens_decoder()
    beside = {token_id: token for token_id, token in sorted(folder.added_tokens.items()) if token.content}
    added = [
        token
        for token_id, token in beside.items()
        if token_id not in own or (folder.added_tokens_win and repr(own[token_id]) != repr(token))
    ]
    if added:
        tokenizer.add_tokens(added)
    for token_id, token in beside.items():
        if (its_id := tokenizer.token_to_id(token.content)) != token_id:
            what = f"the added token {token.content[:80]!r} would have id {its_id} by tokenizer.json"
            raise StartupError(f"{what}, and {token_id} by the files beside it", COPY_AGAIN)


def _without_tokens(tokenizer: Tokenizer, tokens: frozenset[str]) -> Tokenizer:
    """Return the tokenizer without these added tokens: their strings are ordinary text to it."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in tokens]
    return load_tokenizer(json.dumps(content))


def _tokens_from(tokenizer: Tokenizer, first_id: int) -> frozenset[str]:
    """Return the added tokens whose ids begin there."""
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(token.content for token_id, token in added if token_id >= first_id and token.content)


def _mark_special(tokenizer: Tokenizer, names: Collection[str]) -> None:
    """Mark the tokens that the folder's files name (`eos_token` …) as special, as transformers does."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    named = [name for name in names if name and tokenizer.token_to_id(name) is not None and name not in special]
    if named:  # for none the library takes as long
        tokenizer.add_special_tokens(named)


def _refused_template(token: str, vocab_size: int) -> StartupError:
    return StartupError(
        f"the chat template writes {token!r}, whose id the model does not have (0 to {vocab_size - 1})",
        "Use the tokenizer and the template that the model was published with",
    )


def _control_tokens(tokenizer: Tokenizer, templates: Sequence[ChatTemplate]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tokens marked as special, and the others that a template writes."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = frozenset(token.content for token in added if token.special and token.content)
    source = "\n".join(template.source for template in templates)
    written = frozenset(
        token.content for token in added if not token.special and token.content.strip() and token.content in source
    )
    return special, written


def _joined(value: str | Sequence[Mapping[str, str]] | None) -> str:
    """Return the text of a message's member; parts of a content together, as a template may write them."""
    if value is None or isinstance(value, str):
        return value or ""
    return "".join([part["text"] for part in value])
