"""What the reader of one answer has, as its tokens come: the schedule that its worker follows, kept here too.

An answer that thinks has no reader until its thinking ends. Until then its tokens are wanted at a speed of their own,
as if they were read (`services/worker/sequences/reading.py`), and QoE counts none of them.
"""

from __future__ import annotations

from math import isnan, nan

from services.dispatcher.session.request import NewRequest
from shared.qoe import text_ttft_s
from shared.types import Thinking


class ReaderProgress:
    """Owned by a `Session`, which tells it of every token. Instants are those of the event loop's clock.

    Args:
        request: of the answer. What an earlier connection got of it counts as shown on time.
    """

    __slots__ = ("_request", "gap_s", "num_thought", "shown_s", "thinking", "thought_at_s")

    def __init__(self, request: NewRequest) -> None:
        tokens, thinking, target = request.generated, request.sampling.thinking, request.qoe
        num_thought = 0 if thinking is None else thinking.count(tokens)
        self._request = request
        self.thinking: Thinking | None = thinking if num_thought is None else None
        """How to tell its end; None: what is still to come is text."""
        self.num_thought = num_thought or 0
        """First tokens of the answer that are thinking, tags included, once that has ended."""
        self.thought_at_s = nan
        """When it ended; NaN if it did not, or nobody knows."""
        self.gap_s = nan
        """Between two tokens as they are wanted now; NaN without a reader."""
        self.shown_s = nan
        """When the newest token is displayed; NaN without a reader."""
        if target is not None:
            speed = target.thinking_speed_tokens_per_s if self.thinks(len(tokens)) else target.speed_tokens_per_s
            self.gap_s, num_read = 1 / speed, len(tokens) - self.num_thought
            self.shown_s = request.arrival_s + target.ttft_s + (num_read - 1) * self.gap_s

    def thinks(self, num_tokens: int) -> bool:
        """Return whether an answer of so many tokens goes on with thinking; without any, if its prompt has begun it."""
        return self.thinking is not None and (self.thinking.is_open or num_tokens > 0)

    @property
    def thought_s(self) -> float | None:
        """When the thinking ended, seconds after the arrival; None if it did not, or nobody knows."""
        return None if isnan(self.thought_at_s) else self.thought_at_s - self._request.arrival_s

    @property
    def ttft_s(self) -> float:
        """When the first token of the text is expected, seconds after the arrival; NaN without a reader."""
        target = self._request.qoe
        return nan if target is None else text_ttft_s(target.ttft_s, target.speed_tokens_per_s, self.thought_s)

    def take(self, num_known: int, token_ids: list[int], now_s: float) -> None:
        """Some tokens, at least one, have come.

        Args:
            num_known: that were there before.
            token_ids: of those that came.
            now_s: when.
        """
        num_text = len(token_ids) if self.thinking is None else self._think(self.thinking, num_known, token_ids, now_s)
        if num_text:
            self._show(num_text, now_s)

    def _show(self, count: int, now_s: float) -> None:
        shown_s = max(self.shown_s + self.gap_s, now_s)  # in this order NaN stays
        self.shown_s = shown_s + (count - 1) * self.gap_s

    def _think(self, thinking: Thinking, num_known: int, token_ids: list[int], now_s: float) -> int:
        """Take what is thinking of some tokens; return how many of the last ones are text."""
        target = self._request.qoe
        if not (num_known or thinking.is_open):  # the first one decides
            if token_ids[0] != thinking.opening_id:
                self.thinking = None
                return len(token_ids)
            if target is not None:
                self._expect(self._request.arrival_s + target.ttft_s, target.thinking_speed_tokens_per_s)
        if thinking.closing_id not in token_ids:
            self._show(len(token_ids), now_s)
            return 0
        num_ended = token_ids.index(thinking.closing_id) + 1
        self.thinking, self.num_thought, self.thought_at_s = None, num_known + num_ended, now_s
        if target is not None:
            self._expect(self._request.arrival_s + self.ttft_s, target.speed_tokens_per_s)
        return len(token_ids) - num_ended

    def _expect(self, first_at_s: float, speed: float) -> None:
        """Let the next token be the first one that is read, expected at an instant."""
        self.gap_s = 1 / speed
        self.shown_s = first_at_s - self.gap_s
