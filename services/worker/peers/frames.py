"""Frames between workers: one format, and one way to read it for threads and one for the event loop.

    magic b"SLPF" · version u8 · kind u8 · 2 zero bytes · words 2 × u32 · payload bytes u64 ·
    CRC-32 of the payload u32 · CRC-32 of all this u32 · payload

What the two words say is the kind's affair. Whether the payload has a checksum is its stream's (else 0): parameters are
checked by their digests, messages by their own seal. A header is checked before memory is taken for what follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from services.worker.peers.link_priority import URGENT_PRIORITY, LinkPriority, set_priority
from shared.checksum import SEAL_BYTES, check_seal, seal
from shared.errors import WireError

Buffer = bytes | bytearray | memoryview
Words = tuple[int, int]

MAX_PAYLOAD_BYTES: Final = 2**30
"""Largest payload: an activation of 65 536 tokens of 8 192 numbers in 16 bits."""
_MAGIC: Final = b"SLPF"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBB2xIIQI")
HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES


class FrameKind(IntEnum):
    """Everything that two workers say to each other; a number is never used again for something else."""

    GREETING = 1  # `greeting.py`

    BATCH = 16  # `pipeline/stage_messages.py`
    HOST_COPY = 17
    ACTIVATION = 18
    STEP_FAILED = 19
    STEP_DONE = 20
    COPY_ENDED = 21
    CLOSE = 22
    KV_OVER = 23
    ALIVE = 24

    KV_OFFER = 32  # `kv_moves/kv_wire.py`
    KV_TABLE = 33
    KV_CHUNK = 34
    KV_PROGRESS = 35

    REMOTE_STEP = 48  # `kv_moves/remote_wire.py`
    REMOTE_ASK = 49
    REMOTE_ANSWER = 50
    REMOTE_FAILED = 51
    REMOTE_DONE = 52

    PARAMETER_ASK = 64  # `roles/parameter_lending.py`
    PARAMETER = 65

    PAGES = 80  # `pages/wire.py`
    PAGES_TAKEN = 81
    PAGES_MAPPED = 82
    PAGES_COMMIT = 83
    PAGES_UNDO = 84

    MIGRATION_ASK = 96  # `migration/socket_network.py`
    MIGRATION_ANSWER = 97


_KINDS: Final = frozenset(FrameKind)


class PeerLostError(ConnectionError):
    """The worker at the other end is gone, or the way to it; nothing more can be said or heard."""


@dataclass(frozen=True, slots=True)
class FrameHead:
    """What a header says."""

    kind: FrameKind
    words: Words
    num_bytes: int
    """Of the payload."""
    checksum: int
    """Of the payload, in a stream that has them; else 0."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One that has come."""

    kind: FrameKind
    words: Words
    payload: bytearray


def pack_head(kind: FrameKind, num_bytes: int, words: Words = (0, 0), checksum: int = 0) -> bytes:
    """Return the header of a frame."""
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"{kind.name} of {num_bytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return seal(_HEADER.pack(_MAGIC, _VERSION, kind, *words, num_bytes, checksum))


def read_head(data: bytes, kinds: Collection[FrameKind], max_bytes: int) -> FrameHead:
    """Return what the `HEADER_BYTES` of a header say.

    Args:
        data: of a header.
        kinds: of which the frame must be.
        max_bytes: of its payload.

    Raises:
        WireError: it is no header of this version, is damaged, or of a frame that is not due.
    """
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes")
    magic, version, number, *words, num_bytes, checksum = _HEADER.unpack(check_seal(data, "the header of a frame"))
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError("no frame of this version")
    if number not in _KINDS or (kind := FrameKind(number)) not in kinds:
        what = FrameKind(number).name if number in _KINDS else f"a frame of kind {number}"
        raise WireError(f"{what} came instead of {' or '.join(each.name for each in kinds)}")
    if num_bytes > max_bytes:
        raise WireError(f"{kind.name} of {num_bytes} bytes is over the limit of {max_bytes}")
    return FrameHead(kind, (words[0], words[1]), num_bytes, checksum)


