"""Makes links over TCP: dial a worker, or listen for those that dial. The greeting is `hello`'s.

Of two workers the one with the smaller id dials, so that there is one link between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final

from services.worker.sockets import GREETING_S, Door, MessageTooLongError, receive_message, resolve, send_message
from services.worker.transfer.hello import MAX_HELLO_BYTES, Expected, Handshake, Identity, LinkHello, refusal, welcome
from services.worker.transfer.link import LinkBrokenError, LinkRefusedError
from services.worker.transfer.tcp_link import TcpLink
from shared.ids import WorkerId

_STRANGER: Final = WorkerId("a stranger")


async def dial(host: str, port: int, identity: Identity, expected: Expected) -> TcpLink:
    """Return a link to a worker; it is not started yet.

    Raises:
        LinkBrokenError: nobody answers there in time.
        LinkRefusedError: one of the two does not want the other.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            family, kind, protocol, where = await resolve(host, port)
            sock = socket.socket(family, kind, protocol)
            try:
                return await _dial(sock, where, identity, expected)
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise LinkBrokenError(expected.worker_id, f"no answer from {host}:{port} within {GREETING_S:g} s") from None
    except OSError as error:
        raise LinkBrokenError(expected.worker_id, f"{host}:{port}: {error.strerror or error}") from None


class LinkListener:
    """Accepts links from the workers of this cluster. `open` makes one.

    Args:
        door: at which they call; owned.
        identity: of this worker.
        on_link: called on the event loop with each link that is made; has to start it.
    """

    def __init__(self, door: Door, identity: Identity, on_link: Callable[[TcpLink], None]) -> None:
        self._door = door
        self._identity = identity
        self._on_link = on_link

    @classmethod
    async def open(cls, host: str, port: int, identity: Identity, on_link: Callable[[TcpLink], None]) -> LinkListener:
        """Listen at an address; port 0 is any free one.

        Raises:
            OSError: it is not this machine's, or taken.
        """
        listener = cls(await Door.open(host, port, "link"), identity, on_link)
        listener._door.start(listener._greet)
        return listener

    @property
    def port(self) -> int:
        """Where it listens."""
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
            async with asyncio.timeout(GREETING_S):
                link = await _answer(sock, self._identity)
        except (OSError, TimeoutError, LinkRefusedError) as error:
            sock.close()
            self._door.refuse(address, str(error) or "no greeting in time")
        else:
            self._on_link(link)


async def _dial(sock: socket.socket, where: tuple[object, ...], identity: Identity, expected: Expected) -> TcpLink:
    sock.settimeout(0)
    await asyncio.get_running_loop().sock_connect(sock, where)
    shake = Handshake(identity, is_dialler=True, expected=expected)
    async with _saying_why(sock):
        await send_message(sock, shake.hello)
        hello = shake.take_hello(await _hear(sock))
        shake.check_proof(await _hear(sock))
        await send_message(sock, shake.proof())
        shake.check_welcome(await _hear(sock))
    return _link(sock, hello, identity)


async def _answer(sock: socket.socket, identity: Identity) -> TcpLink:
    shake = Handshake(identity, is_dialler=False)
    async with _saying_why(sock):
        hello = shake.take_hello(await _hear(sock))
        await send_message(sock, shake.hello)
        await send_message(sock, shake.proof())
        shake.check_proof(await _hear(sock))
        await send_message(sock, welcome())
    return _link(sock, hello, identity)


@contextlib.asynccontextmanager
async def _saying_why(sock: socket.socket) -> AsyncIterator[None]:
    """Tell the other side why it is refused."""
    try:
        yield
    except LinkRefusedError as error:
        with contextlib.suppress(OSError):  # it has gone
            await send_message(sock, refusal(error.reason))
        raise


def _link(sock: socket.socket, hello: LinkHello, identity: Identity) -> TcpLink:
    max_frame_bytes = min(hello.max_frame_bytes, identity.params.max_frame_bytes)
    peer = (hello.worker_id, hello.incarnation)
    return TcpLink(sock, peer, hello.windows, max_frame_bytes, identity.params)


async def _hear(sock: socket.socket) -> bytes:
    try:
        return await receive_message(sock, MAX_HELLO_BYTES)
    except MessageTooLongError as error:
        raise LinkRefusedError(_STRANGER, str(error)) from None
