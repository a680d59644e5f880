"""Frames, cursors, and the two sides of a link without a wire: what is cut is put together again, or refused."""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.frames import (
    HEADER_BYTES,
    MAX_REASON_BYTES,
    FrameError,
    FrameKind,
    Header,
    decode_header,
    encode_header,
)
from services.worker.transfer.landing import Landing
from services.worker.transfer.link import (
    Arrival,
    LinkError,
    LinkFullError,
    MessageTooLargeError,
    TrafficClass,
    Windows,
    message_cost,
)
from services.worker.transfer.outbox import Frame, Outbox, Outgoing
from shared.ids import WorkerId

PEER = WorkerId("peer")
U32 = st.integers(0, 2**32 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(FrameKind))
    length = draw(st.integers(1, 4096)) if kind in {FrameKind.DATA, FrameKind.PLACES} else 0
    if kind is FrameKind.END:
        length = draw(st.integers(0, MAX_REASON_BYTES))
    total = draw(st.integers(length, 2**32 - 1))
    rest = draw(st.tuples(U32, U32, U32, U32))
    return Header(kind, draw(st.sampled_from(TrafficClass)), rest[0], rest[1], rest[2], total, length, rest[3])


@given(headers())
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == header


@given(headers(), st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_byte_of_a_header_is_noticed(header: Header, place: int, change: int) -> None:
    data = bytearray(encode_header(header))
    data[place] ^= change
    with pytest.raises(FrameError):
        decode_header(data)


@given(st.binary(max_size=64))
def test_no_other_bytes_are_a_header(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(data)


@pytest.mark.parametrize(
    "header",
    [
        Header(FrameKind.DATA, total=10, length=0),
        Header(FrameKind.DATA, total=10, length=11),
        Header(FrameKind.CREDIT, total=10, length=1),
        Header(FrameKind.PLACES, total=10, length=11),
        Header(FrameKind.LEND, length=1),
        Header(FrameKind.END, total=1000, length=MAX_REASON_BYTES + 1),
        Header(FrameKind.DATA, total=2**32, length=1),
        Header(FrameKind.DATA, total=1, length=1, stream=-1),
    ],
)
def test_lengths_that_fit_nothing_are_not_encoded(header: Header) -> None:
    with pytest.raises(ValueError, match=r"frame|header"):
        encode_header(header)


def test_a_frame_over_the_limit_is_refused() -> None:
    data = encode_header(Header(FrameKind.DATA, total=5000, length=5000))
    with pytest.raises(FrameError, match="over the limit of 4096"):
        decode_header(data, 4096)


# Cursors


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(0, 30), max_size=30))
def test_a_cursor_gathers_the_parts_in_order(parts: list[bytes], sizes: list[int]) -> None:
    cursor, whole = Cursor(parts), b"".join(parts)
    assert cursor.total == len(whole)
    got = b""
    for size in sizes:
        views = cursor.take(size)
        got += b"".join(views)
        assert cursor.left == len(whole) - len(got)
    assert got == whole[: len(got)]
    assert len(got) == min(sum(sizes), len(whole))


def test_a_cursor_writes_through_and_refuses_what_cannot_be_written() -> None:
    memory = np.zeros((3, 4), dtype=np.float32)
    cursor = Cursor([memory[0].data, memory[2].data], writable=True)
    for view in cursor.take(32):
        view[:] = b"\x01" * len(view)
    assert memory.view(np.uint8).reshape(3, 16).tolist() == [[1] * 16, [0] * 16, [1] * 16]
    with pytest.raises(ValueError, match="writable"):
        Cursor([b"constant"], writable=True)
    with pytest.raises(ValueError, match="contiguous"):
        Cursor([memory[:, 1].data])


# Outbox and landing, back to back


