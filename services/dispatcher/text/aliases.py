"""A tokenizer in which control tokens go by secret names, so that nothing that a person writes is one of them.

A tokenizer turns the characters `<|im_start|>` into the control token wherever they stand, and cuts the text there:
what comes before and after is normalised on its own, and a sentencepiece tokenizer puts a space before each part. Under
another name the token is the same (its id, its flags), and its old name is text like any other. So a whole text is
encoded at once, and around a control string stands what would stand around any other word.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Encoding, Tokenizer

from shared.errors import StartupError
from shared.model_files import TOKENIZER_HINT


class AliasedTokenizer:
    """A tokenizer, and the names by which it knows the control tokens. Thread-safe.

    Args:
        tokenizer: under these names.
        aliases: by the token's own name.
        alias: what each of them matches.
    """

    def __init__(self, tokenizer: Tokenizer, aliases: Mapping[str, str], alias: re.Pattern[str]) -> None:
        self.tokenizer = tokenizer
        self.aliases = aliases
        self._own_names = {alias: token for token, alias in aliases.items()}
        self._alias = alias
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token_id for token_id, token in added.items() if token.content in self._own_names}
        self._may_miss = tokenizer.normalizer is not None and any(added[token_id].normalized for token_id in self._ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return the text's tokens; an alias that the tokenizer does not take for its token counts as the token's name.

        The library looks for some tokens in the normalised text, where Llama 2's `</s>` may be `▁</s>`: it is found
        after a space only.
        """
        if self._may_miss and self._alias.search(text):
            (found,) = self.tokenizer.encode_batch([text], add_special_tokens=False)  # with places
            spans = [span for token_id, span in zip(found.ids, found.offsets, strict=True) if token_id in self._ids]
            taken = {place for span in spans for place in range(*span)}
            text = self._alias.sub(lambda match: self._named(match, taken), text)
        # for one text the library holds the GIL, and with it the event loop; for a batch it lets it go
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _named(self, match: re.Match[str], taken: set[int]) -> str:
        return match.group() if match.start() in taken else self._own_names[match.group()]


def load_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, without truncation and padding.

    Raises:
        StartupError: it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception for whatever it does not understand
        raise StartupError(f"tokenizer.json cannot be read ({str(error)[:200]})", TOKENIZER_HINT) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def alias_tokens(own: Tokenizer, tokens: frozenset[str]) -> AliasedTokenizer:
    """Return the tokenizer with other names for these tokens.

    Args:
        own: under their own names.
        tokens: some of its added tokens; the vocabulary of the model may hold them too.

    Raises:
        StartupError: they cannot be renamed without changing ids.
    """
    secret = secrets.token_hex(8)  # whoever knew a name could write the token
    aliases = {token: f"<|{secret}-{index}|>" for index, token in enumerate(sorted(tokens))}
    content = json.loads(own.to_str())
    for token in content.get("added_tokens") or []:
        token["content"] = aliases.get(token["content"], token["content"])
    _rename_pieces(content["model"], aliases)
    tokenizer = load_tokenizer(json.dumps(content))
    if any(tokenizer.token_to_id(alias) != own.token_to_id(token) for token, alias in aliases.items()):
        raise StartupError("tokenizer.json numbers its added tokens in a way that is not supported")
    return AliasedTokenizer(tokenizer, aliases, re.compile(rf"<\|{secret}-[0-9]+\|>"))


def _rename_pieces(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Rename the tokens in the vocabulary; what is merged into or out of one of them is not merged any more."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(piece, piece), *rest] for piece, *rest in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _makes_none_of(merge, aliases)]


def _makes_none_of(merge: str | list[str], aliases: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left not in aliases and right not in aliases and left + right not in aliases
