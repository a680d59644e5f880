"""Carries the greeting of `hello` over a socket, whatever its kind, and lets in at a door who has passed it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from services.worker.sockets import GREETING_S, Door, MessageTooLongError, receive_message, send_message
from services.worker.transfer.hello import MAX_HELLO_BYTES, Expected, Handshake, Identity, LinkHello, refusal, welcome
from services.worker.transfer.link import LinkBrokenError, LinkRefusedError
from services.worker.transfer.socket_link import SocketLink
from shared.ids import WorkerId

STRANGER: Final = WorkerId("a stranger")

L = TypeVar("L", bound=SocketLink)
MakeLink = Callable[[socket.socket, LinkHello], L]
"""Returns the link over a socket, to whoever said hello there."""


class LinkListener:
    """Accepts links from the workers of this cluster.

    Args:
        door: at which they call; owned.
        identity: of this worker.
        make: a link over a socket that is past its greeting.
        on_link: called on the event loop with each link that is made; has to start it.
        check: raises `LinkRefusedError` for a socket over which nobody is greeted.
    """

    def __init__(
        self,
        door: Door,
        identity: Identity,
        make: MakeLink[L],
        on_link: Callable[[L], None],
        check: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        self._door = door
        self._identity = identity
        self._check = check
        self._let_in: Callable[[socket.socket, LinkHello], None] = lambda sock, hello: on_link(make(sock, hello))
        door.start(self._greet)

    @property
    def port(self) -> int:
        """Where it listens, if that is a port."""
        return self._door.port

    @property
    def num_refused(self) -> int:
        """Connections that became no link."""
        return self._door.num_refused

    async def close(self) -> None:
        """Listen no more; links that were made stay. Idempotent."""
        await self._door.close()

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            self._check(sock)
            async with asyncio.timeout(GREETING_S):
                hello = await answer(sock, self._identity)
        except (OSError, TimeoutError, LinkRefusedError) as error:
            sock.close()
            self._door.refuse(address, str(error) or "no greeting in time")
        else:
            self._let_in(sock, hello)


async def call(sock: socket.socket, identity: Identity, expected: Expected) -> LinkHello:
    """Return what the listener at the other end says of itself, when both have proved who they are.

    Raises:
        LinkRefusedError: one of the two does not want the other.
        OSError: it has gone.
    """
    shake = Handshake(identity, is_dialler=True, expected=expected)
    async with _saying_why(sock):
        await send_message(sock, shake.hello)
        hello = shake.take_hello(await hear(sock))
        shake.check_proof(await hear(sock))
        await send_message(sock, shake.proof())
        shake.check_welcome(await hear(sock))
    return hello


async def answer(sock: socket.socket, identity: Identity) -> LinkHello:
    """Return what the dialler at the other end says of itself, as `call`."""
    shake = Handshake(identity, is_dialler=False)
    async with _saying_why(sock):
        hello = shake.take_hello(await hear(sock))
        await send_message(sock, shake.hello)
        await send_message(sock, shake.proof())
        shake.check_proof(await hear(sock))
        await send_message(sock, welcome())
    return hello


async def hear(sock: socket.socket) -> bytes:
    """Return the next part of a greeting.

    Raises:
        LinkRefusedError: it is longer than any.
        OSError: the other side has gone.
    """
    try:
        return await receive_message(sock, MAX_HELLO_BYTES)
    except MessageTooLongError as error:
        raise LinkRefusedError(STRANGER, str(error)) from None


@contextlib.asynccontextmanager
async def in_time(expected: Expected, address: str) -> AsyncIterator[None]:
    """Let a call take `GREETING_S` at most, and say of its failure whom it was for.

    Raises:
        LinkBrokenError: nobody answers there in time.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            yield
    except TimeoutError:
        raise LinkBrokenError(expected.worker_id, f"no answer from {address} within {GREETING_S:g} s") from None
    except OSError as error:
        raise LinkBrokenError(expected.worker_id, f"{address}: {error.strerror or error}") from None


@contextlib.asynccontextmanager
async def _saying_why(sock: socket.socket) -> AsyncIterator[None]:
    """Tell the other side why it is refused."""
    try:
        yield
    except LinkRefusedError as error:
        with contextlib.suppress(OSError):  # it has gone
            await send_message(sock, refusal(error.reason))
        raise
