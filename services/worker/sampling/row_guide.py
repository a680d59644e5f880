"""The guide of one row: a machine that follows the row's tokens, and says which may be drawn next.

thinking ──budget used up──► closing tag, forced ──► grammar ──► end
    └────────closing tag────────────────────────────────┘
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.worker.contract.arrays import I32
from services.worker.contract.batch import RowInit
from shared.grammars import GrammarError
from shared.types import SamplingParams

WORD_BITS: Final = 32

Words = NDArray[np.uint32]
"""[..., num_words] one bit per token, the lowest first: 1 may be drawn."""


class _Stage(Enum):
    UNDECIDED = auto()
    """Nothing was drawn yet: it thinks if it opens the tag."""
    THINKING = auto()
    SPEAKING = auto()


class RowGuide:
    """What one row may draw next.

    Args:
        sampling: its parameters, which are guided.
        end_ids: that end a sequence.
        matcher: of its grammar, at the beginning; None: it has none.
    """

    def __init__(self, sampling: SamplingParams, end_ids: Sequence[int], matcher: LLMatcher | None) -> None:
        thinking = sampling.thinking
        self._thinking = thinking
        self._end_ids = end_ids
        self._matcher = matcher
        self._num_thoughts = 0
        self._stage = _Stage.SPEAKING
        if thinking is not None:
            self._stage = _Stage.THINKING if thinking.is_open else _Stage.UNDECIDED

    def follow(self, token_id: int) -> None:
        """The row goes on with this token.

        Raises:
            GrammarError: its grammar does not.
        """
        thinking = self._thinking
        if self._stage is _Stage.SPEAKING or thinking is None:
            self._match(token_id)
        elif self._stage is _Stage.UNDECIDED:
            self._stage = _Stage.THINKING if token_id == thinking.opening_id else _Stage.SPEAKING
            if self._stage is _Stage.SPEAKING:
                self._match(token_id)
        elif token_id == thinking.closing_id:
            self._stage = _Stage.SPEAKING
        else:
            self._num_thoughts += 1

    @property
    def asks_matcher(self) -> LLMatcher | None:
        """What says which tokens may be drawn next, before `adjust` has its say; None: all may."""
        return None if self._stage is _Stage.THINKING else self._matcher

    def adjust(self, words: Words) -> bool:
        """Change what the matcher says by what the thinking asks for.

        Args:
            words: [num_words] of this row, all ones where there is no matcher to ask.

        Returns:
            Whether anything is excluded.
        """
        thinking = self._thinking
        if thinking is None or self._stage is _Stage.SPEAKING:
            return self._matcher is not None
        if self._stage is _Stage.UNDECIDED:
            _set_bit(words, thinking.opening_id)
            return self._matcher is not None
        if thinking.budget is not None and self._num_thoughts >= thinking.budget:
            words[:] = 0
            _set_bit(words, thinking.closing_id)
            return True
        if self._matcher is None:
            return False
        for token_id in self._end_ids:  # what it is held to is still to come
            words[token_id // WORD_BITS] &= ~_bit(token_id)
        return True

    def _match(self, token_id: int) -> None:
        if self._matcher is not None and not self._matcher.consume_token(token_id):
            raise GrammarError(self._matcher.get_error() or f"token {token_id} breaks the grammar")


class GuidedRow:
    """A guided row of the table.

    Args:
        init: as it was admitted.
    """

    def __init__(self, init: RowInit) -> None:
        self.sampling = init.sampling
        self.guide: RowGuide | None = None
        """None until a mask is wanted: making it may take a while."""
        self.drawn: Callable[[], int] | None = None
        """Waits for the newest token that only the device had."""
        self._num_prompt = init.num_prompt
        self._outputs = array("i", init.tokens[init.num_prompt :].tolist())
        self._num_followed = 0  # of the outputs

    def extend(self, token_ids: I32) -> None:
        """Go on with these tokens [n]; what is below 0 is what `drawn` waits for, and the last one."""
        self._outputs.extend(token_ids.tolist())

    def cut(self, num_tokens: int) -> None:
        """Take back what is behind the first tokens, prompt and outputs; the next one is drawn anew."""
        del self._outputs[num_tokens - self._num_prompt :]
        self.guide = None  # it may have followed what is cut, or failed to

    def catch_up(self, make: Callable[[SamplingParams], RowGuide]) -> RowGuide:
        """Return the guide, which has followed all outputs.

        Args:
            make: makes it, at its beginning.

        Raises:
            GrammarError: the grammar does not compile, or the tokens break it.
        """
        outputs = self._outputs
        if outputs and outputs[-1] < 0:
            assert self.drawn is not None, "a token is missing that no step has drawn"
            outputs[-1] = self.drawn()
        if self.guide is None:
            self.guide, self._num_followed = make(self.sampling), 0
        while self._num_followed < len(outputs):
            self.guide.follow(outputs[self._num_followed])
            self._num_followed += 1
        return self.guide


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % WORD_BITS)


def _set_bit(words: Words, token_id: int) -> None:
    words[token_id // WORD_BITS] |= _bit(token_id)
