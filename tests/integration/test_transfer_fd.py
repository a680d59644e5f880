"""Links by descriptor: what they add to the suite of all links, and peers that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.worker.memory.ranges import PageId
from services.worker.sockets import send_message
from services.worker.transfer import fd_frames
from services.worker.transfer.fd_frames import Loan, Place
from services.worker.transfer.fd_link import MAX_UNTAKEN, FdLink
from services.worker.transfer.frames import FrameKind, Header, decode_header, encode_header
from services.worker.transfer.hello import Expected, Handshake
from services.worker.transfer.link import Buffer, LinkBrokenError, LinkRefusedError, TrafficClass
from tests.support.link_child import CHILD, PARENT, identity
from tests.support.link_ends import LIMIT_S, End, two_links
from tests.support.link_roads import PAGE_BYTES, Road, open_socket
from tests.support.waiting import until


@pytest.fixture
def road() -> Iterator[Road]:
    made = Road("fd")
    yield made
    made.close()


@asynccontextmanager
async def started(road: Road) -> AsyncIterator[tuple[End, End, FdLink]]:
    """Both ends, started, and the first as what it is."""
    async with two_links(road) as (one, other):
        assert isinstance(one, FdLink)
        yield End(one), End(other), one


def memory_files() -> tuple[int, int]:
    """Return how many descriptors of memory files there are, and how many mappings."""
    num_descriptors = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which they are listed
            num_descriptors += "memfd" in str(link.readlink())
    return num_descriptors, Path("/proc/self/maps").read_text().count("memfd")


def mode_of(address: str) -> int | None:
    """Return who may use a socket; None: there is none."""
    return Path(address).stat().st_mode & 0o777 if Path(address).exists() else None


# What lent pages change


async def test_a_message_is_done_when_the_peer_has_copied_it_and_few_are_under_way(road: Road) -> None:
    """The peer's receiver is kept from landing anything: what was read of the buffers so far is nothing."""
    async with started(road) as (a, b, link):
        size = 1_000_000
        data = [road.put(bytes([number]) * size) for number in range(10)]
        zones = [bytearray(size) for _ in data]
        for number, zone in enumerate(zones):
            b.link.post(1, number, [memoryview(zone)])
        with b.link._receiving:
            sendings = [a.link.send(TrafficClass.KV, 1, number, [view]) for number, view in enumerate(data)]
            await until(lambda: link.num_lent_bytes > 0)
            await asyncio.sleep(0.2)
            assert not any(sending.done.done() for sending in sendings)
            assert link.num_lent_bytes <= MAX_UNTAKEN * size, "a frame is of one message"
            assert not sendings[0].revoke()
            assert sendings[9].revoke()
        for number in range(9):
            arrival = await b.next()
            assert await sendings[number].done == arrival.checksum == zlib.crc32(data[number])
            assert bytes(zones[number]) == bytes([number]) * size


async def test_a_buffer_that_changes_under_way_breaks_the_link_and_is_not_handed_over(road: Road) -> None:
    async with started(road) as (a, b, link):
        data = road.put(b"a" * 100_000)
        b.link.post(1, 0, [memoryview(bytearray(100_000))])
        with b.link._receiving:
            sending = a.link.send(TrafficClass.KV, 1, 0, [data])
            await until(lambda: link.num_lent_bytes > 0)
            data[50_000] = 0
        assert "damaged" in (await b.end()).reason
        assert b.arrivals.empty()
        await a.end()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(LinkBrokenError):
                await sending.done
        assert road.shared is not None
        assert not road.shared.lent._watchers, "a link that has ended is told of no page any more"


