from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checksum import SEAL_BYTES, seal
from shared.ids import StreamId, WorkerId
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras
from shared.token_batch import MAX_COUNT, MAX_STREAMS, TokenBatch, WireError, stream_batch
from shared.transport.bus import MAX_PAYLOAD_BYTES
from shared.types import FinishReason
from shared.wire import WireSizeError
from tests.unit.golden.samples import BATCH, read_hex

W0 = WorkerId("w0")


def batch_of(counts: list[int], *, worker_id: str = "w0", counter: int = 1) -> TokenBatch:
    num_rows, num_tokens = len(counts), sum(counts)
    return TokenBatch(
        worker_id=WorkerId(worker_id),
        counter=counter,
        stream=np.arange(num_rows, dtype=np.uint32),
        attempt=np.ones(num_rows, dtype=np.uint16),
        first_index=np.arange(num_rows, dtype=np.uint32) * 10,
        count=np.array(counts, dtype=np.uint8),
        finish=np.zeros(num_rows, dtype=np.uint8),
        tokens=np.arange(num_tokens, dtype=np.uint32) + 1000,
    )


def assert_consistent(batch: TokenBatch) -> None:
    num_rows = len(batch)
    for column in (batch.stream, batch.attempt, batch.first_index, batch.count, batch.finish):
        assert column.shape == (num_rows,)
    assert batch.tokens.shape == (int(batch.count.sum(dtype=np.int64)),)
    assert batch.offsets()[-1] == len(batch.tokens)
    for finish in batch.finish:
        FinishReason(int(finish))
    assert num_rows <= MAX_STREAMS
    assert 1 <= len(batch.worker_id) <= 64


BATCHES = st.builds(
    lambda counts, worker_id, counter: batch_of(counts, worker_id=worker_id, counter=counter),
    st.lists(st.integers(0, 255), max_size=12),
    st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.integers(0, 2**64 - 1),
)


def test_the_layout_is_the_documented_one() -> None:
    """28 bytes of header, 5 of worker id padded to 8, then 12 per row and 4 per token, the extras, the checksum."""
    expected = struct.pack("<4sBBHIIQI", b"SLTB", 3, 5, 0, 3, 3, 2**40 + 1, 68) + b"w0-a1\0\0\0"
    expected += struct.pack("<3I", 7, 4_000_000_000, 9) + struct.pack("<3I", 0, 300, 70_000)
    expected += struct.pack("<3I", 11, 2**32 - 1, 33)
    expected += struct.pack("<3H", 1, 2, 65_535) + bytes([1, 2, 0]) + bytes([0, 2, 3])
    expected += struct.pack("<IIB3x", 0, 64, 0) + struct.pack("<IIB3x", 1, 2**32 - 1, 2)
    expected += struct.pack("<fB3xIfIf", -0.5, 2, 9, -0.25, 2**32 - 1, -0.5) + struct.pack("<fB3x", -np.inf, 0)
    expected += struct.pack("<IIBBH", 2, 2**32 - 1, 0, 0, 300)
    expected += struct.pack("<I", zlib.crc32(expected))
    assert BATCH.pack() == expected
    assert len(expected) == BATCH.packed_bytes


def test_golden_bytes_unpack_to_the_batch() -> None:
    assert TokenBatch.unpack(read_hex("token_batch")) == BATCH


def test_batches_differ_if_any_part_differs() -> None:
    changes: list[dict[str, Any]] = [
        {"counter": 5},
        {"worker_id": WorkerId("w9")},
        {"tokens": BATCH.tokens + np.uint32(1)},
        {"finish": np.zeros(3, dtype=np.uint8)},
        {"extras": b""},
    ]
    for change in changes:
        assert replace(BATCH, **change) != BATCH


@pytest.mark.parametrize("num_rows", [32, 1024])
def test_a_decode_step_takes_16_bytes_per_token_and_a_small_header(num_rows: int) -> None:
    assert len(batch_of([1] * num_rows).pack()) <= 16 * num_rows + 36


@settings(max_examples=100)
@given(BATCHES)
def test_batches_survive_the_way_there_and_back(batch: TokenBatch) -> None:
    data = batch.pack()
    assert len(data) == batch.packed_bytes
    again = TokenBatch.unpack(data)
    assert_consistent(again)
    assert again == batch


def test_unpacked_columns_are_read_only_views_of_the_message() -> None:
    batch = TokenBatch.unpack(BATCH.pack())
    for column in (batch.stream, batch.attempt, batch.first_index, batch.count, batch.finish, batch.tokens):
        assert not column.flags.owndata
        assert column.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


