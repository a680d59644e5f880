"""Makes links over TCP: dial a worker, or listen for those that dial. The greeting is `hello`'s.

Of two workers the one with the smaller id dials, so that there is one link between them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from services.worker.sockets import Door, resolve
from services.worker.transfer.greeting import LinkListener, MakeLink, call, in_time
from services.worker.transfer.hello import Expected, Identity, LinkHello
from services.worker.transfer.tcp_link import TcpLink


async def dial(host: str, port: int, identity: Identity, expected: Expected) -> TcpLink:
    """Return a link to a worker; it is not started yet.

    Raises:
        LinkBrokenError: nobody answers there in time.
        LinkRefusedError: one of the two does not want the other.
    """
    async with in_time(expected, f"{host}:{port}"):
        family, kind, protocol, where = await resolve(host, port)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(0)
            await asyncio.get_running_loop().sock_connect(sock, where)
            return _maker(identity)(sock, await call(sock, identity, expected))
        except BaseException:
            sock.close()
            raise


async def listen(host: str, port: int, identity: Identity, on_link: Callable[[TcpLink], None]) -> LinkListener:
    """Listen at an address; port 0 is any free one.

    Args:
        host: of this machine.
        port: there.
        identity: of this worker.
        on_link: called on the event loop with each link that is made; has to start it.

    Raises:
        OSError: the address is not this machine's, or taken.
    """
    return LinkListener(await Door.open(host, port, "link"), identity, _maker(identity), on_link)


def _maker(identity: Identity) -> MakeLink[TcpLink]:
    def make(sock: socket.socket, hello: LinkHello) -> TcpLink:
        max_frame_bytes = min(hello.max_frame_bytes, identity.params.max_frame_bytes)
        return TcpLink(sock, (hello.worker_id, hello.incarnation), hello.windows, max_frame_bytes, identity.params)

    return make
