"""Makes links over TCP: dial a worker, or listen for those that dial. The greeting is `hello`'s.

Of two workers the one with the smaller id dials, so that there is one link between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final

from services.worker.transfer.hello import MAX_HELLO_BYTES, Expected, Handshake, Identity, LinkHello, refusal, welcome
from services.worker.transfer.link import LinkBrokenError, LinkRefusedError
from services.worker.transfer.tcp_link import TcpLink
from shared.ids import WorkerId
from shared.log import get_logger
from shared.tasks import TaskOwner

GREETING_S: Final = 3.0
"""Longest time that a greeting takes."""
MAX_GREETINGS: Final = 64
"""Most connections that are greeted at a time; more are closed at once."""
_STRANGER: Final = WorkerId("a stranger")


async def dial(host: str, port: int, identity: Identity, expected: Expected) -> TcpLink:
    """Return a link to a worker; it is not started yet.

    Raises:
        LinkBrokenError: nobody answers there in time.
        LinkRefusedError: one of the two does not want the other.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            address = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, where = address[0]
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
        sock: listening.
        identity: of this worker.
        on_link: called on the event loop with each link that is made; has to start it.
    """

    def __init__(self, sock: socket.socket, identity: Identity, on_link: Callable[[TcpLink], None]) -> None:
        self._sock = sock
        self._identity = identity
        self._on_link = on_link
        self._tasks = TaskOwner(max_tasks=MAX_GREETINGS + 2)
        self.num_refused = 0
        """Connections that became no link."""

    @classmethod
    async def open(cls, host: str, port: int, identity: Identity, on_link: Callable[[TcpLink], None]) -> LinkListener:
        """Listen at an address; port 0 is any free one.

        Raises:
            OSError: it is not this machine's, or taken.
        """
        address = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = address[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(MAX_GREETINGS)
            sock.settimeout(0)
        except BaseException:
            sock.close()
            raise
        listener = cls(sock, identity, on_link)
        listener._tasks.start(listener._accept(), name="link-listener")
        return listener

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._sock.getsockname()[1]
        return port

    async def close(self) -> None:
        """Listen no more; links that were made stay. Idempotent."""
        await self._tasks.close()
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:  # the caller went away at once, or there are too many open files
                get_logger().warning("a link was not accepted", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > MAX_GREETINGS:
                sock.close()
                self.num_refused += 1
                continue
            self._tasks.start(self._greet(sock, str(address[0])), name="link-greeting")

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                link = await _answer(sock, self._identity)
        except (OSError, TimeoutError, LinkRefusedError) as error:
            sock.close()
            self.num_refused += 1
            get_logger().warning("a link was refused", address=address, reason=str(error) or "no greeting in time")
        except BaseException:
            sock.close()
            raise
        else:
            self._on_link(link)


async def _dial(sock: socket.socket, where: tuple[object, ...], identity: Identity, expected: Expected) -> TcpLink:
    sock.settimeout(0)
    await asyncio.get_running_loop().sock_connect(sock, where)
    shake = Handshake(identity, is_dialler=True, expected=expected)
    async with _saying_why(sock):
        await _say(sock, shake.hello)
        hello = shake.take_hello(await _hear(sock))
        shake.check_proof(await _hear(sock))
        await _say(sock, shake.proof())
        shake.check_welcome(await _hear(sock))
    return _link(sock, hello, identity)


async def _answer(sock: socket.socket, identity: Identity) -> TcpLink:
    sock.settimeout(0)
    shake = Handshake(identity, is_dialler=False)
    async with _saying_why(sock):
        hello = shake.take_hello(await _hear(sock))
        await _say(sock, shake.hello)
        await _say(sock, shake.proof())
        shake.check_proof(await _hear(sock))
        await _say(sock, welcome())
    return _link(sock, hello, identity)


@contextlib.asynccontextmanager
async def _saying_why(sock: socket.socket) -> AsyncIterator[None]:
    """Tell the other side why it is refused."""
    try:
        yield
    except LinkRefusedError as error:
        with contextlib.suppress(OSError):  # it has gone
            await _say(sock, refusal(error.reason))
        raise


def _link(sock: socket.socket, hello: LinkHello, identity: Identity) -> TcpLink:
    max_frame_bytes = min(hello.max_frame_bytes, identity.params.max_frame_bytes)
    peer = (hello.worker_id, hello.incarnation)
    return TcpLink(sock, peer, hello.windows, max_frame_bytes, identity.params)


async def _say(sock: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, len(message).to_bytes(4, "little") + message)


async def _hear(sock: socket.socket) -> bytes:
    size = int.from_bytes(await _read(sock, 4), "little")
    if size > MAX_HELLO_BYTES:
        raise LinkRefusedError(_STRANGER, f"a greeting of {size} bytes")
    return await _read(sock, size)


async def _read(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionResetError("it hung up")
        data += part
    return data
