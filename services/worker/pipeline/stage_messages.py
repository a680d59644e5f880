"""What the stages of a pipeline say to each other, and how it is framed as bytes. Pure.

    leader ──Batch, HostCopy, KvOver, Close──► every stage    stage ──Activation or StepFailed──► the next one
    last stage ──StepDone or StepFailed──► leader             every stage ──CopyEnded──► leader

Frames, little-endian: magic b"SLPS" · version u8 · kind u8 · 2 zero bytes · payload bytes u64 · payload. An
activation's numbers follow its header as they lie in memory, so that they are sent and received without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import HostCopy
from services.worker.pipeline.batch_wire import (
    Buffer,
    pack_batch,
    pack_copy,
    pack_output,
    unpack_batch,
    unpack_copy,
    unpack_output,
)
from shared.errors import WireError

Hidden = NDArray[Any]
"""Hidden states [t, hidden_size] of a step's tokens, float32, or uint16 with the bits of bfloat16. Of a modelled device
words [n] uint64, one per row: what the stages so far add to it (`shadow_kv.py`)."""

Durations = tuple[float, ...]
"""Seconds that each stage so far took for the step, from the first on."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A step behind a stage."""

    step_id: int
    num_tokens: int
    """Of the step: how much a real activation weighs."""
    hidden: Hidden
    durations_s: Durations


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step did not get past a stage. The stages behind it only take in what it says of rows and blocks."""

    step_id: int
    cause: str
    rows: tuple[int, ...]
    """Rows known to be guilty."""
    durations_s: Durations


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step behind the last stage."""

    output: BatchOutput
    durations_s: Durations


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A stage has copied its layers' share of some blocks, or failed to."""

    copy_id: int
    cause: str | None
    """None: it is done."""


