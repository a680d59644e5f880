"""A step on its way between processes: `Batch`, `BatchOutput` and `HostCopy` as bytes. Pure; every length is checked.

Little-endian. Only the rare parts are msgpack: rows that are new to the executor, with their sampling parameters.

    batch    step_id i64 · n t d c k a u32 · rows i32[n] · num_tokens i32[n] · start i32[n] · tokens i32[t] ·
             table delta: row i32[d], index i32[d], block_id i32[d] · copies: source i32[c], target i32[c] ·
             drops i32[k] · sample u8[n] · admits, a bytes of msgpack: [[row, num_prompt, tokens, sampling], …]
    output   step_id i64 · duration f64 · n u32 · e u32 · tokens i32[n] · log-probabilities, e bytes (`stream_extras`)
    copy     copy_id i64 · c u32 · to_host u8 · 3 zero bytes · device i32[c] · host i32[c]

Arrays that come out are read-only views of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import msgpack
import numpy as np

from services.worker.contract.arrays import EMPTY_I32, I32
from services.worker.contract.batch import NO_COPIES, NO_TABLE_DELTA, Batch, BatchOutput, CopyOps, RowInit, TableDelta
from services.worker.contract.executor import HostCopy
from services.worker.peers.frames import Buffer
from shared.errors import WireError
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras, unpack_extras
from shared.types import SamplingParams

_BATCH: Final = struct.Struct("<q6I")
_OUTPUT: Final = struct.Struct("<qdII")
_COPY: Final = struct.Struct("<qIB3x")
_I32: Final = np.dtype("<i4")


def pack_batch(batch: Batch) -> bytes:
    """Return the batch as bytes."""
    delta, copies = batch.table_delta, batch.copies
    admits = _pack_admits(batch.admits)
    header = _BATCH.pack(
        batch.step_id,
        batch.rows.size,
        batch.tokens.size,
        delta.row.size,
        copies.source.size,
        batch.drops.size,
        len(admits),
    )
    chosen = (batch.rows, batch.num_tokens, batch.start, batch.tokens)
    changed = (delta.row, delta.index, delta.block_id, copies.source, copies.target, batch.drops)
    return b"".join((header, *_as_bytes(chosen + changed), batch.sample.astype(np.uint8).tobytes(), admits))


def unpack_batch(data: Buffer) -> Batch:
    """Return the batch that the bytes hold.

    Raises:
        WireError: they hold anything else, or a batch that contradicts itself.
    """
    reader = _Reader(data, "batch")
    step_id, num_rows, num_tokens, num_delta, num_copies, num_drops, admits_bytes = reader.header(_BATCH)
    rows, counts, start = (reader.column(num_rows) for _ in range(3))
    tokens = reader.column(num_tokens)
    delta = TableDelta(*(reader.column(num_delta) for _ in range(3)))
    copies = CopyOps(*(reader.column(num_copies) for _ in range(2)))
    drops = reader.column(num_drops)
    sample = np.frombuffer(reader.take(num_rows), dtype=np.uint8)
    admits = _unpack_admits(reader.take(admits_bytes))
    reader.end()
    if step_id < 0 or not num_rows or np.unique(rows).size != num_rows:
        raise WireError("batch: no step, no row, or a row twice")
    if int(counts.min()) < 1 or int(counts.sum(dtype=np.int64)) != num_tokens:
        raise WireError("batch: the rows' tokens are not those of the batch")
    if int(sample.max()) > 1:
        raise WireError("batch: a flag is neither 0 nor 1")
    _check_none_negative("batch", (rows, start, delta.row, delta.index, delta.block_id, drops))
    _check_none_negative("batch", (copies.source, copies.target))
    return Batch(
        step_id=step_id,
        rows=rows,
        num_tokens=counts,
        start=start,
        tokens=tokens,
        sample=sample.view(np.bool_),
        table_delta=delta if num_delta else NO_TABLE_DELTA,
        copies=copies if num_copies else NO_COPIES,
        admits=admits,
        drops=drops if num_drops else EMPTY_I32,
    )


def pack_output(output: BatchOutput) -> bytes:
    """Return a step's output as bytes."""
    said = sorted((output.logprobs or {}).items())
    extras = pack_extras([StreamExtra(place, None, (logprob,)) for place, logprob in said])
    header = _OUTPUT.pack(output.step_id, output.duration_s, output.tokens.size, len(extras))
    return b"".join((header, *_as_bytes((output.tokens,)), extras))