async def test_what_was_taken_is_told_in_order_whichever_thread_tells_it(road: Road) -> None:
    """The first word goes by the sender's thread, as somebody writes just then, and is held up there; the second must
    not go at once.
    """
    async with started(road) as (a, b, _):
        wire, begun, may_go = b.link._sock, threading.Event(), threading.Event()
        write = wire.write

        def slow_write(parts: Sequence[Buffer], descriptor: int | None = None) -> None:
            if decode_header(parts[0]).kind is FrameKind.TAKEN:
                begun.set()
                may_go.wait(LIMIT_S)
            write(parts, descriptor)

        wire.write = slow_write  # type: ignore[method-assign]
        views = [road.put(bytes([number]) * 100_000) for number in range(2)]
        with wire._writing:
            sendings = [a.link.send(TrafficClass.KV, 1, 0, views[:1])]
            await until(begun.is_set)
        sendings.append(a.link.send(TrafficClass.KV, 1, 1, views[1:]))
        for _ in views:
            await b.next()
        await asyncio.sleep(0.1)
        may_go.set()
        async with asyncio.timeout(LIMIT_S):
            for sending in sendings:
                await sending.done
        assert a.link.is_up


@pytest.mark.parametrize("seed", range(6))
async def test_bytes_arrive_as_they_were_while_pages_come_and_go(road: Road, seed: int) -> None:
    """Between messages pages swap places, go away and come back; the peer reads what lies there now."""
    random = np.random.default_rng(seed)
    assert road.shared is not None
    shared, num_pages = road.shared, 24
    async with started(road) as (a, b, link):
        shared.bytes[: num_pages * PAGE_BYTES] = random.integers(0, 256, num_pages * PAGE_BYTES, dtype=np.uint8)
        for number in range(40):
            if random.random() < 0.5:
                one, other = (int(place) * PAGE_BYTES for place in random.choice(num_pages, 2, replace=False))
                pages = shared.range.unmap(one), shared.range.unmap(other)
                shared.range.map(one, pages[1])
                shared.range.map(other, pages[0])
                shared.bytes[one : one + PAGE_BYTES : 97] ^= 0xFF
            parts = []
            for _ in range(int(random.integers(1, 5))):
                begin = int(random.integers(0, (num_pages - 3) * PAGE_BYTES))
                parts.append(shared.bytes[begin : begin + int(random.integers(1, 3 * PAGE_BYTES))].data)
            if random.random() < 0.3:
                parts.append(memoryview(random.bytes(10_000)))  # one that is nobody's page: all of the frame inline
            expected = b"".join(parts)
            zone = bytearray(len(expected))
            b.link.post(1, number, [memoryview(zone)])
            sending = a.link.send(TrafficClass.KV, 1, number, parts)
            assert (await b.next()).landed
            assert bytes(zone) == expected
            await sending.done
        assert link.num_lent_bytes > 0
        assert isinstance(b.link, FdLink)
        borrowed = b.link._borrowed
        await until(lambda: borrowed.num_pages == len(link._shown) and not link._revoked)
        shared.range.unmap_run(0, num_pages)
        await until(lambda: borrowed.num_pages == 0)


async def test_nothing_is_left_of_a_link(road: Road) -> None:
    before = memory_files()
    async with started(road) as (a, b, _):
        b.link.post(1, 0, [memoryview(bytearray(10 * PAGE_BYTES))])
        await a.link.send(TrafficClass.KV, 1, 0, [road.take(10 * PAGE_BYTES).data]).done
        assert memory_files()[1] > before[1]
    assert memory_files() == before
    assert road.shared is not None
    assert not road.shared.lent._watchers


# Peers that break the rules