def what_failed(error: Exception) -> str:
    """Return what the system says of an error; the event loop puts the address there instead."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


class FrameSocket:
    """Frames over a blocking stream socket. Any threads send, one frame at a time; one thread receives.

    Args:
        sock: connected; owned from now on.
        is_checked: payloads have checksums, as both ends know.
        urgent: of this worker's connections: what is sent here goes first; None: it does not.
        silence_s: longest time without a byte; then the other end counts as lost. None: any.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        is_checked: bool = False,
        urgent: LinkPriority | None = None,
        silence_s: float | None = None,
    ) -> None:
        sock.settimeout(silence_s)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if urgent is not None:
            set_priority(sock, URGENT_PRIORITY)
        self._sock = sock
        self._is_checked = is_checked
        self._urgent = urgent
        self._sending = threading.Lock()

    def send(self, kind: FrameKind, *parts: Buffer, words: Words = (0, 0)) -> None:
        """Send a frame whose payload is these parts, one behind the other; blocks while the other end takes nothing.

        Raises:
            PeerLostError: the other end is gone.
            WireError: it is too long.
        """
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        checksum = 0
        for view in views if self._is_checked else ():
            checksum = zlib.crc32(view, checksum)
        head = pack_head(kind, sum(len(view) for view in views), words, checksum)
        first = contextlib.nullcontext() if self._urgent is None else self._urgent.urgent()
        with first, self._sending:
            self._send([memoryview(head), *views])

    def send_pieces(self, kind: FrameKind, num_bytes: int, pieces: Iterable[Buffer]) -> None:
        """As `send`, of a payload without a checksum whose pieces are made one after the other; of one thread."""
        self._send([memoryview(pack_head(kind, num_bytes))])
        for piece in pieces:
            self._send([memoryview(piece).cast("B")])

    def receive(self, *kinds: FrameKind, max_bytes: int = MAX_PAYLOAD_BYTES) -> Frame:
        """Return the next frame; blocks until there is one.

        Args:
            *kinds: of which it must be.
            max_bytes: of its payload.

        Raises:
            PeerLostError: the other end is gone.
            WireError: something else comes, or it is damaged.
        """
        head = self.receive_head(*kinds, max_bytes=max_bytes)
        payload = bytearray(head.num_bytes)
        self.receive_payload(head, memoryview(payload))
        return Frame(head.kind, head.words, payload)

    def receive_head(self, *kinds: FrameKind, max_bytes: int = MAX_PAYLOAD_BYTES) -> FrameHead:
        """As `receive`, of the header alone."""
        data = bytearray(HEADER_BYTES)
        self.fill(memoryview(data))
        return read_head(bytes(data), kinds, max_bytes)

    def receive_payload(self, head: FrameHead, into: memoryview) -> None:
        """Receive what belongs to a header, which is as long as the view; raises as `receive`."""
        self.fill(into)
        if self._is_checked and zlib.crc32(into) != head.checksum:
            raise WireError(f"the checksum of {head.kind.name} is wrong")

    def fill(self, view: memoryview) -> None:
        """Receive a part of a payload without a checksum; raises as `receive`."""
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise PeerLostError(f"cannot receive: {what_failed(error)}") from error
            if not count:
                raise PeerLostError("the other end has closed the connection")
            view = view[count:]

    def shut(self) -> None:
        """End the connection: whoever waits at either end gets `PeerLostError`. Idempotent; from any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; nobody uses it any more. What was sent still arrives. Idempotent."""
        self._sock.close()

    def _send(self, parts: list[memoryview]) -> None:
        try:
            while parts:
                sent = self._sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise PeerLostError(f"cannot send: {what_failed(error)}") from error


async def say(sock: socket.socket, kind: FrameKind, payload: bytes) -> None:
    """Send a frame over a socket that does not block; raises as `FrameSocket.send`."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, pack_head(kind, len(payload)) + payload)
    except OSError as error:
        raise PeerLostError(f"cannot send: {what_failed(error)}") from error


async def hear(sock: socket.socket, kind: FrameKind, max_bytes: int) -> bytes:
    """Return the payload of the next frame on a socket that does not block; raises as `FrameSocket.receive`."""
    head = read_head(await _read(sock, HEADER_BYTES), (kind,), max_bytes)
    return await _read(sock, head.num_bytes)


async def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            count = await asyncio.get_running_loop().sock_recv_into(sock, view)
        except OSError as error:
            raise PeerLostError(f"cannot receive: {what_failed(error)}") from error
        if not count:
            raise PeerLostError("it hung up")
        view = view[count:]
    return bytes(data)
