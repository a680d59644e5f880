"""Prompts of a wanted length for a server whose tokenizer is not here.

Either random token ids (completions, `--vocab`), which are exact, or random English words, whose tokens the server
itself counts once before the load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea kid body back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force education
foot boy age policy music market sense nation plan college interest death experience effect use class control field
development role effort rate heart drug show leader light voice wife police mind price report decision son view
relationship town road arm difference value building action season society tax
"""
WORDS = tuple(_COMMON.split())
ASSUMED_TOKENS_PER_WORD = 1.3
"""Where the server does not count: about what English takes in most vocabularies."""


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How a server counts text: tokens of a prompt = overhead + tokens_per_word · words."""

    tokens_per_word: float = ASSUMED_TOKENS_PER_WORD
    overhead: float = 0.0
    """Tokens that the chat template and the tokenizer add."""
    is_measured: bool = False
    """False: the server gave no usage, the figures are assumed."""

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make a prompt of about this many tokens, at least 1."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def scale_of(short: tuple[int, int], long: tuple[int, int]) -> TokenScale:
    """Return the scale through two prompts, each as (words, tokens that the server counted)."""
    words, tokens = long[0] - short[0], long[1] - short[1]
    if words <= 0 or tokens <= 0:
        return TokenScale()
    tokens_per_word = tokens / words
    return TokenScale(tokens_per_word, max(0.0, short[1] - short[0] * tokens_per_word), is_measured=True)


class PromptMaker:
    """Makes prompts that share nothing but the prefix that was asked for.

    Args:
        rng: where the words come from.
        scale: how the server counts.
        vocab_size: ids are below it; 0 makes words.
        num_prefix: tokens, or words at the server's scale, that all prompts begin with.
    """

    def __init__(
        self, rng: np.random.Generator, scale: TokenScale, *, vocab_size: int = 0, num_prefix: int = 0
    ) -> None:
        self._rng = rng
        self._scale = scale
        self._vocab_size = vocab_size
        self._num_prefix = num_prefix
        self._prefix = self._draw(num_prefix)

    def make(self, num_tokens: int) -> str | list[int]:
        """Return a prompt of `num_tokens` tokens, the shared prefix included: ids, or words of about that length."""
        shared = min(self._num_prefix, num_tokens - 1)
        if self._vocab_size:
            return [*self._prefix[:shared], *self._draw(num_tokens - shared)]
        total = self._scale.num_words(num_tokens)
        kept = min(round(shared / self._scale.tokens_per_word), total - 1)
        drawn = [*self._prefix[:kept], *self._draw(total - kept)]
        return " ".join(WORDS[index] for index in drawn)

    def _draw(self, count: int) -> list[int]:
        # ids from 3 on: the first ones are control tokens in most vocabularies
        low, high = (min(3, self._vocab_size - 1), self._vocab_size) if self._vocab_size else (0, len(WORDS))
        drawn: list[int] = self._rng.integers(low, high, size=count).tolist()
        return drawn
