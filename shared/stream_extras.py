"""What travels with tokens only now and then: cached tokens, log-probabilities, who goes on, preemptions.

The end of a `TokenBatch`, empty in almost every step. Little-endian; rows in ascending order, each at most once:

    per row     u32 row · u32 cached tokens (0xFFFFFFFF: not said) · u8 n · u8 w · u16 preemptions · n times:
    per token     f32 log-probability · u8 k · 3 zero bytes · k times (u32 id · f32 log-probability)
                then w bytes, the id of a worker

12 bytes per row, 8 per token and 8 per alternative. Logits are float32, so float32 loses nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shared.errors import WireError
from shared.subjects import check_token
from shared.types import MAX_TOP_LOGPROBS

MAX_ROW_LOGPROBS: Final = 255
"""Most tokens of one row, as in a `TokenBatch`."""
_ROW: Final = struct.Struct("<IIBBH")
_TOKEN_PADDING: Final = 3
_TOKEN: Final = struct.Struct("<fB3x")
_PAIR_BYTES: Final = 8
_NOT_SAID: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely one token was: natural logarithms of the model's probabilities, before temperature and penalties."""

    logprob: float
    """Of the chosen token; at most 0, float32, minus infinity for a token that the model excludes."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens (id, log-probability), best first, the lowest id first on a tie; at most 20."""


@dataclass(frozen=True, slots=True)
class StreamExtra:
    """What goes with one row of a `TokenBatch`."""

    row: int
    """Row of the batch."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was there already; None: not said here."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the row, or none at all."""
    moved_to: str = ""
    """The worker at which a sequence should go on that this one gives up; empty: wherever there is room."""
    num_preemptions: int = 0
    """How often the request has been preempted by now, at most 65 535; 0: not said here."""

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes in `pack_extras`."""
        tokens = sum(_TOKEN.size + _PAIR_BYTES * len(token.top) for token in self.logprobs)
        return _ROW.size + tokens + len(self.moved_to)


def pack_extras(extras: Sequence[StreamExtra]) -> bytes:
    """Return the extras as bytes; none gives b"".

    Raises:
        ValueError: rows out of order, or a value outside its range.
    """
    _check_order(extra.row for extra in extras)
    try:
        return b"".join(part for extra in extras for part in _pack_row(extra))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"an extra does not fit: {error}") from None


def unpack_extras(data: bytes) -> list[StreamExtra]:
    """Return the extras that the bytes hold; every length is checked before it is used.

    Raises:
        WireError: the bytes are anything else.
    """
    reader = _Reader(data)
    extras: list[StreamExtra] = []
    while reader.offset < len(data):
        row, cached, num_tokens, name_size, num_preemptions = reader.read(_ROW)
        logprobs = tuple(reader.token() for _ in range(num_tokens))
        moved_to = reader.name(name_size) if name_size else ""
        extras.append(StreamExtra(row, None if cached == _NOT_SAID else cached, logprobs, moved_to, num_preemptions))
    try:
        _check_order(extra.row for extra in extras)
    except ValueError as error:
        raise WireError(f"extras: {error}") from None
    return extras


def _check_order(rows: Iterable[int]) -> None:
    last = -1
    for row in rows:
        if row <= last:
            raise ValueError("rows are not in ascending order")
        last = row


def _pack_row(extra: StreamExtra) -> Iterator[bytes]:
    if len(extra.logprobs) > MAX_ROW_LOGPROBS:
        raise ValueError(f"{len(extra.logprobs)} log-probabilities in a row, the limit is {MAX_ROW_LOGPROBS}")
    if extra.cached_tokens == _NOT_SAID:
        raise ValueError(f"{_NOT_SAID} cached tokens cannot be said")
    cached = _NOT_SAID if extra.cached_tokens is None else extra.cached_tokens
    name = check_token(extra.moved_to).encode() if extra.moved_to else b""
    yield _ROW.pack(extra.row, cached, len(extra.logprobs), len(name), extra.num_preemptions)
    for token in extra.logprobs:
        if len(token.top) > MAX_TOP_LOGPROBS:
            raise ValueError(f"{len(token.top)} alternatives of a token, the limit is {MAX_TOP_LOGPROBS}")
        if not all(value <= 0 for value in (token.logprob, *(value for _, value in token.top))):
            raise ValueError("a log-probability is at most 0")
        yield _TOKEN.pack(token.logprob, len(token.top))
        yield struct.pack("<" + "If" * len(token.top), *(part for pair in token.top for part in pair))
    yield name


class _Reader:
    """Walks through the bytes; nothing is read past their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def read(self, record: struct.Struct) -> tuple[Any, ...]:
        """Return the fields of the next record."""
        if self.offset + record.size > len(self._data):
            raise WireError(f"extras of {len(self._data)} bytes end within a record")
        fields = record.unpack_from(self._data, self.offset)
        self.offset += record.size
        return fields

    def token(self) -> TokenLogprob:
        """Return the next token's log-probability and alternatives."""
        logprob, num_top = self.read(_TOKEN)
        if any(self._data[self.offset - _TOKEN_PADDING : self.offset]):
            raise WireError("extras: padding is not zero")
        if num_top > MAX_TOP_LOGPROBS:
            raise WireError(f"extras: {num_top} alternatives of a token are over the limit of {MAX_TOP_LOGPROBS}")
        flat = self.read(struct.Struct("<" + "If" * num_top))
        if not all(value <= 0 for value in (logprob, *flat[1::2])):
            raise WireError("extras: a log-probability is over 0 or no number")
        return TokenLogprob(logprob, tuple(zip(flat[::2], flat[1::2], strict=True)))

    def name(self, size: int) -> str:
        """Return a worker's id."""
        (data,) = self.read(struct.Struct(f"<{size}s"))
        try:
            return check_token(data.decode("ascii"))
        except ValueError:
            raise WireError("extras: what should be a worker's id is none") from None
