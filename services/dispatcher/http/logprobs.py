"""Log-probabilities as the two endpoints write them, for the tokens whose text is being sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.dispatcher.http.call import Choice
from services.dispatcher.text.token_names import TokenNames
from shared.stream_extras import TokenLogprob

EXCLUDED: Final = -9999.0
"""OpenAI's number for a probability of zero, whose logarithm JSON cannot write; also where the number was lost."""


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Writes what one request asked for.

    Args:
        is_chat: chat's shape or completions'.
        num_top: alternatives per token.
        names: of the model's tokens.
    """

    is_chat: bool
    num_top: int
    names: TokenNames

    def write(self, choice: Choice, shown: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the `logprobs` of some tokens of a choice.

        Args:
            choice: with log-probabilities in its session.
            shown: from `AnswerText.take_shown`.
        """
        session = choice.opened
        assert session.logprobs is not None, "the request did not ask for log-probabilities"
        found = [(session.tokens[index], session.logprobs[index]) for index, _ in shown]
        if self.is_chat:
            return {"content": [self._chat_entry(token_id, known) for token_id, known in found], "refusal": None}
        return {
            "text_offset": [offset for _, offset in shown],
            "tokens": [self.names.name_of(token_id) for token_id, _ in found],
            "token_logprobs": [_finite(known.logprob) if known is not None else None for _, known in found],
            "top_logprobs": [self._named(token_id, known) for token_id, known in found] if self.num_top else None,
        }

    def _chat_entry(self, token_id: int, known: TokenLogprob | None) -> dict[str, Any]:
        top = known.top[: self.num_top] if known is not None else ()
        logprob = EXCLUDED if known is None else known.logprob
        return {**self._pair(token_id, logprob), "top_logprobs": [self._pair(*pair) for pair in top]}

    def _pair(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.names.bytes_of(token_id)
        return {"token": self.names.name_of(token_id), "logprob": _finite(logprob), "bytes": list(data)}

    def _named(self, token_id: int, known: TokenLogprob | None) -> dict[str, float] | None:
        """Return the alternatives by name, best first, and the chosen token; of two with one name, the likelier."""
        if known is None:
            return None
        named: dict[str, float] = {}
        for other, logprob in (*known.top[: self.num_top], (token_id, known.logprob)):
            named.setdefault(self.names.name_of(other), _finite(logprob))
        return named


def _finite(logprob: float) -> float:
    return max(logprob, EXCLUDED)