def unpack_output(data: Buffer) -> BatchOutput:
    """Return the output that the bytes hold.

    Raises:
        WireError: they hold anything else.
    """
    reader = _Reader(data, "output")
    step_id, duration_s, num_rows, extras_bytes = reader.header(_OUTPUT)
    tokens = reader.column(num_rows)
    extras = unpack_extras(bytes(reader.take(extras_bytes)))
    reader.end()
    if step_id < 0 or not 0 <= duration_s < float("inf"):
        raise WireError("output: no step, or no duration")
    return BatchOutput(step_id, tokens, duration_s, _logprobs(extras, tokens))


def pack_copy(copy: HostCopy) -> bytes:
    """Return a copy between device and host as bytes."""
    header = _COPY.pack(copy.copy_id, copy.device.size, copy.to_host)
    return b"".join((header, *_as_bytes((copy.device, copy.host))))


def unpack_copy(data: Buffer) -> HostCopy:
    """Return the copy that the bytes hold.

    Raises:
        WireError: they hold anything else.
    """
    reader = _Reader(data, "copy")
    copy_id, num_blocks, to_host = reader.header(_COPY)
    device, host = reader.column(num_blocks), reader.column(num_blocks)
    reader.end()
    if copy_id < 0 or to_host > 1:
        raise WireError("copy: no copy, or no direction")
    _check_none_negative("copy", (device, host))
    return HostCopy(copy_id, device, host, to_host=bool(to_host))


class _Reader:
    """Walks through a message; nothing is read past its end."""

    def __init__(self, data: Buffer, what: str) -> None:
        self._data = memoryview(data).toreadonly()
        self._what = what
        self._offset = 0

    def header(self, record: struct.Struct) -> tuple[Any, ...]:
        return record.unpack(self.take(record.size))

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        if self._offset + size > len(self._data):
            raise WireError(f"{self._what} of {len(self._data)} bytes ends too early")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def column(self, count: int) -> I32:
        """Return the next numbers."""
        return np.frombuffer(self.take(count * _I32.itemsize), dtype=_I32)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._offset != len(self._data):
            raise WireError(f"{self._what} of {len(self._data)} bytes has more than it says")


def _as_bytes(columns: Iterable[I32]) -> list[bytes]:
    return [column.astype(_I32, copy=False).tobytes() for column in columns]


def _check_none_negative(what: str, columns: Iterable[I32]) -> None:
    if any(column.size and int(column.min()) < 0 for column in columns):
        raise WireError(f"{what}: a row, position or block is negative")


def _pack_admits(admits: tuple[RowInit, ...]) -> bytes:
    if not admits:
        return b""
    packed = [
        [init.row, init.num_prompt, *_as_bytes((init.tokens,)), init.sampling.model_dump(exclude_defaults=True)]
        for init in admits
    ]
    data: bytes = msgpack.packb(packed, use_bin_type=True)
    return data


def _unpack_admits(data: memoryview) -> tuple[RowInit, ...]:
    if not data:
        return ()
    try:
        return tuple(_row_init(*fields) for fields in msgpack.unpackb(data, raw=False))
    except (ValueError, TypeError, msgpack.UnpackException):  # pydantic's ValidationError is a ValueError
        raise WireError("batch: a new row is malformed") from None


def _row_init(row: int, num_prompt: int, tokens: bytes, sampling: dict[str, Any]) -> RowInit:
    numbers_are_right = type(row) is int and type(num_prompt) is int and row >= 0 and num_prompt >= 0
    if not numbers_are_right or not isinstance(tokens, bytes):
        raise ValueError("no row")
    known = np.frombuffer(tokens, dtype=_I32) if tokens else EMPTY_I32
    return RowInit(row, SamplingParams.model_validate(sampling), num_prompt, known)


def _logprobs(extras: list[StreamExtra], tokens: I32) -> dict[int, TokenLogprob] | None:
    if any(extra.row >= tokens.size or len(extra.logprobs) != 1 for extra in extras):
        raise WireError("output: log-probabilities of no token")
    return {extra.row: extra.logprobs[0] for extra in extras} or None
