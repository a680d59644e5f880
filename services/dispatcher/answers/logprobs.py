"""Log-probabilities as the two endpoints write them, for the tokens whose text is being sent.

Each token is written once, as JSON, when its text is shown: an answer that is sent whole joins what is written already,
so that the longest answer with the most alternatives does not hold up other streams at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.dispatcher.endpoints.call import Choice
from services.dispatcher.text.token_names import TokenNames
from shared.stream_extras import TokenLogprob

EXCLUDED: Final = -9999.0
"""OpenAI's number for a probability of zero, whose logarithm JSON cannot write; also where the number was lost."""

Row = tuple[str, ...]
"""One token as JSON: chat has one column, completions one for each array."""
_COLUMNS: Final = ("text_offset", "tokens", "token_logprobs", "top_logprobs")


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

    def rows(self, choice: Choice, shown: Sequence[tuple[int, int]]) -> list[Row]:
        """Return some tokens of a choice as JSON; their numbers leave the session.

        Args:
            choice: with log-probabilities in its session.
            shown: from `AnswerText.take_shown`.
        """
        session = choice.opened
        rows: list[Row] = []
        for index, offset in shown:
            token_id, known = session.tokens[index], session.take_logprob(index)
            rows.append((self._entry(token_id, known),) if self.is_chat else self._columns(token_id, offset, known))
        return rows

    def join(self, rows: Sequence[Row]) -> bytes:
        """Return the `logprobs` object of these tokens."""
        if self.is_chat:
            text = ",".join([row[0] for row in rows])
            return f'{{"content":[{text}],"refusal":null}}'.encode()
        arrays = [f"[{','.join([row[at] for row in rows])}]" for at in range(len(_COLUMNS))]
        if not self.num_top:
            arrays[-1] = "null"
        members = [f'"{name}":{array}' for name, array in zip(_COLUMNS, arrays, strict=True)]
        return f"{{{','.join(members)}}}".encode()

    def _entry(self, token_id: int, known: TokenLogprob | None) -> str:
        """Return a token of a chat."""
        top = known.top[: self.num_top] if known is not None else ()
        logprob = EXCLUDED if known is None else known.logprob
        alternatives = ",".join([f"{{{self._pair(*pair)}}}" for pair in top])
        return f'{{{self._pair(token_id, logprob)},"top_logprobs":[{alternatives}]}}'

    def _pair(self, token_id: int, logprob: float) -> str:
        return f'{self.names.fields_of(token_id)},"logprob":{_finite(logprob)!r}'

    def _columns(self, token_id: int, offset: int, known: TokenLogprob | None) -> Row:
        """Return a token of a completion."""
        name = self.names.json_of(token_id)
        if known is None:
            return str(offset), name, "null", "null"
        named: dict[str, float] = {}  # best first; of two tokens with one name, the likelier
        for other, logprob in (*known.top[: self.num_top], (token_id, known.logprob)):
            named.setdefault(self.names.json_of(other), _finite(logprob))
        top = ",".join([f"{key}:{logprob!r}" for key, logprob in named.items()])
        return str(offset), name, repr(_finite(known.logprob)), f"{{{top}}}"


def _finite(logprob: float) -> float:
    return max(logprob, EXCLUDED)