def file_of(num_bytes: int, *, sealed: bool) -> int:
    file = os.memfd_create("of a test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, num_bytes)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


LOAN = Loan(PAGE_BYTES, 0, 4, PageId(1))
LEND = encode_header(Header(FrameKind.LEND))


def places_frame(*places: Place, length: int) -> list[bytes]:
    header = Header(FrameKind.PLACES, TrafficClass.KV, stream=1, total=length, length=length)
    return [encode_header(header), fd_frames.encode_places(places)]


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("frames", "size", "reason"),
    [
        ([LEND, fd_frames.encode_loan(LOAN)], None, "no descriptor came along"),
        ([LEND, fd_frames.encode_loan(LOAN)], -PAGE_BYTES, "not sealed against shrinking"),
        ([LEND, fd_frames.encode_loan(LOAN)], PAGE_BYTES - 1, "has no page of"),
        ([LEND, fd_frames.encode_loan(LOAN._replace(offset=PAGE_BYTES))], PAGE_BYTES, "has no page of"),
        ([LEND, fd_frames.encode_loan(LOAN._replace(offset=1))], 9 * PAGE_BYTES, "has no page of"),
        ([LEND, fd_frames.encode_loan(LOAN._replace(page_bytes=1000))], PAGE_BYTES, "not a multiple"),
        ([LEND, fd_frames.encode_loan(LOAN._replace(num_pages=2**31))], PAGE_BYTES, "a window of"),
        ([LEND, fd_frames.encode_loan(LOAN._replace(num_pages=1))], PAGE_BYTES, "page 1 of 1"),
        ([LEND, damaged(fd_frames.encode_loan(LOAN))], PAGE_BYTES, "arrived damaged"),
        ([LEND, fd_frames.encode_loan(LOAN)] * 2, PAGE_BYTES, "no descriptor|lent already"),
        ([LEND, struct.pack("<II", 2**31, 0)], PAGE_BYTES, "a list of 2147483648 bytes"),
        (places_frame(Place(PageId(1), 0, 1000), length=1000), None, "page 1 was not lent"),
        (
            [LEND, fd_frames.encode_loan(LOAN), *places_frame(Place(PageId(1), PAGE_BYTES - 999, 1000), length=1000)],
            PAGE_BYTES,
            "over its end",
        ),
        (places_frame(Place(PageId(1), 0, 1000), length=1001), None, "not those of a share"),
        ([encode_header(Header(FrameKind.REVOKE)), fd_frames.encode_pages([PageId(1)])], None, "was not lent"),
        ([encode_header(Header(FrameKind.TAKEN))], None, "taken that was not sent"),
    ],
)
async def test_a_peer_that_breaks_the_rules_breaks_the_link(
    road: Road, frames: list[bytes], size: int | None, reason: str
) -> None:
    """A negative size: the file is not sealed."""
    async with started(road) as (a, b, link):
        file = None if size is None else file_of(abs(size), sealed=size > 0)
        link._sock.write(frames, file)
        if file is not None:
            os.close(file)
        error = await b.end()
        assert isinstance(error, LinkBrokenError)
        assert any(part in error.reason for part in reason.split("|")), error.reason
        await a.end()


async def test_a_peer_that_sends_more_descriptors_than_it_may_is_cut_off(road: Road) -> None:
    async with started(road) as (_, b, link):
        file = file_of(PAGE_BYTES, sealed=True)
        ping = encode_header(Header(FrameKind.PING))
        with contextlib.suppress(OSError):  # cut off before the last of them
            for _ in range(8):
                link._sock.write([ping], file)
        os.close(file)
        assert "descriptors" in (await b.end()).reason


async def test_frames_of_lent_pages_break_a_link_between_machines() -> None:
    road = Road("tcp")
    async with two_links(road) as (one, other):
        a, b = End(one), End(other)
        one._sock.write(places_frame(Place(PageId(1), 0, 1000), length=1000))
        assert "PLACES" in (await b.end()).reason
        await a.end()
    road.close()


async def test_a_process_of_another_user_is_refused_on_both_sides(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, address = await road.listen(identity(PARENT), lambda _: None)
    assert mode_of(address) == 0o600
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(LinkRefusedError, match=f"its process is of user {user}, this one of {user + 1}"):
        await road.dial(address, identity(CHILD), Expected(PARENT))
    sock, said = await open_socket(address), b""
    with contextlib.suppress(ConnectionError):  # it did not listen
        await send_message(sock, Handshake(identity(CHILD), is_dialler=True).hello)
        said = await asyncio.get_running_loop().sock_recv(sock, 1)
    assert said == b"", "nothing is said to it, whatever it knows"
    await until(lambda: listener.num_refused == 2)
    sock.close()
    await listener.close()
    assert mode_of(address) is None