@settings(max_examples=500)
@given(st.data())
def test_a_mutated_message_is_refused_or_consistent(data: st.DataObject) -> None:
    """The checksum is that of the mutated message, so that all checks behind it are reached."""
    body = bytearray(BATCH.pack()[:-SEAL_BYTES])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    message = seal(bytes(body))
    try:
        batch = TokenBatch.unpack(message)
    except WireError:
        return
    assert_consistent(batch)
    assert batch.pack() == message, "there is one message for each batch"


def test_every_flipped_bit_is_refused() -> None:
    data = BATCH.pack()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            TokenBatch.unpack(bytes(flipped))


def test_every_wrong_length_is_refused() -> None:
    data = BATCH.pack()
    for size in range(len(data)):
        with pytest.raises(WireError):
            TokenBatch.unpack(data[:size])
    with pytest.raises(WireError, match="header says"):
        TokenBatch.unpack(data + b"\0")


@settings(max_examples=100)
@given(st.binary(max_size=100), st.booleans())
def test_random_bytes_are_refused(tail: bytes, with_header: bool) -> None:
    with pytest.raises(WireError):
        TokenBatch.unpack((b"SLTB\x03" if with_header else b"") + tail)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"X", "not a token batch"),
        (4, b"\x01", "format 1, this process reads 3"),
        (6, b"\x01", "not a token batch"),
        (8, b"\xff\xff\xff\xff", "over the limit"),
        (12, b"\xff\xff\xff\xff", "header says"),
        (24, b"\xff\xff\xff\xff", "header says"),
        (28, b"w.", "worker id"),
        (28, b"\xff", "worker id"),
        (33, b"x", "padding"),
        (72, b"\0\0", "attempt 0"),
        (78, b"\x02", "add up"),
        (81, b"\x07", "unknown finish"),
        (52, b"\xff\xff\xff\xff", "32 bits"),
    ],
)
def test_each_contradiction_is_refused_with_its_reason(offset: int, value: bytes, reason: str) -> None:
    body = bytearray(BATCH.pack()[:-SEAL_BYTES])
    body[offset : offset + len(value)] = value
    with pytest.raises(WireError, match=reason):
        TokenBatch.unpack(seal(bytes(body)))


@pytest.mark.parametrize(
    ("first_index", "count", "fits"),
    [
        (2**32 - 255, 255, True),
        (2**32 - 254, 254, True),
        (2**32 - 254, 255, False),
        (2**32 - 1, 1, True),
        (2**32 - 1, 2, False),
    ],
)
def test_an_output_has_indices_of_32_bits_and_the_last_one_may_be_used(
    first_index: int, count: int, fits: bool
) -> None:
    batch = replace(batch_of([1, count]), first_index=np.array([7, first_index], dtype=np.uint32))
    if fits:
        assert TokenBatch.unpack(batch.pack()) == batch
        return
    with pytest.raises(ValueError, match="32 bits"):
        batch.pack()


def test_columns_of_other_integer_types_are_converted_if_they_fit() -> None:
    wide: dict[str, Any] = {
        name: getattr(BATCH, name).astype(np.int64) for name in ("stream", "attempt", "count", "finish", "tokens")
    }
    assert replace(BATCH, **wide).pack() == BATCH.pack()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", -1),
        ("stream", 2**32),
        ("attempt", 65_536),
        ("count", 256),
        ("tokens", 0.5),
        ("finish", 7),
        ("attempt", 0),
    ],
)
def test_values_that_do_not_fit_are_refused_and_never_wrapped(column: str, value: float) -> None:
    changed = getattr(BATCH, column).astype(np.int64 if value == int(value) else np.float64)
    changed[0] = value
    change: dict[str, Any] = {column: changed}
    with pytest.raises(ValueError, match=r"fit|finish|attempt"):
        replace(BATCH, **change).pack()


def test_columns_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        replace(BATCH, attempt=BATCH.attempt[:2]).pack()
    with pytest.raises(ValueError, match="add up"):
        replace(BATCH, tokens=BATCH.tokens[:2]).pack()
    with pytest.raises(ValueError, match="counter"):
        replace(BATCH, counter=2**64).pack()


def test_the_limits_hold_in_both_directions() -> None:
    with pytest.raises(WireSizeError):
        batch_of([0] * (MAX_STREAMS + 1)).pack()
    with pytest.raises(WireSizeError):
        batch_of([255] * 1100).pack()
    with pytest.raises(WireSizeError):
        TokenBatch.unpack(bytes(MAX_PAYLOAD_BYTES + 1))
    full = batch_of([0] * MAX_STREAMS)
    assert TokenBatch.unpack(full.pack()) == full


