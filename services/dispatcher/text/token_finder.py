"""Where certain strings stand in a text, however many there are and however alike they begin."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from tokenizers import Tokenizer, models

_BETWEEN: Final = 0
"""Id of what stands between two of the strings."""


class TokenFinder:
    """Finds the longest of some strings at each place, from left to right. Thread-safe.

    It also tells of a text whether one of the strings could be put together with what stands beside it.

    The tokenizers library does it, in one pass and without the interpreter's lock. A regular expression for many
    strings takes seconds to compile, and is nested as deep as they begin alike.

    Args:
        tokens: not empty strings.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokenizer = Tokenizer(models.WordLevel({"": _BETWEEN}, unk_token=""))
        self._tokenizer.add_special_tokens(sorted(tokens))
        self._beginnings = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._ends = frozenset(token[size:] for token in tokens for size in range(1, len(token)))
        self._first_chars = frozenset(token[0] for token in tokens)
        self._last_chars = frozenset(token[-1] for token in tokens)
        self._longest = max(map(len, tokens), default=0)

    def stands_in(self, text: str) -> bool:
        """Return whether one of the strings does."""
        return bool(self._spans(text))

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """Return the text with another string in place of each."""
        pieces: list[str] = []
        done = 0
        for start, end in self._spans(text):
            pieces += text[done:start], by(text[start:end])
            done = end
        return "".join([*pieces, text[done:]])

    def may_begin_in(self, text: str) -> bool:
        """Return whether the text ends like the beginning of one of the strings."""
        end = text[-self._longest :]
        if self._first_chars.isdisjoint(end):
            return False
        return any(end[at:] in self._beginnings for at in range(len(end)))

    def may_end_in(self, text: str) -> bool:
        """Return whether the text begins like the end of one of the strings."""
        head = text[: self._longest]
        if self._last_chars.isdisjoint(head):
            return False
        return any(head[:size] in self._ends for size in range(1, len(head) + 1))

    def _spans(self, text: str) -> list[tuple[int, int]]:
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # for one text it holds the lock
        return [span for token_id, span in zip(found.ids, found.offsets, strict=True) if token_id != _BETWEEN]