class Pair:
    """An outbox and a landing with nothing between them."""

    def __init__(self, windows: Windows, max_frame_bytes: int = 100, max_queued: int = 1000) -> None:
        self.outbox = Outbox(PEER, windows, max_frame_bytes, max_queued)
        self.landing = Landing(windows)
        self.settled: list[int | LinkError] = []
        self.arrivals: deque[Arrival] = deque()
        self.order: list[TrafficClass] = []

    def put(self, traffic: TrafficClass, stream: int, number: int, data: bytes) -> Outgoing:
        message = Outgoing(traffic, stream, number, Cursor([data]), self.settled.append)
        self.outbox.put(message)
        return message

    def carry(self) -> bool:
        """Carry one frame over; False if none may go."""
        message = self.outbox.pick()
        if message is None:
            return False
        frame = self.outbox.cut(message)
        self.order.append(frame.header.traffic)
        self.land(frame)
        if frame.ends_message:
            self.outbox.finish(message)
            message.settle(message.checksum)
        return True

    def land(self, frame: Frame) -> None:
        data = b"".join(frame.payload)
        self.landing.begin(decode_header(encode_header(frame.header)))
        while room := self.landing.room():
            part, data = data[:7], data[7:]
            size = 0
            for view in room:
                some = part[size : size + len(view)]
                view[: len(some)] = some
                size += len(some)
            self.landing.landed(size)
        arrival = self.landing.end()
        if arrival is not None:
            self.arrivals.append(arrival)

    def release(self) -> None:
        arrival = self.arrivals.popleft()
        self.outbox.owe(arrival.traffic, self.landing.release(arrival))
        credit = self.outbox.take_credit()
        assert credit is not None
        self.outbox.grant(credit.traffic, credit.total)


SMALL = Windows(control=500, activation=700, kv=900, parameters=800)


@given(st.integers(0, 2**32 - 1))
def test_whatever_is_sent_arrives_in_order_of_its_class_and_credit_is_conserved(seed: int) -> None:
    random = np.random.default_rng(seed)
    pair = Pair(SMALL, max_frame_bytes=int(random.integers(1, 200)))
    sent: dict[TrafficClass, list[bytes]] = {traffic: [] for traffic in TrafficClass}
    got: dict[TrafficClass, list[bytes]] = {traffic: [] for traffic in TrafficClass}
    zones: dict[tuple[TrafficClass, int], bytearray] = {}

    def receive() -> None:
        arrival = pair.arrivals[0]
        data = bytes(arrival.body) if arrival.body is not None else bytes(zones[arrival.traffic, arrival.number])
        assert arrival.landed
        assert arrival.checksum == zlib.crc32(data)
        got[arrival.traffic].append(data)
        pair.release()

    for _ in range(60):
        kind = random.random()
        if kind < 0.4:
            traffic = TrafficClass(int(random.integers(0, 4)))
            number = len(sent[traffic])
            data = random.bytes(int(random.choice([0, 1, 50, 400])))
            zones[traffic, number] = bytearray(len(data))
            if traffic in {TrafficClass.KV, TrafficClass.PARAMETERS}:
                pair.landing.post(int(traffic), number, [memoryview(zones[traffic, number])])
            pair.put(traffic, int(traffic), number, data)
            sent[traffic].append(data)
        elif kind < 0.8:
            pair.carry()
        elif pair.arrivals:
            receive()
    while pair.carry() or pair.arrivals:
        if pair.arrivals:
            receive()
    assert got == sent
    assert len(pair.settled) == sum(map(len, sent.values()))
    assert pair.outbox.num_waiting == pair.landing.num_zones == 0


def test_a_higher_class_waits_for_one_frame_only() -> None:
    pair = Pair(SMALL, max_frame_bytes=100)
    pair.put(TrafficClass.PARAMETERS, 1, 0, bytes(350))
    pair.carry()
    pair.put(TrafficClass.KV, 1, 0, bytes(250))
    pair.carry()
    pair.put(TrafficClass.ACTIVATION, 1, 0, bytes(150))
    while pair.carry():
        pass
    a, k, p = TrafficClass.ACTIVATION, TrafficClass.KV, TrafficClass.PARAMETERS
    assert pair.order == [p, k, a, a, k, k, p, p, p]
    assert [arrival.traffic for arrival in pair.arrivals] == [a, k, p]


