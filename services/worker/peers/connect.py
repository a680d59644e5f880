"""Connections between workers: one listens for as long as it lives, and dials the others.

    dial ──► door ──► both prove the cluster's secret ──► whoever expects a connection of that purpose and plan

Workers are told of a plan at different times, so who dials may be early: a connection that nobody expects yet is kept
for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection
from typing import TypeVar

from services.worker.peers.door import GREETING_S, Door, resolve, split_address, watch
from services.worker.peers.frames import FrameKind, PeerLostError, hear, say, what_failed
from services.worker.peers.greeting import (
    MAX_GREETING_BYTES,
    MAX_REASON,
    Greeting,
    PeerAnswer,
    PeerHello,
    PeerIdentity,
    PeerProof,
    PeerReady,
    PeerRefused,
    PeerRefusedError,
    PeerWelcome,
    Proofs,
    Purpose,
    read_greeting,
)
from shared.addresses import host_and_port
from shared.errors import WireError
from shared.ids import WorkerId
from shared.process.log import get_logger
from shared.wire import encode

G = TypeVar("G", PeerHello, PeerAnswer, PeerProof, PeerWelcome, PeerReady)
Take = Callable[[PeerHello, socket.socket], None]
"""Is given a connection, which it welcomes and owns; or raises `PeerRefusedError`."""


class Peers:
    """This worker among the others. `open` makes one.

    Args:
        identity: of this worker.
        door: at which the others call; owned.
        host: under which they reach it.
        wait_s: how long a connection that nobody expects yet is kept.
    """

    def __init__(self, identity: PeerIdentity, door: Door, host: str, wait_s: float) -> None:
        self._identity = identity
        self._door = door
        self._host = host
        self._wait_s = wait_s
        self._expected: dict[tuple[str, int], Take] = {}
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls, identity: PeerIdentity, host: str = "127.0.0.1", port: int = 0, *, advertise: str = "", wait_s: float = 5.0
    ) -> Peers:
        """Listen at an address.

        Args:
            identity: see the class.
            host: of this machine.
            port: 0: any that is free.
            advertise: the name or address that others are told; empty: `host`.
            wait_s: see the class.

        Raises:
            OSError: the address is not this machine's, or taken.
        """
        peers = cls(identity, await Door.open(host, port), advertise or host, wait_s)
        peers._door.start(peers._greet)
        return peers

    @property
    def address(self) -> str:
        """`host:port` for others to dial."""
        return host_and_port(self._host, self._door.port)

    def expect(self, purposes: Collection[Purpose], plan_id: int, take: Take) -> None:
        """Let connections be taken from now on, those that came early first.

        Args:
            purposes: of the connections.
            plan_id: of the group for which they are.
            take: takes each of them.
        """
        self._expected |= {(purpose, plan_id): take for purpose in purposes}
        self._changed.set()
        self._changed = asyncio.Event()

    def forget(self, take: Take) -> None:
        """Let no more connections be taken by that. Idempotent."""
        self._expected = {key: known for key, known in self._expected.items() if known != take}

    async def dial(
        self, worker_id: WorkerId, address: str, purpose: str, plan_id: int = 0, index: int = 0
    ) -> tuple[socket.socket, PeerWelcome]:
        """Return a connection to a worker that welcomes this one, and what it said.

        Args:
            worker_id: who should be there.
            address: where.
            purpose: what the connection is for.
            plan_id: of the group for which it is; 0: of none.
            index: of that worker in the group.

        Raises:
            PeerLostError: nobody is there, or hangs up.
            PeerRefusedError: it is another one, not of this cluster, or does not want this worker.
        """
        try:
            family, kind, protocol, where = await resolve(*split_address(address))
        except (OSError, ValueError) as error:
            raise PeerLostError(what_failed(error)) from error
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(0)
            watch(sock)
            try:
                await asyncio.get_running_loop().sock_connect(sock, where)
            except OSError as error:
                raise PeerLostError(what_failed(error)) from error
            hello = encode(self._identity.hello(purpose, plan_id, index))
            await say(sock, FrameKind.GREETING, hello)
            return sock, await self._prove(sock, hello, worker_id)
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        """Listen no more; connections that somebody has stay. Idempotent."""
        await self._door.close()

    async def _prove(self, sock: socket.socket, hello: bytes, worker_id: WorkerId) -> PeerWelcome:
        """Go on with a greeting that this worker has begun."""
        answer = await _hear(sock)
        who = read_greeting(answer, PeerAnswer).worker_id
        if who != worker_id:
            raise PeerRefusedError(f"{worker_id} was expected, and {who} answers")
        proofs = Proofs(self._identity.secret, hello, answer)
        proofs.check("listener", await hear_greeting(sock, PeerProof))
        await say_greeting(sock, proofs.of("dialler"))
        return await hear_greeting(sock, PeerWelcome)

    async def _greet(self, sock: socket.socket, address: str) -> None:
        who = "a stranger"
        try:
            watch(sock)
            async with asyncio.timeout(GREETING_S):
                said = await self._check(sock)
            who = f"{said.worker_id}, process {said.incarnation}"
            (await self._taker(said))(said, sock)
        except (OSError, TimeoutError, PeerRefusedError) as error:
            reason = str(error) or "no greeting in time"
            get_logger().warning("peer_refused", address=address, peer=who, reason=reason)
            with sock, contextlib.suppress(OSError, TimeoutError):  # it has gone
                async with asyncio.timeout(GREETING_S):
                    await say_greeting(sock, PeerRefused(reason=reason[:MAX_REASON]))

    async def _check(self, sock: socket.socket) -> PeerHello:
        """Return what a dialler says, which is of this cluster."""
        hello = await _hear(sock)
        said = read_greeting(hello, PeerHello)
        if said.worker_id == self._identity.worker_id:
            raise PeerRefusedError(f"{said.worker_id} is this worker's own name")
        answer = encode(self._identity.answer())
        proofs = Proofs(self._identity.secret, hello, answer)
        await say(sock, FrameKind.GREETING, answer)
        await say_greeting(sock, proofs.of("listener"))
        proofs.check("dialler", await hear_greeting(sock, PeerProof))
        if said.model != self._identity.model:
            raise PeerRefusedError(f"{said.worker_id} has another model: parameters, number format or KV differ")
        return said

    async def _taker(self, said: PeerHello) -> Take:
        """Return who takes a connection, and may come to expect it a little later."""
        if said.purpose not in list(Purpose):
            raise PeerRefusedError(f"nobody here offers '{said.purpose}'")
        key = said.purpose, said.plan_id
        try:
            async with asyncio.timeout(self._wait_s):
                while key not in self._expected:
                    await self._changed.wait()
        except TimeoutError:
            what = f"this worker has not joined plan {said.plan_id}" if said.plan_id else f"no {said.purpose} is due"
            raise PeerRefusedError(f"{what} within {self._wait_s:g} s") from None
        return self._expected[key]


async def say_greeting(sock: socket.socket, message: Greeting) -> None:
    """Send a part of a greeting; raises `PeerLostError`."""
    await say(sock, FrameKind.GREETING, encode(message))


async def hear_greeting(sock: socket.socket, wanted: type[G]) -> G:
    """Return the next part of a greeting.

    Raises:
        PeerLostError: the other side has gone.
        PeerRefusedError: it refuses, or says something else.
    """
    return read_greeting(await _hear(sock), wanted)


async def _hear(sock: socket.socket) -> bytes:
    try:
        return await hear(sock, FrameKind.GREETING, MAX_GREETING_BYTES)
    except WireError as error:
        raise PeerRefusedError(f"it does not greet: {error.reason}") from None
