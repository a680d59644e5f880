"""The one hot message: all new tokens of one step for one dispatcher, as packed columns.

No Python per token at either end: `pack` is a join of arrays, `unpack` makes read-only views into the message. All
numbers are little-endian; every length is checked before anything is read.

    offset  bytes  what
    0       4      magic b"SLTB"
    4       1      format version (3)
    5       1      length of the worker id, 1 to 64
    6       2      zero
    8       4      m = rows
    12      4      t = tokens in all rows
    16      8      counter of the (worker, dispatcher) channel
    24      4      e = bytes of the extras
    28      w      worker id, ASCII, padded with zeros to a multiple of 4
    28 + w         stream u32[m] · first_index u32[m] · tokens u32[t] · attempt u16[m] · count u8[m] · finish u8[m]
    then    e      extras (`shared.stream_extras`), checked only by who asks for them
    end - 4 4      checksum (`shared.checksum`)

12 bytes per row and 4 per token: 16 per token in a decode step. A row may have no token (a finish by itself); a stream
may have several rows, in order (a replay of more than 255 tokens).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shared.checksum import SEAL_BYTES, check_seal, seal
from shared.errors import WireError, WireSizeError
from shared.hot import hot_dataclass
from shared.ids import StreamId, WorkerId
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras, unpack_extras
from shared.subjects import check_token
from shared.transport.bus import MAX_PAYLOAD_BYTES
from shared.types import FinishReason

__all__ = ["MAX_STREAMS", "TokenBatch", "WireError"]

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

MAGIC: Final = b"SLTB"
FORMAT_VERSION: Final = 3
MAX_STREAMS: Final = 65_536
"""Most rows of one batch."""
MAX_COUNT: Final = 255
"""Most tokens of one row; more need another row of the same stream."""
ROW_BYTES: Final = 12
TOKEN_BYTES: Final = 4
_HEADER: Final = struct.Struct("<4sBBHIIQI")
_MAX_COUNTER: Final = 2**64 - 1
_FINISHES: Final = bytes(FinishReason)
_COLUMNS: Final = (  # in wire order; 4-byte columns first, so that every view is aligned
    ("stream", np.dtype("<u4")),
    ("first_index", np.dtype("<u4")),
    ("tokens", np.dtype("<u4")),
    ("attempt", np.dtype("<u2")),
    ("count", np.dtype("u1")),
    ("finish", np.dtype("u1")),
)


@hot_dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """New tokens of one step, row after row. Columns from `unpack` are read-only views that keep the message alive."""

    worker_id: WorkerId
    counter: int
    """Number of this message on the (worker, dispatcher) channel: grows by one with each, so that a loss shows."""
    stream: U32
    """[m] the dispatcher's handle of the request (`Submit.stream`)."""
    attempt: U16
    """[m] which attempt produced the tokens, at least 1."""
    first_index: U32
    """[m] index in the request's output of the row's first token."""
    count: U8
    """[m] tokens of the row; 0 for a finish by itself."""
    finish: U8
    """[m] `shared.types.FinishReason`; NONE while the stream goes on."""
    tokens: U32
    """[sum(count)] token ids, row after row."""
    extras: bytes = b""
    """What rarely goes with tokens, packed by `pack_extras`; empty in almost every step."""

    def __len__(self) -> int:
        return len(self.stream)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBatch):
            return NotImplemented
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name, _ in _COLUMNS)
        names = (self.worker_id, self.counter, self.extras)
        return same and names == (other.worker_id, other.counter, other.extras)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    @property
    def packed_bytes(self) -> int:
        """Size of `pack()`."""
        columns = ROW_BYTES * len(self.stream) + TOKEN_BYTES * len(self.tokens)
        return _prefix_bytes(self.worker_id) + columns + len(self.extras) + SEAL_BYTES

    def offsets(self) -> I64:
        """Return [m + 1]: the tokens of row i are `tokens[offsets[i]:offsets[i + 1]]`."""
        ends = np.zeros(len(self.count) + 1, dtype=np.int64)
        np.cumsum(self.count, out=ends[1:])
        return ends

    def stream_extras(self) -> list[StreamExtra]:
        """Return what goes with some rows; an empty list in almost every step.

        Raises:
            WireError: the extras are malformed or do not belong to these rows.
        """
        if not self.extras:
            return []
        extras = unpack_extras(self.extras)
        if extras[-1].row >= len(self):
            raise WireError(f"extras name row {extras[-1].row} of {len(self)}")
        if any(extra.logprobs and len(extra.logprobs) != self.count[extra.row] for extra in extras):
            raise WireError("extras: a row has other log-probabilities than tokens")
        return extras

    def pack(self) -> bytes:
        """Return the message. Columns of other integer types are converted if their values fit.

        Raises:
            ValueError: columns disagree in length, or a value does not fit its column.
            WireSizeError: over the limits of rows or bytes; `split` makes several messages.
        """
        columns = [_as_column(getattr(self, name), name, dtype) for name, dtype in _COLUMNS]
        num_rows, num_tokens, num_bytes = len(self.stream), len(self.tokens), self.packed_bytes
        if num_rows > MAX_STREAMS or num_bytes > MAX_PAYLOAD_BYTES:
            raise WireSizeError(f"token batch with {num_rows} rows", num_bytes, MAX_PAYLOAD_BYTES)
        if not 0 <= self.counter <= _MAX_COUNTER:
            raise ValueError(f"counter {self.counter} is not a u64")
        name = check_token(self.worker_id).encode("ascii")
        sizes = (num_rows, num_tokens, self.counter, len(self.extras))
        header = _HEADER.pack(MAGIC, FORMAT_VERSION, len(name), 0, *sizes)
        _check_columns(*columns)
        return seal(b"".join([header, name, bytes(-len(name) % 4), *(column.data for column in columns), self.extras]))

    @classmethod
    def unpack(cls, data: bytes) -> TokenBatch:
        """Return the batch that the message holds, without copying its columns.

        Raises:
            WireError: the bytes are no batch of this version, or contradict themselves.
        """
        worker_id, num_rows, num_tokens, counter, num_extra_bytes = _read_prefix(data)
        columns: list[NDArray[Any]] = []
        offset = _prefix_bytes(worker_id)
        for name, dtype in _COLUMNS:
            size = num_tokens if name == "tokens" else num_rows
            columns.append(np.frombuffer(data, dtype, size, offset))
            offset += size * dtype.itemsize
        extras = bytes(data[offset:-SEAL_BYTES]) if num_extra_bytes else b""
        try:
            _check_columns(*columns)
        except ValueError as error:
            raise WireError(f"token batch: {error}") from None
        stream, first_index, tokens, attempt, count, finish = columns
        return cls(worker_id, counter, stream, attempt, first_index, count, finish, tokens, extras)

    def split(self, max_bytes: int = MAX_PAYLOAD_BYTES) -> list[TokenBatch]:
        """Return the same rows in the same order as batches of at most `max_bytes` each, counters counting on.

        One batch in almost every step. An empty batch gives one empty batch.

        Raises:
            ValueError: a row by itself is larger than `max_bytes`.
            WireError: the batch is too large and its extras are malformed.
        """
        if self.packed_bytes <= max_bytes and len(self) <= MAX_STREAMS:
            return [self]
        room = max_bytes - _prefix_bytes(self.worker_id) - SEAL_BYTES
        token_ends = self.offsets()
        ends = token_ends * TOKEN_BYTES + np.arange(len(token_ends)) * ROW_BYTES
        extras = self.stream_extras()
        for extra in extras:
            ends[extra.row + 1 :] += extra.packed_bytes
        parts: list[TokenBatch] = []
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            stop = min(stop, start + MAX_STREAMS)
            if stop <= start:
                raise ValueError(f"row {start} does not fit a message of {max_bytes} bytes")
            part = self._rows(start, stop, token_ends)
            own = [replace(extra, row=extra.row - start) for extra in extras if start <= extra.row < stop]
            parts.append(replace(part, counter=self.counter + len(parts), extras=pack_extras(own)))
            start = stop
        return parts

    def _rows(self, start: int, stop: int, token_ends: I64) -> TokenBatch:
        return TokenBatch(
            worker_id=self.worker_id,
            counter=self.counter,
            stream=self.stream[start:stop],
            attempt=self.attempt[start:stop],
            first_index=self.first_index[start:stop],
            count=self.count[start:stop],
            finish=self.finish[start:stop],
            tokens=self.tokens[token_ends[start] : token_ends[stop]],
        )