@pytest.mark.parametrize(("rate", "expected"), [(1e9, 2e6), (1e8, 2e5), (1e6, 64 * 1024), (1e11, 6e6)])
def test_frames_come_to_take_what_a_frame_may_take(rate: float, expected: float) -> None:
    """2 ms at 1 GB/s are 2 MB, from 6 MB down; at least 64 KiB, at most what both ends take. Small ones say nothing."""
    outbox = Outbox(PEER, Windows(), 6_000_000, 10)
    outbox.fit_frames(100, 1.0, 0.002)
    assert outbox.frame_bytes == 6_000_000
    for _ in range(40):
        outbox.fit_frames(outbox.frame_bytes, outbox.frame_bytes / rate, 0.002)
    assert outbox.frame_bytes == pytest.approx(expected, rel=0.01)


def test_without_credit_nothing_of_a_message_goes_and_other_classes_pass() -> None:
    pair = Pair(SMALL)
    pair.put(TrafficClass.ACTIVATION, 1, 0, bytes(600))
    pair.put(TrafficClass.ACTIVATION, 1, 1, bytes(10))
    pair.put(TrafficClass.PARAMETERS, 1, 0, bytes(10))
    while pair.carry():
        pass
    assert [(arrival.traffic, arrival.number) for arrival in pair.arrivals] == [
        (TrafficClass.ACTIVATION, 0),
        (TrafficClass.PARAMETERS, 0),
    ]
    pair.release()
    assert pair.carry()
    assert pair.arrivals[-1].number == 1


def test_what_does_not_fit_is_refused() -> None:
    pair = Pair(SMALL, max_queued=1)
    with pytest.raises(MessageTooLargeError):
        pair.put(TrafficClass.KV, 1, 0, bytes(900))
    largest = pair.put(TrafficClass.KV, 1, 0, bytes(900 - message_cost(0)))
    with pytest.raises(LinkFullError):
        pair.put(TrafficClass.KV, 1, 1, b"")
    assert pair.outbox.revoke(largest)
    assert not pair.outbox.revoke(largest)
    assert not pair.carry()


def test_a_message_that_has_begun_cannot_be_taken_back() -> None:
    pair = Pair(SMALL)
    message = pair.put(TrafficClass.KV, 1, 0, bytes(300))
    pair.carry()
    assert not pair.outbox.revoke(message)


def test_a_withdrawn_zone_is_not_written_any_more() -> None:
    pair = Pair(SMALL, max_frame_bytes=100)
    memory = bytearray(300)
    pair.landing.post(5, 0, [memoryview(memory)])
    pair.put(TrafficClass.KV, 5, 0, b"x" * 300)
    pair.carry()
    pair.landing.withdraw(5)
    while pair.carry():
        pass
    assert bytes(memory) == b"x" * 100 + bytes(200)
    assert [(arrival.landed, arrival.size) for arrival in pair.arrivals] == [(False, 300)]


@pytest.mark.parametrize("size", [None, 299, 301])
def test_kv_without_a_fitting_zone_goes_nowhere(size: int | None) -> None:
    pair = Pair(SMALL)
    memory = bytearray(size or 0)
    if size is not None:
        pair.landing.post(5, 0, [memoryview(memory)])
    pair.put(TrafficClass.KV, 5, 0, b"x" * 300)
    while pair.carry():
        pass
    assert not pair.arrivals[0].landed
    assert bytes(memory) == bytes(len(memory))


def test_a_peer_that_breaks_the_rules_is_noticed() -> None:
    frame = Header(FrameKind.DATA, TrafficClass.KV, stream=1, total=600, length=100)
    for changed, reason in [
        (Header(FrameKind.DATA, TrafficClass.KV, stream=1, sequence=1, total=600, length=100), "frame 1 of KV"),
        (Header(FrameKind.DATA, TrafficClass.KV, stream=1, total=1000, length=100), "more KV than was granted"),
    ]:
        with pytest.raises(FrameError, match=reason):
            Landing(SMALL).begin(changed)
    landing = Landing(SMALL)
    landing.begin(frame)
    landing.landed(100)
    with pytest.raises(FrameError, match="damaged"):
        landing.end()
    pair = Pair(SMALL)
    with pytest.raises(FrameError, match="beyond its window"):
        pair.outbox.grant(TrafficClass.KV, 1)
    pair.put(TrafficClass.KV, 1, 0, bytes(300))
    pair.carry()
    with pytest.raises(FrameError, match="within another"):
        pair.landing.begin(Header(FrameKind.DATA, TrafficClass.KV, stream=2, sequence=1, total=300, length=100))
