"""Log-probabilities as the two endpoints write them, for the tokens whose text is being sent.

In a stream each token is written as JSON when its text is shown. An answer that is sent whole keeps numbers (8 bytes
for an alternative, whose JSON takes some 100) and is written while its reader takes it: the longest one with the most
alternatives neither fills the memory nor holds up other streams at its end.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_KEPT: Final = struct.Struct("<IQfB3x")
"""Token, offset, log-probability (NaN: it was lost), number of alternatives; behind it these, 8 bytes each."""
_PAIR_BYTES: Final = 8


class KeptLogprobs:
    """What is known of the tokens of one choice, packed: 20 bytes for each, and 8 for each alternative."""

    __slots__ = ("_packed",)

    def __init__(self) -> None:
        self._packed = bytearray()

    def add(self, choice: Choice, shown: Sequence[tuple[int, int]]) -> None:
        """Take the numbers of some tokens from the session; `shown` is from `AnswerText.take_shown`."""
        for token_id, offset, known in take_logprobs(choice, shown):
            logprob, top = (math.nan, ()) if known is None else (known.logprob, known.top)
            self._packed += _KEPT.pack(token_id, offset, logprob, len(top))
            self._packed += struct.pack("<" + "If" * len(top), *(part for pair in top for part in pair))

    def __iter__(self) -> Iterator[tuple[int, int, TokenLogprob | None]]:
        """The tokens as `take_logprobs` returned them."""
        at = 0
        while at < len(self._packed):
            token_id, offset, logprob, num_top = _KEPT.unpack_from(self._packed, at)
            at += _KEPT.size
            flat = struct.unpack_from("<" + "If" * num_top, self._packed, at)
            at += _PAIR_BYTES * num_top
            known = (
                None if math.isnan(logprob) else TokenLogprob(logprob, tuple(zip(flat[::2], flat[1::2], strict=True)))
            )
            yield token_id, offset, known


def take_logprobs(choice: Choice, shown: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, TokenLogprob | None]]:
    """Return token, offset and what is known of it, for tokens whose text is shown; the numbers leave the session.

    Args:
        choice: with log-probabilities in its session.
        shown: from `AnswerText.take_shown`.
    """
    session = choice.opened
    for index, offset in shown:
        yield session.tokens[index], offset, session.take_logprob(index)


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

    def join(self, choice: Choice, shown: Sequence[tuple[int, int]]) -> bytes:
        """Return the `logprobs` object of some tokens, whose numbers leave the session; see `take_logprobs`."""
        rows = [self._row(*token) for token in take_logprobs(choice, shown)]
        return b"".join(self._parts(lambda: rows))

    def parts(self, kept: KeptLogprobs) -> Iterator[bytes]:
        """Return the `logprobs` object of many tokens, some of them at a time."""
        return self._parts(lambda: (self._row(*token) for token in kept))

    def _parts(self, rows: Callable[[], Iterable[Row]]) -> Iterator[bytes]:
        """Write the rows, once for each array."""
        if self.is_chat:
            yield b'{"content":['
            yield from _column(rows(), 0)
            yield b'],"refusal":null}'
            return
        for at, name in enumerate(_COLUMNS):
            yield f'{"," if at else "{"}"{name}":'.encode()
            if name == "top_logprobs" and not self.num_top:
                yield b"null"
                continue
            yield b"["
            yield from _column(rows(), at)
            yield b"]"
        yield b"}"

    def _row(self, token_id: int, offset: int, known: TokenLogprob | None) -> Row:
        return (self._entry(token_id, known),) if self.is_chat else self._columns(token_id, offset, known)

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


def _column(rows: Iterable[Row], at: int) -> Iterator[bytes]:
    comma = ""
    for row in rows:
        yield (comma + row[at]).encode()
        comma = ","


def _finite(logprob: float) -> float:
    return max(logprob, EXCLUDED)