@dataclass(frozen=True, slots=True)
class KvOver:
    """The leader expects no more KV that was on its way when the group formed. The batches behind it use its blocks."""


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing more comes from the leader."""


StageMessage = Batch | HostCopy | Activation | StepFailed | StepDone | CopyEnded | KvOver | Close


class _Kind(IntEnum):
    BATCH = 1
    COPY = 2
    ACTIVATION = 3
    FAILED = 4
    DONE = 5
    COPY_ENDED = 6
    CLOSE = 7
    KV_OVER = 8


FRAME: Final = struct.Struct("<4sBB2xQ")
MAX_PAYLOAD_BYTES: Final = 2**30
"""Largest payload: an activation of 65 536 tokens of 8 192 numbers in 16 bits."""
MAX_STAGES: Final = 256
_MAGIC: Final = b"SLPS"
_VERSION: Final = 1
_ACTIVATION: Final = struct.Struct("<qQBBHII4x")  # step, tokens, type, dimensions, stages, rows, columns
_FAILED: Final = struct.Struct("<qHHI")  # step, stages, bytes of the cause, guilty rows
_STAGES: Final = struct.Struct("<I")
_COPY_ENDED: Final = struct.Struct("<q?3x")
_DTYPES: Final = (np.dtype("<f4"), np.dtype("<u2"), np.dtype("<u8"))
_MAX_CAUSE_BYTES: Final = 4096


def pack(message: StageMessage) -> list[Buffer]:
    """Return the frame of a message, in parts that are to be sent one after the other."""
    kind, parts = _pack(message)
    size = sum(len(part) for part in parts)
    if size > MAX_PAYLOAD_BYTES:
        raise WireError(f"a stage message of {size} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return [FRAME.pack(_MAGIC, _VERSION, kind, size), *parts]


def read_frame(header: Buffer) -> tuple[int, int]:
    """Return kind and payload bytes of a frame from its first `FRAME.size` bytes.

    Raises:
        WireError: it is no frame of this version, or over the limit.
    """
    magic, version, kind, size = FRAME.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError("no stage message of this version")
    if kind not in list(_Kind) or size > MAX_PAYLOAD_BYTES:
        raise WireError(f"a stage message of kind {kind} and {size} bytes")
    return kind, size


def unpack(kind: int, payload: Buffer) -> StageMessage:
    """Return the message that a payload holds; arrays may be views of it.

    Raises:
        WireError: it holds anything else.
    """
    unpackers: dict[_Kind, Callable[[Buffer], StageMessage]] = {
        _Kind.BATCH: unpack_batch,
        _Kind.COPY: unpack_copy,
        _Kind.ACTIVATION: _unpack_activation,
        _Kind.FAILED: _unpack_failed,
        _Kind.DONE: _unpack_done,
        _Kind.COPY_ENDED: _unpack_copy_ended,
        _Kind.CLOSE: lambda payload: _unpack_nothing(payload, Close()),
        _Kind.KV_OVER: lambda payload: _unpack_nothing(payload, KvOver()),
    }
    try:
        return unpackers[_Kind(kind)](payload)
    except struct.error:
        raise WireError(f"a stage message of kind {kind} ends too early") from None


def _pack(message: StageMessage) -> tuple[_Kind, list[Buffer]]:
    match message:
        case Batch():
            return _Kind.BATCH, [pack_batch(message)]
        case HostCopy():
            return _Kind.COPY, [pack_copy(message)]
        case Activation():
            return _Kind.ACTIVATION, _pack_activation(message)
        case StepFailed():
            return _Kind.FAILED, [_pack_failed(message)]
        case StepDone():
            stages = _STAGES.pack(len(message.durations_s)) + _pack_durations(message.durations_s)
            return _Kind.DONE, [stages, pack_output(message.output)]
        case CopyEnded():
            cause = (message.cause or "").encode()[:_MAX_CAUSE_BYTES]
            return _Kind.COPY_ENDED, [_COPY_ENDED.pack(message.copy_id, message.cause is None) + cause]
        case Close():
            return _Kind.CLOSE, []
        case KvOver():
            return _Kind.KV_OVER, []


def _pack_activation(message: Activation) -> list[Buffer]:
    hidden = np.ascontiguousarray(message.hidden)
    rows, columns = (hidden.shape[0], 1) if hidden.ndim == 1 else hidden.shape
    place = (hidden.ndim, len(message.durations_s), rows, columns)
    header = _ACTIVATION.pack(message.step_id, message.num_tokens, _DTYPES.index(hidden.dtype), *place)
    return [header + _pack_durations(message.durations_s), hidden.reshape(-1).view(np.uint8).data]


def _unpack_activation(payload: Buffer) -> Activation:
    step_id, num_tokens, dtype, ndim, num_stages, rows, columns = _ACTIVATION.unpack_from(payload)
    if dtype >= len(_DTYPES) or ndim not in (1, 2) or (ndim == 1 and columns != 1):
        raise WireError("activation: no such array")
    durations_s, offset = _unpack_durations(payload, _ACTIVATION.size, num_stages)
    if len(payload) - offset != rows * columns * _DTYPES[dtype].itemsize:
        raise WireError(f"activation: {len(payload)} bytes are not what it says")
    if ndim == 2 and rows != num_tokens:
        raise WireError(f"activation: {rows} hidden states of {num_tokens} tokens")
    hidden = np.frombuffer(payload, dtype=_DTYPES[dtype], offset=offset)
    return Activation(step_id, num_tokens, hidden if ndim == 1 else hidden.reshape(rows, columns), durations_s)


def _pack_failed(message: StepFailed) -> bytes:
    cause = message.cause.encode(errors="replace")[:_MAX_CAUSE_BYTES]
    header = _FAILED.pack(message.step_id, len(message.durations_s), len(cause), len(message.rows))
    rows = np.array(message.rows, dtype="<i4").tobytes()
    return header + _pack_durations(message.durations_s) + rows + cause


def _unpack_failed(payload: Buffer) -> StepFailed:
    step_id, num_stages, cause_bytes, num_rows = _FAILED.unpack_from(payload)
    durations_s, offset = _unpack_durations(payload, _FAILED.size, num_stages)
    end = offset + 4 * num_rows
    if len(payload) != end + cause_bytes:
        raise WireError(f"failure: {len(payload)} bytes are not what it says")
    rows = np.frombuffer(payload, dtype="<i4", count=num_rows, offset=offset) if num_rows else np.zeros(0, np.int32)
    return StepFailed(step_id, bytes(payload[end:]).decode(errors="replace"), tuple(rows.tolist()), durations_s)


def _unpack_done(payload: Buffer) -> StepDone:
    (num_stages,) = _STAGES.unpack_from(payload)
    durations_s, offset = _unpack_durations(payload, _STAGES.size, num_stages)
    return StepDone(unpack_output(memoryview(payload)[offset:]), durations_s)


def _unpack_copy_ended(payload: Buffer) -> CopyEnded:
    copy_id, done = _COPY_ENDED.unpack_from(payload)
    cause = bytes(payload[_COPY_ENDED.size :]).decode(errors="replace")
    return CopyEnded(copy_id, None if done else cause)


def _unpack_nothing(payload: Buffer, message: Close | KvOver) -> Close | KvOver:
    if len(payload):
        raise WireError(f"{type(message).__name__}: it says nothing else")
    return message


def _pack_durations(durations_s: Durations) -> bytes:
    return struct.pack(f"<{len(durations_s)}d", *durations_s)


def _unpack_durations(payload: Buffer, offset: int, count: int) -> tuple[Durations, int]:
    """Return the durations and where they end."""
    if count > MAX_STAGES:
        raise WireError(f"{count} stages are over the limit of {MAX_STAGES}")
    durations_s = struct.unpack_from(f"<{count}d", payload, offset)
    if not all(0 <= duration_s < float("inf") for duration_s in durations_s):
        raise WireError("a stage's duration is no number of seconds")
    return durations_s, offset + 8 * count
