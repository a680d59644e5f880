"""Workers that greet each other, and who stands between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from services.worker.peers.connect import Peers
from services.worker.peers.frames import FrameKind, PeerLostError, hear, say
from services.worker.peers.greeting import MAX_GREETING_BYTES, PeerIdentity
from shared.ids import Incarnation, WorkerId
from tests.support.leaks import whats_open

PASSWORD = "a password of workers"


def identity(index: int, secret: str = PASSWORD, model: str = "0f") -> PeerIdentity:
    """Return who a worker is to others."""
    return PeerIdentity(WorkerId(f"w{index}"), Incarnation(index + 1), secret.encode(), model)


@asynccontextmanager
async def listening(index: int, wait_s: float = 5.0) -> AsyncIterator[Peers]:
    """A worker after which no socket and no task is left."""
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 0)
    before, tasks = whats_open(), asyncio.all_tasks()
    peers = await Peers.open(identity(index), wait_s=wait_s)
    try:
        yield peers
    finally:
        await peers.close()
        await peers.close()
    assert whats_open() == before
    assert asyncio.all_tasks() == tasks


async def until_greeted(peers: Peers, count: int = 1) -> None:
    """Return when so many callers are greeted, or kept, at a time."""
    async with asyncio.timeout(10):
        while len(peers._door._greeted) != count:
            await asyncio.sleep(0)


def port_of(peers: Peers) -> int:
    """Return where it listens."""
    return int(peers.address.rpartition(":")[2])


async def open_to(peers: Peers) -> socket.socket:
    """Return a connection that has said nothing yet."""
    sock = socket.socket()
    sock.settimeout(0)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port_of(peers)))
    return sock


async def hear_raw(sock: socket.socket) -> bytes:
    """Return the next part of a greeting as it was said."""
    async with asyncio.timeout(10):
        return await hear(sock, FrameKind.GREETING, MAX_GREETING_BYTES)


async def say_raw(sock: socket.socket, data: bytes) -> None:
    """Say a part of a greeting."""
    await say(sock, FrameKind.GREETING, data)


@asynccontextmanager
async def between(peers: Peers, change: Callable[[int, bytes], bytes]) -> AsyncIterator[str]:
    """Somebody who passes greetings on to a worker, and may change them; yields where.

    Args:
        peers: to whom.
        change: of the number of a part (0: hello, 1: answer, 2 and 3: proofs, 4: welcome) and its bytes.
    """
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0)

        async def pass_on() -> None:
            one, _ = await loop.sock_accept(door)
            with one, await open_to(peers) as other:
                one.settimeout(0)
                try:
                    for number, ways in enumerate([(one, other), (other, one), (other, one), (one, other)]):
                        await say_raw(ways[1], change(number, await hear_raw(ways[0])))
                    await say_raw(one, change(4, await hear_raw(other)))
                except PeerLostError:  # one of them has had enough
                    return

        passing = asyncio.create_task(pass_on())
        try:
            yield f"127.0.0.1:{door.getsockname()[1]}"
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)
