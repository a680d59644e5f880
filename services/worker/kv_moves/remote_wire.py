"""Attention over keys that lie elsewhere, between two stages: frames with checksums, whose words are a lot and a layer.

    REMOTE_STEP     rows of the asking stage's step: how many, then of each its tokens, start, first and end, then the
                    places in the lot of the blocks that hold positions [first, end), row by row; all int32
    REMOTE_ASK      in one layer: queries as the model's type has them, then states, float32, unless all of them are
                    still empty; of the rows of the lot's last step
    REMOTE_ANSWER   the states with the keys of that layer in them
    REMOTE_FAILED   why there is no answer
    REMOTE_DONE     nothing more is asked

Both directions are used at the same time: each end asks and answers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.peers.frames import Buffer, FrameKind
from shared.errors import WireError

REMOTE_KINDS: Final = (
    FrameKind.REMOTE_STEP,
    FrameKind.REMOTE_ASK,
    FrameKind.REMOTE_ANSWER,
    FrameKind.REMOTE_FAILED,
    FrameKind.REMOTE_DONE,
)
_I4: Final = np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class StepRows:
    """Rows of a step whose keys lie in one lot."""

    num_tokens: I32
    """[n]"""
    start: I32
    """[n]"""
    first: I32
    """[n] positions [first, end) are wanted; multiples of SPLIT_KEYS."""
    end: I32
    """[n]"""
    places: I32
    """Blocks of these positions, row by row, in the order of the lot."""


def pack_rows(rows: StepRows) -> bytes:
    """Return the body of a STEP."""
    columns = (rows.num_tokens, rows.start, rows.first, rows.end, rows.places)
    packed = b"".join(np.ascontiguousarray(column, dtype=_I4).tobytes() for column in columns)
    return struct.pack("<I", len(rows.num_tokens)) + packed


def unpack_rows(body: Buffer, block_size: int, num_blocks: int) -> StepRows:
    """Return the rows that the body of a STEP holds.

    Args:
        body: as it came.
        block_size: tokens of a block.
        num_blocks: of the lot.

    Raises:
        WireError: it holds anything else.
    """
    if len(body) < 4 or len(body) % _I4.itemsize:
        raise WireError(f"{len(body)} bytes are no rows")
    (count,) = struct.unpack_from("<I", body)
    values = np.frombuffer(body, dtype=_I4, offset=4).astype(np.int32)
    if count * 4 > values.size:
        raise WireError(f"{count} rows in {len(body)} bytes")
    num_tokens, start, first, end = values[: 4 * count].reshape(4, count)
    places = values[4 * count :]
    ok = (num_tokens >= 1) & (first >= 0) & (first < end) & (end <= start)
    num_wanted = int((end - first).sum(dtype=np.int64)) // block_size
    if not ok.all() or num_wanted != places.size:
        raise WireError("rows that cannot be")
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < num_blocks:
        raise WireError(f"blocks are asked for that are not among {num_blocks}")
    return StepRows(num_tokens, start, first, end, places)
