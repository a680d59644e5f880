"""Any message of the bus as something that JSON can show: its format, its fields, and no text of people unasked.

Prompts and answers travel as token ids. They are counted, not shown, unless the ids are asked for.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

from shared.wire import WireError, read_fields

_BATCH_MAGIC = b"SLTB"
_MAX_HEAD_BYTES = 32
_MAX_TEXT = 200


def describe(data: bytes, *, with_tokens: bool = False) -> dict[str, Any]:
    """Return what the payload is: `format` (empty, json, msgpack, token_batch, text or unknown) and `message`.

    Args:
        data: the payload.
        with_tokens: show the ids of prompts and answers, from which their text can be read.
    """
    if not data:
        return {"format": "empty"}
    if data.startswith(_BATCH_MAGIC):
        return _describe_batch(data, with_tokens=with_tokens)
    try:
        fields = read_fields(data)
    except WireError as error:
        return _describe_other(data, error)
    return {"format": "json" if data[:1] == b"{" else "msgpack", "message": _shown(fields, with_tokens=with_tokens)}


def _describe_other(data: bytes, error: WireError) -> dict[str, Any]:
    if len(data) <= _MAX_TEXT:
        with suppress(UnicodeDecodeError):
            text = data.decode()
            if text.isprintable():
                return {"format": "text", "message": text}
    return {"format": "unknown", "error": error.reason, "head": data[:_MAX_HEAD_BYTES].hex()}


def _describe_batch(data: bytes, *, with_tokens: bool) -> dict[str, Any]:
    from shared.token_batch import TokenBatch  # numpy is not needed for the rest
    from shared.types import FinishReason

    try:
        batch = TokenBatch.unpack(data)
        extras = {extra.row: extra for extra in batch.stream_extras()}
    except WireError as error:
        return _describe_other(data, error)
    rows, ends = [], batch.offsets().tolist()
    for index, stream in enumerate(batch.stream.tolist()):
        row: dict[str, Any] = {"stream": stream, "attempt": int(batch.attempt[index])}
        row |= {"first_index": int(batch.first_index[index]), "num_tokens": int(batch.count[index])}
        if batch.finish[index]:
            row["finish"] = FinishReason(int(batch.finish[index])).name.lower()
        if index in extras:
            row |= {"cached_tokens": extras[index].cached_tokens, "num_logprobs": len(extras[index].logprobs)}
            if extras[index].num_preemptions:
                row["num_preemptions"] = extras[index].num_preemptions
        if with_tokens:
            row["tokens"] = batch.tokens[ends[index] : ends[index + 1]].tolist()
        rows.append(row)
    return {
        "format": "token_batch",
        "message": {"worker_id": batch.worker_id, "counter": batch.counter, "rows": rows},
    }


def _shown(value: Any, *, with_tokens: bool) -> Any:
    """Return the value with bytes, which JSON does not have, in words or numbers."""
    if isinstance(value, dict):
        return {str(key): _shown(item, with_tokens=with_tokens) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item, with_tokens=with_tokens) for item in value]
    if not isinstance(value, bytes):
        return value
    if len(value) % 4:
        return {"num_bytes": len(value)}
    if with_tokens:
        return [token for (token,) in struct.iter_unpack("<I", value)]
    return {"num_tokens": len(value) // 4}
