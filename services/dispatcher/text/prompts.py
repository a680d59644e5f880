"""Messages and texts to token ids, such that what a user writes never becomes a control token.

A tokenizer turns the characters `<|im_start|>` into the control token wherever they stand. So each occurrence of such
a string in a message is replaced by a placeholder of private-use characters before the template is rendered; the text
is split at the placeholders, and what stood there is encoded by a second tokenizer that knows no control tokens.
Without an occurrence the ids are exactly those of transformers' `apply_chat_template` (or of plain encoding).

A control token is an added token that is marked as special, or that the model's own template writes (`<tool_call>`).
The latter stays itself in an assistant's message: there it is the model's own earlier output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any, Final

from tokenizers import Tokenizer

from services.dispatcher.text.detokenizer import DetokenizerTable, load_table
from services.dispatcher.text.model_folder import MAX_TOKENIZER_PARTS, TOKENIZER_HINT, ModelFolder
from services.dispatcher.text.template import ChatTemplate, TemplateRefusalError
from services.dispatcher.text.token_names import TokenNames
from shared.errors import StartupError
from shared.messages.request import MAX_PROMPT_TOKENS
from shared.reading import parse_json

_OPEN_CANDIDATES: Final = range(0xF0000, 0xF0400)
"""Private-use characters that may mark a placeholder; one that no message contains is taken."""


class TooManyTokensError(ValueError):
    """A text has more tokens than any request may have."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class PromptCodec:
    """Tokenizer and template of one model. Thread-safe; the methods take time, so they run off the event loop.

    Raises:
        StartupError: tokenizer or template cannot be used.
    """

    def __init__(self, folder: ModelFolder, template: ChatTemplate | None = None) -> None:
        self.tokenizer = _load_tokenizer(folder.tokenizer_json)
        self.template = template
        if template is None and folder.template is not None:
            self.template = ChatTemplate(folder.template, folder.special_tokens)
        special, by_template = _control_tokens(self.tokenizer, self.template)
        self._control = _pattern(special | by_template)
        self._special_only = _pattern(special)
        self._control_ids = {self.tokenizer.token_to_id(token) for token in special | by_template}
        self._literal = _without_tokens(folder.tokenizer_json, special | by_template)
        self._literal_ids: dict[str, list[int]] = {}
        self._prefix, self._suffix = _post_processing(self.tokenizer)
        self.table: DetokenizerTable = load_table(self.tokenizer)
        self.names = TokenNames(self.tokenizer, self.table)
        self.vocab_size = folder.vocab_size or self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_bytes = max(len(token.encode()) for token in self.tokenizer.get_vocab(with_added_tokens=True))
        """No token stands for more bytes of text than this."""

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt without template.

        Args:
            text: nothing in it becomes a control token.
            add_special_tokens: with the tokenizer's own BOS or EOS, if it has any.

        Raises:
            TooManyTokensError: more than `MAX_PROMPT_TOKENS`.
        """
        if self._control is None or not self._control.search(text):
            return self._ids(self.tokenizer, text, add_special_tokens=add_special_tokens)
        ids = self._encode_parts(re.split(f"({self._control.pattern})", text))
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation.

        Args:
            messages: `role` and `content` (a string), and what else the template may read.
            add_generation_prompt: they end where the assistant's answer begins.
            add_special_tokens: with the tokenizer's own BOS or EOS; most templates write theirs.

        Raises:
            TemplateRefusalError: the template does not take them, or the model has none.
            TooManyTokensError: more than `MAX_PROMPT_TOKENS`.
        """
        if self.template is None:
            raise TemplateRefusalError("this model has no chat template; use /v1/completions")
        render = partial(self.template.render, add_generation_prompt=add_generation_prompt)
        if not any(self._find(message) for message in messages):
            return self._ids(self.tokenizer, render(messages), add_special_tokens=add_special_tokens)
        mark = _unused_mark(messages)
        hidden: list[str] = []
        rendered = render([self._hide(message, mark, hidden) for message in messages])
        parts = re.split(f"{mark}([0-9]+){mark}", rendered)
        parts[1::2] = [hidden[int(number)] for number in parts[1::2]]
        ids = self._encode_parts(parts)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of some ids."""
        # the library holds the GIL for one text, and lets it go for a batch
        texts: list[str] = self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the entries of the vocabulary, as the tokenizer writes them (`Ġthe`); "" for an id without one."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _find(self, message: Mapping[str, Any]) -> bool:
        pattern = self._pattern_for(message)
        return pattern is not None and any(pattern.search(text) for text in message.values() if isinstance(text, str))

    def _pattern_for(self, message: Mapping[str, Any]) -> re.Pattern[str] | None:
        return self._special_only if message.get("role") == "assistant" else self._control

    def _hide(self, message: Mapping[str, Any], mark: str, hidden: list[str]) -> dict[str, Any]:
        """Return the message with placeholders; what they stand for is appended to `hidden`."""
        pattern = self._pattern_for(message)

        def replace(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{mark}{len(hidden) - 1}{mark}"

        if pattern is None:
            return dict(message)
        return {
            key: pattern.sub(replace, value) if isinstance(value, str) and key != "role" else value
            for key, value in message.items()
        }

    def _encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Encode template text (even places) as usual and user's control strings (odd places) as plain text."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if part:
                ids += self._encode_literally(part) if index % 2 else self._ids(self.tokenizer, part)
        return ids

    def _encode_literally(self, text: str) -> list[int]:
        """Return the ids of a control string as plain text; they are few, and a prompt may be full of them."""
        ids = self._literal_ids.get(text)
        if ids is None:
            ids = self._ids(self._literal, text)
            if not self._control_ids.isdisjoint(ids):
                # a vocabulary that holds the control string as an ordinary piece: letter by letter it cannot match
                ids = [token_id for char in text for token_id in self._ids(self._literal, char)]
            self._literal_ids[text] = ids
        return ids

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # for one text the library holds the GIL, and with it the event loop; for a batch it lets it go
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > MAX_PROMPT_TOKENS:  # before a list of them holds up every other thread
            raise TooManyTokensError(len(encoding))
        ids: list[int] = encoding.ids
        return ids


def _load_tokenizer(source: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception for whatever it does not understand
        raise StartupError(f"tokenizer.json cannot be read ({str(error)[:200]})", TOKENIZER_HINT) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_tokens(source: str, tokens: frozenset[str]) -> Tokenizer:
    """Return the tokenizer without these added tokens: their strings are ordinary text to it."""
    try:
        content = parse_json(source, max_parts=MAX_TOKENIZER_PARTS)
    except ValueError as error:
        raise StartupError(f"tokenizer.json is {error}", TOKENIZER_HINT) from None
    content["added_tokens"] = [token for token in content.get("added_tokens", []) if token["content"] not in tokens]
    tokenizer = _load_tokenizer(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _control_tokens(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tokens marked as special, and the others that the template writes."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = frozenset(token.content for token in added if token.special and token.content)
    source = template.source if template is not None else ""
    written = frozenset(
        token.content for token in added if not token.special and token.content.strip() and token.content in source
    )
    return special, written


def _pattern(tokens: frozenset[str]) -> re.Pattern[str] | None:
    return re.compile(longest_of(sorted(tokens))) if tokens else None


def longest_of(texts: Sequence[str]) -> str:
    """Return a regular expression for the longest of these texts that stands at a place.

    What some of them begin with alike is looked at once: of 250 control tokens, tried one after the other at each `<|`
    of a long prompt, the search would hold all threads for a second.
    """
    prefix = commonprefix(list(texts))  # noqa: RUF071  character by character is what is meant
    by_next: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > len(prefix):
            by_next.setdefault(text[len(prefix)], []).append(text[len(prefix) :])
    found = re.escape(prefix)
    if by_next:
        found += f"(?:{'|'.join(longest_of(rest) for rest in by_next.values())})"
    return found + "?" if by_next and prefix in texts else found


def _unused_mark(messages: Sequence[Mapping[str, Any]]) -> str:
    used = {char for message in messages for text in message.values() if isinstance(text, str) for char in set(text)}
    for code in _OPEN_CANDIDATES:
        if chr(code) not in used:
            return chr(code)
    raise TemplateRefusalError("the messages use too many private-use characters")


def _post_processing(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that encoding a prompt puts before and after it (BOS, EOS)."""
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []
