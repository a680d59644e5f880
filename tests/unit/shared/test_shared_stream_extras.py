from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras, unpack_extras

U32 = st.integers(0, 2**32 - 1)
LOGPROB = st.floats(max_value=0, width=32, allow_nan=False)
TOKEN = st.builds(TokenLogprob, LOGPROB, st.lists(st.tuples(U32, LOGPROB), max_size=20).map(tuple))
LOGPROBS = st.lists(TOKEN, max_size=4).map(tuple)
MOVED_TO, PREEMPTIONS = st.sampled_from(["", "w0-a1"]), st.integers(0, 65_535)
EXTRA = st.builds(StreamExtra, U32, st.none() | st.integers(0, 2**32 - 2), LOGPROBS, MOVED_TO, PREEMPTIONS)
EXTRAS = st.lists(EXTRA, max_size=5, unique_by=lambda extra: extra.row).map(
    lambda extras: sorted(extras, key=lambda extra: extra.row)
)
EXAMPLE = [
    StreamExtra(1, 5),
    StreamExtra(3, None, (TokenLogprob(-0.5, ((7, -0.5), (2, -1.5))), TokenLogprob(-np.inf))),
]


@pytest.mark.slow
@settings(max_examples=200)
@given(EXTRAS)
def test_extras_survive_the_way_there_and_back(extras: list[StreamExtra]) -> None:
    data = pack_extras(extras)
    assert len(data) == sum(extra.packed_bytes for extra in extras)
    assert unpack_extras(data) == extras


def test_nothing_takes_no_bytes() -> None:
    assert pack_extras([]) == b""
    assert unpack_extras(b"") == []


@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes_are_refused_or_mean_themselves(data: st.DataObject) -> None:
    message = bytearray(pack_extras(EXAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        extras = unpack_extras(bytes(message))
    except WireError:
        return
    assert pack_extras(extras) == bytes(message)


def test_bytes_that_end_within_a_record_are_refused() -> None:
    data = pack_extras(EXAMPLE)
    whole = {0, EXAMPLE[0].packed_bytes, len(data)}
    for size in set(range(len(data))) - whole:
        with pytest.raises(WireError, match="end within"):
            unpack_extras(data[:size])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<IIB3x", 2, 0, 0) + struct.pack("<IIB3x", 2, 0, 0), "ascending"),
        (struct.pack("<IIB3x", 2, 0, 1) + struct.pack("<fB3s", -1, 0, b"abc"), "padding"),
        (struct.pack("<IIB3x", 2, 0, 1) + struct.pack("<fB3x", np.nan, 0), "no number"),
        (struct.pack("<IIB3x", 2, 0, 1) + struct.pack("<fB3x", 0.5, 0), "over 0"),
        (struct.pack("<IIB3x", 2, 0, 1) + struct.pack("<fB3x", -1, 21) + bytes(168), "21 alternatives"),
    ],
)
def test_each_contradiction_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack_extras(data)


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ([StreamExtra(3), StreamExtra(1)], "ascending"),
        ([StreamExtra(-1)], "ascending"),
        ([StreamExtra(2**32)], "does not fit"),
        ([StreamExtra(0, -1)], "does not fit"),
        ([StreamExtra(0, num_preemptions=2**16)], "does not fit"),
        ([StreamExtra(0, 2**32 - 1)], "cannot be said"),
        ([StreamExtra(0, 0, (TokenLogprob(-1.0),) * 256)], "limit is 255"),
        ([StreamExtra(0, 0, (TokenLogprob(-1.0, ((0, -1.0),) * 21),))], "limit is 20"),
        ([StreamExtra(0, 0, (TokenLogprob(0.25),))], "at most 0"),
        ([StreamExtra(0, 0, (TokenLogprob(-1.0, ((2**32, -1.0),)),))], "does not fit"),
    ],
)
def test_values_out_of_range_are_refused_before_they_are_sent(extras: list[StreamExtra], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pack_extras(extras)
