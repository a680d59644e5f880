"""Frames between workers: their bytes, and that whatever else comes is refused at once, and takes no memory."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.peers.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHead,
    FrameKind,
    FrameSocket,
    PeerLostError,
    hear,
    pack_head,
    say,
)
from services.worker.peers.link_priority import LinkPriority
from shared.checksum import SEAL_BYTES, seal
from shared.errors import WireError

ACTIVATION, CHUNK, STEP = FrameKind.ACTIVATION, FrameKind.KV_CHUNK, FrameKind.REMOTE_STEP
MIB = 2**20


@contextmanager
def two(*, is_checked: bool = False, urgent: LinkPriority | None = None) -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ends = [FrameSocket(sock, is_checked=is_checked, urgent=urgent, silence_s=10.0) for sock in socket.socketpair()]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


@contextmanager
def raw(data: bytes, *, is_checked: bool = False) -> Iterator[FrameSocket]:
    """Yield the end at which some bytes come, and then the end of the connection."""
    one, other = socket.socketpair()
    frames = FrameSocket(other, is_checked=is_checked, silence_s=10.0)
    with one:
        one.sendall(data)
    try:
        yield frames
    finally:
        frames.close()


def frame(kind: FrameKind, payload: bytes, *, is_checked: bool = False) -> bytes:
    """Return a frame as it is sent."""
    one, other = socket.socketpair()
    with other:
        sender = FrameSocket(one, is_checked=is_checked)
        sender.send(kind, payload, words=(3, 4))
        sender.close()
        data = b""
        while part := other.recv(2**16):
            data += part
    return data


# Bytes


@pytest.mark.parametrize(
    ("is_checked", "expected"),
    [
        (False, "534c50460122000003000000040000000700000000000000000000001469c62a7061796c6f6164"),
        (True, "534c50460122000003000000040000000700000000000000156a2c425dcba2a97061796c6f6164"),
    ],
)
def test_a_frame_has_these_bytes(is_checked: bool, expected: str) -> None:
    assert frame(CHUNK, b"payload", is_checked=is_checked).hex() == expected


def test_every_kind_has_its_number_for_ever() -> None:
    numbers = " ".join(f"{kind.name}={kind:d}" for kind in FrameKind)
    assert numbers == (
        "GREETING=1 "
        "BATCH=16 HOST_COPY=17 ACTIVATION=18 STEP_FAILED=19 STEP_DONE=20 COPY_ENDED=21 CLOSE=22 KV_OVER=23 ALIVE=24 "
        "KV_OFFER=32 KV_TABLE=33 KV_CHUNK=34 KV_PROGRESS=35 "
        "REMOTE_STEP=48 REMOTE_ASK=49 REMOTE_ANSWER=50 REMOTE_FAILED=51 REMOTE_DONE=52 "
        "PARAMETER_ASK=64 PARAMETER=65 "
        "PAGES=80 PAGES_TAKEN=81 PAGES_MAPPED=82 PAGES_COMMIT=83 PAGES_UNDO=84 "
        "MIGRATION_ASK=96 MIGRATION_ANSWER=97"
    )


# What goes through


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("urgent", [None, LinkPriority()])
def test_frames_come_whole_and_in_order_however_large(is_checked: bool, urgent: LinkPriority | None) -> None:
    """Larger than any socket's buffer, so sender and receiver have to work at the same time."""
    parts = [(b"head", memoryview(bytes([i]) * (MIB * i)), b"") for i in range(4)]
    with two(is_checked=is_checked, urgent=urgent) as (one, other):

        def work() -> None:
            for i, each in enumerate(parts):
                one.send(STEP, *each, words=(i, 2**32 - 1 - i))
            one.send(FrameKind.REMOTE_DONE)

        sending = threading.Thread(target=work)
        sending.start()
        for i, each in enumerate(parts):
            found = other.receive(STEP)
            assert (found.kind, found.words, bytes(found.payload)) == (STEP, (i, 2**32 - 1 - i), b"".join(each))
        assert other.receive(STEP, FrameKind.REMOTE_DONE).kind is FrameKind.REMOTE_DONE
        sending.join()


def test_a_payload_is_received_where_it_belongs_and_in_pieces_if_it_is_made_so() -> None:
    memory = bytearray(b"." * 12)
    with two() as (one, other):
        one.send(CHUNK, b"payload")
        other.receive_payload(other.receive_head(CHUNK), memoryview(memory)[2:9])
        assert memory == b"..payload..."
        one.send_pieces(FrameKind.PARAMETER, 6, (bytes([i]) * 2 for i in range(3)))
        assert other.receive_head(FrameKind.PARAMETER) == FrameHead(FrameKind.PARAMETER, (0, 0), 6, 0)
        for i in range(3):
            other.fill(memoryview(memory)[:2])
            assert memory[:2] == bytes([i]) * 2


async def test_threads_and_the_event_loop_speak_the_same_frames() -> None:
    one, other = socket.socketpair()
    one.settimeout(0)
    frames = FrameSocket(other)
    with one:
        await say(one, FrameKind.GREETING, b"hello")
        assert frames.receive(FrameKind.GREETING, max_bytes=5).payload == b"hello"
        frames.send(FrameKind.GREETING, b"answer")
        assert await hear(one, FrameKind.GREETING, 6) == b"answer"
        frames.close()
        with pytest.raises(PeerLostError, match="it hung up"):
            await hear(one, FrameKind.GREETING, 6)