@settings(max_examples=150)
@given(counts=st.lists(st.integers(0, 255), max_size=60), spare=st.integers(0, 3000))
def test_parts_of_a_split_fit_and_join_to_the_whole(counts: list[int], spare: int) -> None:
    """The largest row takes 12 + 4 · 255 bytes, header and checksum 28 + 4 + 4."""
    max_bytes = 36 + 12 + 4 * 255 + spare
    batch = batch_of(counts, counter=7)
    parts = batch.split(max_bytes)
    assert all(len(part.pack()) <= max_bytes for part in parts)
    assert [part.counter for part in parts] == list(range(7, 7 + len(parts)))
    for column in ("stream", "attempt", "first_index", "count", "finish", "tokens"):
        assert np.array_equal(np.concatenate([getattr(part, column) for part in parts]), getattr(batch, column))
    for left, right in pairwise(parts):
        assert left.packed_bytes + 12 + 4 * int(right.count[0]) > max_bytes, "no part could take one more row"


@settings(max_examples=60)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=30), data=st.data())
def test_extras_go_with_their_rows_into_the_parts(counts: list[int], data: st.DataObject) -> None:
    """The largest row takes 12 + 4 · 4 bytes, its extra 12 + 4 · (8 + 8)."""
    rows = sorted(data.draw(st.sets(st.integers(0, len(counts) - 1))))
    extras = [StreamExtra(row, row, (TokenLogprob(-row, ((row, -1.0),)),) * counts[row]) for row in rows]
    batch = replace(batch_of(counts), extras=pack_extras(extras))
    assert batch.stream_extras() == extras
    max_bytes = 36 + 28 + 76 + data.draw(st.integers(0, 500))
    parts = batch.split(max_bytes)
    assert all(len(part.pack()) <= max_bytes for part in parts)
    found = [(int(part.stream[extra.row]), extra) for part in parts for extra in part.stream_extras()]
    assert [(row, replace(extra, row=row)) for row, extra in found] == list(zip(rows, extras, strict=True))


def test_extras_that_do_not_belong_to_the_rows_are_refused() -> None:
    for extra in (StreamExtra(2), StreamExtra(0, logprobs=(TokenLogprob(-1.0),) * 2)):
        with pytest.raises(WireError, match=r"row 2 of 2|than tokens"):
            replace(batch_of([1, 2]), extras=pack_extras([extra])).stream_extras()


def test_a_part_is_filled_to_the_last_byte() -> None:
    """Header and checksum 36, two rows of 16: 68 bytes."""
    assert [len(part) for part in batch_of([1] * 5).split(68)] == [2, 2, 1]
    assert [len(part) for part in batch_of([1] * 5).split(67)] == [1, 1, 1, 1, 1]


def test_a_batch_that_fits_is_not_copied() -> None:
    assert BATCH.split() == [BATCH]
    assert BATCH.split()[0] is BATCH


def test_a_split_also_keeps_the_limit_of_rows() -> None:
    parts = batch_of([0] * (MAX_STREAMS + 1)).split()
    assert [len(part) for part in parts] == [MAX_STREAMS, 1]


def test_a_row_that_fits_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 does not fit"):
        batch_of([1, 200]).split(100)


def test_a_replay_carries_the_log_probabilities_of_the_last_tokens() -> None:
    logprobs = [TokenLogprob(-float(i), ((i, -0.5),)) for i in range(300)]
    batch = stream_batch(
        W0, counter=0, stream=StreamId(9), attempt=2, first_index=40, tokens=np.arange(600), logprobs=logprobs
    )
    again = TokenBatch.unpack(batch.pack())
    assert again.count.tolist() == [255, 45, 255, 45]
    assert again.first_index.tolist() == [40, 295, 340, 595]
    extras = again.stream_extras()
    assert [extra.row for extra in extras] == [2, 3]
    assert [token for extra in extras for token in extra.logprobs] == logprobs


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_COUNT, MAX_COUNT + 1, 1000])
def test_a_long_replay_becomes_rows_of_one_stream_in_order(num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int64) + 5
    batch = stream_batch(
        W0, counter=3, stream=StreamId(9), attempt=2, first_index=40, tokens=tokens, finish=FinishReason.STOP
    )
    again = TokenBatch.unpack(batch.pack())
    assert len(again) == max(1, -(-num_tokens // MAX_COUNT))
    assert again.tokens.tolist() == tokens.tolist()
    assert set(again.stream.tolist()) == {9}
    assert set(again.attempt.tolist()) == {2}
    offsets = again.offsets()
    assert again.first_index.tolist() == [40 + int(start) for start in offsets[:-1]]
    assert again.finish.tolist() == [0] * (len(again) - 1) + [FinishReason.STOP]
