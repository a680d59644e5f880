"""What the stages of a pipeline say to each other, and how it is said in bytes. Pure.

    leader ──Batch, HostCopy, KvOver, Alive, StageClose──► every stage  stage ──Activation or StepFailed──► the next one
    last stage ──StepDone or StepFailed──► leader             every stage ──CopyEnded──► leader

Each is a frame (`peers/frames.py`) without a checksum. An activation's numbers lie in it as they lie in memory, so that
they are sent and received without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import HostCopy
from services.worker.peers.frames import Buffer, FrameKind
from services.worker.pipeline.batch_wire import (
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
class Alive:
    """The leader is there, whether or not there are steps to make."""


@dataclass(frozen=True, slots=True)
class StageClose:
    """Nothing more comes from the leader."""


StageMessage = Batch | HostCopy | Activation | StepFailed | StepDone | CopyEnded | KvOver | Alive | StageClose

MAX_STAGES: Final = 256
_ACTIVATION: Final = struct.Struct("<qQBBHII4x")  # step, tokens, type, dimensions, stages, rows, columns
_FAILED: Final = struct.Struct("<qHHI")  # step, stages, bytes of the cause, guilty rows
_STAGES: Final = struct.Struct("<I")
_COPY_ENDED: Final = struct.Struct("<q?3x")
_DTYPES: Final = (np.dtype("<f4"), np.dtype("<u2"), np.dtype("<u8"))
_MAX_CAUSE_BYTES: Final = 4096
_BARE: Final = {StageClose: FrameKind.CLOSE, KvOver: FrameKind.KV_OVER, Alive: FrameKind.ALIVE}
"""Messages that say all by their kind."""


def pack(message: StageMessage) -> tuple[FrameKind, list[Buffer]]:
    """Return the kind of a message's frame, and the parts of its payload."""
    match message:
        case Batch():
            return FrameKind.BATCH, [pack_batch(message)]
        case HostCopy():
            return FrameKind.HOST_COPY, [pack_copy(message)]
        case Activation():
            return FrameKind.ACTIVATION, _pack_activation(message)
        case StepFailed():
            return FrameKind.STEP_FAILED, [_pack_failed(message)]
        case StepDone():
            stages = _STAGES.pack(len(message.durations_s)) + _pack_durations(message.durations_s)
            return FrameKind.STEP_DONE, [stages, pack_output(message.output)]
        case CopyEnded():
            cause = (message.cause or "").encode()[:_MAX_CAUSE_BYTES]
            return FrameKind.COPY_ENDED, [_COPY_ENDED.pack(message.copy_id, message.cause is None) + cause]
        case StageClose() | KvOver() | Alive():
            return _BARE[type(message)], []


def unpack(kind: FrameKind, payload: Buffer) -> StageMessage:
    """Return the message that a payload holds; arrays may be views of it.

    Raises:
        WireError: it holds anything else.
    """
    try:
        return _UNPACKERS[kind](payload)
    except struct.error:
        raise WireError(f"{kind.name} ends too early") from None


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


def _unpack_nothing(payload: Buffer, message: StageClose | KvOver | Alive) -> StageClose | KvOver | Alive:
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


_UNPACKERS: Final[Mapping[FrameKind, Callable[[Buffer], StageMessage]]] = {
    FrameKind.BATCH: unpack_batch,
    FrameKind.HOST_COPY: unpack_copy,
    FrameKind.ACTIVATION: _unpack_activation,
    FrameKind.STEP_FAILED: _unpack_failed,
    FrameKind.STEP_DONE: _unpack_done,
    FrameKind.COPY_ENDED: _unpack_copy_ended,
    FrameKind.CLOSE: lambda payload: _unpack_nothing(payload, StageClose()),
    FrameKind.ALIVE: lambda payload: _unpack_nothing(payload, Alive()),
    FrameKind.KV_OVER: lambda payload: _unpack_nothing(payload, KvOver()),
}
STAGE_KINDS: Final = tuple(_UNPACKERS)