# What does not


def header(*, magic: bytes = b"SLPF", version: int = 1, kind: int = ACTIVATION, num_bytes: int = 0) -> bytes:
    return seal(struct.pack("<4sBB2xIIQI", magic, version, kind, 0, 0, num_bytes, 0))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(magic=b"SLPS"), "no frame of this version"),
        (header(version=2), "no frame of this version"),
        (header(kind=99), "a frame of kind 99 came instead of ACTIVATION"),
        (header(kind=CHUNK), "KV_CHUNK came instead of ACTIVATION"),
        (header(num_bytes=101), "ACTIVATION of 101 bytes is over the limit of 100"),
        (header(num_bytes=2**64 - 1), "over the limit of 100"),
        (header()[:-1] + b"\x00", "the header of a frame: the checksum is wrong"),
        (b"GET / HTTP/1.1\r\nHost: nobody.example\r\n\r\n", "the checksum is wrong"),
    ],
)
def test_what_is_no_frame_or_not_due_is_refused_before_memory_is_taken(data: bytes, reason: str) -> None:
    with raw(data) as frames, pytest.raises(WireError, match=reason):
        frames.receive(ACTIVATION, max_bytes=100)


def test_a_frame_over_the_limit_is_not_sent() -> None:
    assert len(pack_head(ACTIVATION, MAX_PAYLOAD_BYTES)) == HEADER_BYTES
    with pytest.raises(WireError, match="is over the limit"):
        pack_head(ACTIVATION, MAX_PAYLOAD_BYTES + 1)


@settings(deadline=None, max_examples=200)
@given(st.booleans(), st.data())
def test_every_truncation_ends_at_once_as_a_lost_peer(is_checked: bool, data: st.DataObject) -> None:
    whole = frame(STEP, b"some rows", is_checked=is_checked)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with raw(whole[:cut], is_checked=is_checked) as frames, pytest.raises(PeerLostError):
        frames.receive(STEP)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_damage_is_noticed_in_a_stream_with_checksums(data: st.DataObject) -> None:
    whole = bytearray(frame(STEP, b"some rows", is_checked=True))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with raw(bytes(whole), is_checked=True) as frames, pytest.raises(WireError):
        frames.receive(STEP)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_whatever_comes_is_refused_and_takes_no_memory(data: bytes, is_sealed: bool) -> None:
    """A header of anybody's making may name any size."""
    given_bytes = (
        seal(data[: HEADER_BYTES - SEAL_BYTES].ljust(HEADER_BYTES - SEAL_BYTES, b"\xff")) if is_sealed else data
    )
    tracemalloc.start()
    try:
        with raw(given_bytes) as frames, pytest.raises((WireError, PeerLostError)):
            frames.receive(ACTIVATION)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, HEADER_BYTES + 4), st.integers(0, 255))
def test_the_event_loop_refuses_the_same(cut: int, byte: int) -> None:
    async def attempt() -> None:
        one, other = socket.socketpair()
        other.settimeout(0)
        with other:
            with one:
                damaged = bytearray(frame(FrameKind.GREETING, b"hello"))
                damaged[min(cut, HEADER_BYTES - 1)] ^= byte | 1
                one.sendall(damaged[: HEADER_BYTES + cut] if byte % 2 else damaged[:cut])
            with pytest.raises((WireError, PeerLostError)):
                await hear(other, FrameKind.GREETING, 100)

    asyncio.run(attempt())


def test_a_peer_that_is_gone_or_silent_is_lost_for_who_sends_and_who_receives() -> None:
    with two() as (one, other):
        other.close()
        with pytest.raises(PeerLostError, match="the other end has closed the connection"):
            one.receive(STEP)
        with pytest.raises(PeerLostError, match="cannot send: Broken pipe"):
            one.send(STEP, b"rows")
    ours, theirs = socket.socketpair()
    silent = FrameSocket(ours, silence_s=0.02)
    with theirs, pytest.raises(PeerLostError, match="cannot receive: timed out"):
        silent.receive(STEP)
    silent.close()


def test_who_waits_wakes_when_the_connection_is_shut_at_either_end() -> None:
    with two() as (one, other):
        lost = list[str]()

        def wait(end: FrameSocket) -> None:
            with pytest.raises(PeerLostError) as caught:
                end.receive(STEP)
            lost.append(str(caught.value))

        waiting = [threading.Thread(target=wait, args=(end,)) for end in (one, other)]
        for thread in waiting:
            thread.start()
        one.shut()
        one.shut()
        for thread in waiting:
            thread.join(10)
        assert lost == ["the other end has closed the connection"] * 2


def test_what_is_urgent_is_known_to_be_under_way() -> None:
    """A lender of parameters waits meanwhile (`LinkPriority.wait`)."""
    turns = LinkPriority()
    with two(urgent=turns) as (one, other):
        sending = threading.Thread(target=one.send, args=(ACTIVATION, bytes(8 * MIB)))
        sending.start()
        head = other.receive_head(ACTIVATION)
        assert not turns.wait(0.01)
        other.receive_payload(head, memoryview(bytearray(head.num_bytes)))
        sending.join()
        assert turns.wait(0)
