"""Grammars that answers are held to, over the vocabulary of one model (llguidance).

    dispatcher   tries a grammar once, in a child process, before it is admitted anywhere
    worker       compiles the same text again, beside its steps, and follows its rows' tokens

Both have the same vocabulary and the same limits, so that what passes the trial compiles at every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.model_files import tokenizer_file

MAX_GRAMMAR_SIZE: Final = 20_000
"""Rules and symbols of a compiled grammar."""
INITIAL_LEXER_FUEL: Final = 200_000
"""What building the lexer may cost, in the library's own units."""


class GrammarError(ValueError):
    """A grammar is not one, or costs too much.

    Args:
        reason: the library's sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Thread-safe; compiling lets other threads run.

    Args:
        tokenizer_json: contents of `tokenizer.json`.
        vocab_size: of the model; it may have rows that the tokenizer has no tokens for.
        eos_token_ids: any of them may be drawn where the grammar can end.

    Raises:
        ValueError: the library does not take the tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        ends = list(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
        except ValueError:  # the tokenizer has more tokens than the model, or is not taken
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=ends)
        self._limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, initial_lexer_fuel=INITIAL_LEXER_FUEL)
        self.num_mask_words = -(-self._tokenizer.vocab_size // 32)
        """Words of 32 bits in a mask, one bit per token, the lowest first."""

    def compile(self, grammar: bytes) -> LLMatcher:
        """Return a matcher at its beginning; it belongs to one thread at a time.

        Args:
            grammar: JSON or Lark, UTF-8; see `LLMatcher.grammar_from_json_schema` and its neighbours.

        Raises:
            GrammarError: it does not compile under the limits.
        """
        matcher = LLMatcher(self._tokenizer, grammar.decode(), limits=self._limits, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def open_compiler(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """Return the compiler for the model in a folder. Takes a second for a large vocabulary.

    Raises:
        StartupError: it has no tokenizer.
        ValueError: see `GrammarCompiler`.
    """
    return GrammarCompiler(tokenizer_file(model_dir).read_text(), vocab_size, eos_token_ids)
