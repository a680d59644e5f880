"""What stands behind the headers of a link by descriptor: it is read as it was written, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.worker.memory.ranges import PageId
from services.worker.transfer import fd_frames
from services.worker.transfer.fd_frames import MIN_PLACE_BYTES, PREFIX, Loan, Place
from services.worker.transfer.frames import FrameError
from services.worker.transfer.link import MAX_FRAME_BYTES

LOAN = Loan(2 * 2**20, 3 * 2**21, 4096, PageId(4095))


def body_of(frame: bytes) -> bytes:
    """Read a frame as the receiver does."""
    prefix = frame[: PREFIX.size]
    body = frame[PREFIX.size : PREFIX.size + fd_frames.body_bytes(prefix)]
    fd_frames.check_body(prefix, body)
    return body


@pytest.mark.parametrize("seed", range(20))
def test_what_was_written_is_read(seed: int) -> None:
    random = np.random.default_rng(seed)
    places = [
        Place(PageId(int(page)), int(offset), int(length))
        for page, offset, length in random.integers(MIN_PLACE_BYTES, 2**32, (int(random.integers(1, 50)), 3))
    ]
    num_bytes = sum(place.length for place in places)
    assert fd_frames.decode_places(body_of(fd_frames.encode_places(places)), num_bytes) == places
    pages = [place.page for place in places]
    assert fd_frames.decode_pages(body_of(fd_frames.encode_pages(pages))) == pages
    assert fd_frames.decode_loan(body_of(fd_frames.encode_loan(LOAN))) == LOAN


def test_the_longest_share_in_the_smallest_places_fits_a_body() -> None:
    count = MAX_FRAME_BYTES // MIN_PLACE_BYTES
    frame = fd_frames.encode_places([Place(PageId(0), 0, MIN_PLACE_BYTES)] * count)
    assert len(fd_frames.decode_places(body_of(frame), MAX_FRAME_BYTES)) == count


def test_damage_anywhere_is_noticed() -> None:
    frame = fd_frames.encode_places([Place(PageId(1), 0, 4096), Place(PageId(2), 7, 4096)])
    for index in range(len(frame)):
        damaged = bytearray(frame)
        damaged[index] ^= 0x10
        with pytest.raises(FrameError):
            body_of(bytes(damaged))


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: fd_frames.decode_places(b"", 0), "a list of places of 0 bytes"),
        (lambda: fd_frames.decode_places(bytes(13), 0), "a list of places of 13 bytes"),
        (lambda: fd_frames.decode_places(np.array([1, 0, 4096], "<u4").tobytes(), 4095), "not those of a share"),
        (lambda: fd_frames.decode_places(np.array([1, 0, 511], "<u4").tobytes(), 511), "not those of a share"),
        (lambda: fd_frames.decode_places(np.array([1, 0, 2**32 - 1] * 2, "<u4").tobytes(), 2**32 - 2), "not those"),
        (lambda: fd_frames.decode_loan(bytes(23)), "a loan of 23 bytes"),
        (lambda: fd_frames.decode_loan(body_of(fd_frames.encode_loan(LOAN._replace(num_pages=4095)))), "page 4095 of"),
        (lambda: fd_frames.decode_loan(body_of(fd_frames.encode_loan(LOAN._replace(page_bytes=0)))), "of 0 bytes each"),
        (lambda: fd_frames.decode_pages(b""), "a list of pages of 0 bytes"),
        (lambda: fd_frames.decode_pages(bytes(7)), "a list of pages of 7 bytes"),
        (lambda: fd_frames.decode_pages(bytes(4 * 4097)), "a list of pages of 16388 bytes"),
        (lambda: fd_frames.body_bytes(PREFIX.pack(2**24, 0)), "a list of 16777216 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(read: Callable[[], object], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        read()
