"""Compiled grammars of one worker: each text is compiled once, and every row that is held to it begins with a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from llguidance import LLMatcher

from shared.grammars import GrammarCompiler

MAX_GRAMMARS: Final = 256
"""That are kept."""


class GrammarCache:
    """Matchers at their beginnings, by the grammar's text. Thread-safe.

    Args:
        compiler: over the model's vocabulary.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.num_mask_words = compiler.num_mask_words
        """See there."""
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def prepare(self, grammar: bytes) -> None:
        """Compile a grammar, so that `matcher` has it at hand.

        Raises:
            GrammarError: see `GrammarCompiler.compile`.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
        compiled = self._compiler.compile(grammar)  # others go on meanwhile
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: bytes) -> LLMatcher:
        """Return a matcher of one's own at the beginning of a grammar. Raises as `prepare`."""
        while True:
            self.prepare(grammar)
            with self._lock:
                compiled = self._compiled.get(grammar)
                if compiled is not None:
                    return compiled.deep_copy()
