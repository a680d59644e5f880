"""Makes links by descriptor between two workers of one machine. The greeting is `hello`'s, as over TCP.

The peer's process has to be of the same user besides, as the system says: a descriptor gives access to memory. The path
is a worker's own, of this process, so that it is new each time; nobody else's file is removed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from services.worker import sockets
from services.worker.sockets import Door
from services.worker.transfer.fd_link import FdLink, PageSharing
from services.worker.transfer.greeting import STRANGER, LinkListener, MakeLink, call, in_time
from services.worker.transfer.hello import Expected, Identity, LinkHello
from services.worker.transfer.link import LinkRefusedError
from shared.ids import WorkerId


async def dial(path: Path, identity: Identity, expected: Expected, sharing: PageSharing) -> FdLink:
    """Return a link to a worker of this machine; it is not started yet.

    Raises:
        LinkBrokenError: nobody answers there in time.
        LinkRefusedError: one of the two does not want the other.
    """
    async with in_time(expected, str(path)):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(0)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            check_user(sock, expected.worker_id)
            return _maker(identity, sharing)(sock, await call(sock, identity, expected))
        except BaseException:
            sock.close()
            raise


async def listen(
    path: Path, identity: Identity, sharing: PageSharing, on_link: Callable[[FdLink], None]
) -> LinkListener:
    """Listen at a path of at most 107 bytes, where nothing is yet; it is there until the listener closes.

    Args:
        path: in a directory that is there.
        identity: of this worker.
        sharing: what its links lend, and how they borrow.
        on_link: called on the event loop with each link that is made; has to start it.

    Raises:
        OSError: the path cannot be made, is taken, or is too long.
    """
    return LinkListener(Door.open_path(path, "link"), identity, _maker(identity, sharing), on_link, check_user)


def check_user(sock: socket.socket, peer_id: WorkerId = STRANGER) -> None:
    """Return if the process at the other end is of this process's user.

    Raises:
        LinkRefusedError: it is not.
    """
    try:
        sockets.check_user(sock)
    except PermissionError as error:
        raise LinkRefusedError(peer_id, str(error)) from None


def _maker(identity: Identity, sharing: PageSharing) -> MakeLink[FdLink]:
    def make(sock: socket.socket, hello: LinkHello) -> FdLink:
        max_frame_bytes = min(hello.max_frame_bytes, identity.params.max_frame_bytes)
        peer = (hello.worker_id, hello.incarnation)
        return FdLink(sock, peer, hello.windows, max_frame_bytes, identity.params, sharing)

    return make