def stream_batch(  # noqa: PLR0913 - one argument per column
    worker_id: WorkerId,
    *,
    counter: int,
    stream: StreamId,
    attempt: int,
    first_index: int,
    tokens: NDArray[np.integer],
    finish: FinishReason = FinishReason.NONE,
    logprobs: Sequence[TokenLogprob] = (),
) -> TokenBatch:
    """Return a batch with one stream's tokens, however many (the answer to a replay): rows of at most 255.

    The finish reason stands in the last row. `logprobs` belong to the last tokens: those before may go without.
    """
    bare = len(tokens) - len(logprobs)
    assert bare >= 0, "more log-probabilities than tokens"
    starts = np.array([*range(0, bare, MAX_COUNT), *range(bare, len(tokens), MAX_COUNT)] or [0], dtype=np.int64)
    finishes = np.zeros(len(starts), dtype=np.uint8)
    finishes[-1] = finish
    return TokenBatch(
        worker_id=worker_id,
        counter=counter,
        stream=np.full(len(starts), stream, dtype=np.uint32),
        attempt=np.full(len(starts), attempt, dtype=np.uint16),
        first_index=(starts + first_index).astype(np.uint32),
        count=np.diff(starts, append=len(tokens)).astype(np.uint8),
        finish=finishes,
        tokens=tokens.astype(np.uint32),
        extras=_pack_logprobs(logprobs, starts - bare),
    )


def _pack_logprobs(logprobs: Sequence[TokenLogprob], starts: I64) -> bytes:
    """Return the extras of rows whose log-probabilities begin at `starts`; a row that begins before has none."""
    own = ((i, tuple(logprobs[start : start + MAX_COUNT])) for i, start in enumerate(starts.tolist()) if start >= 0)
    return pack_extras([StreamExtra(i, logprobs=of_row) for i, of_row in own if of_row])


def _prefix_bytes(worker_id: str) -> int:
    return _HEADER.size + len(worker_id) + (-len(worker_id)) % 4


def _as_column(values: NDArray[Any], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values contiguous and in the wire's type; an unsafe conversion is checked value by value."""
    if values.dtype is dtype or values.dtype == dtype:
        return np.ascontiguousarray(values)
    if len(values):
        limits = np.iinfo(dtype)
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > limits.max:
            raise ValueError(f"column {name} ({values.dtype}) does not fit {limits.dtype}")
    return np.ascontiguousarray(values, dtype=dtype)


def _check_columns(stream: U32, first_index: U32, tokens: U32, attempt: U16, count: U8, finish: U8) -> None:
    """Refuse columns that contradict themselves (ValueError); they have the wire's types."""
    num_rows = len(stream)
    if not num_rows == len(attempt) == len(first_index) == len(count) == len(finish):
        raise ValueError("columns differ in length")
    is_plain = count.tobytes().count(1) == num_rows  # bytes: a fifth of what a reduction of a short array costs
    if (num_rows if is_plain else int(np.add.reduce(count, dtype=np.int64))) != len(tokens):
        raise ValueError("the rows' counts do not add up to the tokens")
    if num_rows == 0:
        return
    if finish.tobytes().translate(None, _FINISHES):
        raise ValueError("unknown finish reason")
    if np.count_nonzero(attempt) < num_rows:
        raise ValueError("attempt 0 does not exist")
    may_pass = int(np.maximum.reduce(first_index)) + MAX_COUNT > 2**32
    if may_pass and int((first_index.astype(np.int64) + count).max()) > 2**32:
        raise ValueError("an output index is over 32 bits")


def _read_prefix(data: bytes) -> tuple[WorkerId, int, int, int, int]:
    """Return (worker id, rows, tokens, counter, bytes of extras) after every check that needs no column."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise WireSizeError("token batch", len(data), MAX_PAYLOAD_BYTES)
    if len(data) < _HEADER.size:
        raise WireError(f"token batch of {len(data)} bytes is shorter than its header")
    magic, version, id_bytes, zero, num_rows, num_tokens, counter, num_extra_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC or zero != 0:
        raise WireError("not a token batch")
    if version != FORMAT_VERSION:
        raise WireError(f"the sender packs token batches in format {version}, this process reads {FORMAT_VERSION}")
    if num_rows > MAX_STREAMS:
        raise WireError(f"token batch with {num_rows} rows is over the limit of {MAX_STREAMS}")
    expected = _HEADER.size + id_bytes + (-id_bytes) % 4 + ROW_BYTES * num_rows + TOKEN_BYTES * num_tokens
    expected += num_extra_bytes + SEAL_BYTES
    if len(data) != expected:
        raise WireError(f"token batch of {len(data)} bytes, its header says {expected}")
    check_seal(data, "token batch")
    return _read_worker_id(data, id_bytes), num_rows, num_tokens, counter, num_extra_bytes


def _read_worker_id(data: bytes, id_bytes: int) -> WorkerId:
    start, stop = _HEADER.size, _HEADER.size + id_bytes
    if any(data[stop : stop + (-id_bytes) % 4]):
        raise WireError("token batch: padding is not zero")
    try:
        return _worker_id(bytes(data[start:stop]))
    except ValueError:
        raise WireError("token batch: the worker id is malformed") from None


@lru_cache(maxsize=1024)
def _worker_id(text: bytes) -> WorkerId:
    return WorkerId(check_token(text.decode("ascii")))
