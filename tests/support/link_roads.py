"""The ways by which two processes of one machine are linked, so that one suite holds for all of them.

`tcp` over loopback; `fd`, where bulk bytes lie in pages that are lent; `fd-inline`, where they lie elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import PageId
from services.worker.sockets import split_address
from services.worker.transfer import fd_connect, tcp_connect
from services.worker.transfer.fd_link import PageSharing
from services.worker.transfer.greeting import LinkListener
from services.worker.transfer.hello import Expected, Identity
from services.worker.transfer.lending import LentPages
from services.worker.transfer.socket_link import SocketLink

ROADS: Final = ("tcp", "fd", "fd-inline")
PAGE_BYTES: Final = 64 * 1024
NUM_PAGES: Final = 2048
Bytes = npt.NDArray[np.uint8]


class SharedBytes:
    """Memory in pages that can be lent, mapped in an order that is none of theirs."""

    def __init__(self, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES, seed: int = 0) -> None:
        self.memory = PosixMemory(page_bytes, num_pages)
        self.range = self.memory.reserve(page_bytes * num_pages)
        order = np.random.default_rng(seed).permutation(num_pages)
        self.range.map_run(0, [PageId(int(page)) for page in order])
        self.bytes: Bytes = self.range.tensor().numpy()
        self.lent = LentPages(self.memory, [self.range])
        self._used = 0

    def take(self, num_bytes: int) -> Bytes:
        """Return bytes that nobody else has taken; where they begin is odd on purpose."""
        begin = self._used + 17
        self._used = begin + num_bytes
        assert self._used <= len(self.bytes), "there is no more memory to share"
        return self.bytes[begin : self._used]


class Road:
    """Makes links of one kind between this process and others. Closed by whoever made it.

    Args:
        kind: see the module.
        shared: memory that `fd` lends; owned.
    """

    def __init__(self, kind: str, shared: SharedBytes | None = None) -> None:
        self.kind = kind
        self.shared = (shared or SharedBytes()) if kind == "fd" else None
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-")
        self._num_paths = 0

    @property
    def sharing(self) -> PageSharing:
        """What an end of a link lends."""
        return PageSharing(self.shared.lent if self.shared is not None else None)

    def take(self, num_bytes: int) -> Bytes:
        """Return zeroed memory for what is sent, of the kind that this road is about."""
        return self.shared.take(num_bytes) if self.shared is not None else np.zeros(num_bytes, dtype=np.uint8)

    def put(self, data: bytes) -> memoryview:
        """Return a copy of some bytes in such memory."""
        place = self.take(len(data))
        place[:] = np.frombuffer(data, dtype=np.uint8)
        return place.data

    async def listen(self, identity: Identity, on_link: Callable[[SocketLink], None]) -> tuple[LinkListener, str]:
        """Return a listener, and where it is to be called."""
        if self.kind == "tcp":
            listener = await tcp_connect.listen("127.0.0.1", 0, identity, on_link)
            return listener, f"127.0.0.1:{listener.port}"
        self._num_paths += 1
        path = Path(self._folder.name) / f"{identity.worker_id}-{self._num_paths}"
        return await fd_connect.listen(path, identity, self.sharing, on_link), str(path)

    async def dial(self, address: str, identity: Identity, expected: Expected) -> SocketLink:
        """Return a link to whoever listens there."""
        return await dial(address, identity, expected, self.sharing)

    def close(self) -> None:
        """Remove what was made."""
        self._folder.cleanup()
        if self.shared is not None:
            self.shared.memory.close()


async def dial(address: str, identity: Identity, expected: Expected, sharing: PageSharing | None = None) -> SocketLink:
    """Return a link to an address: a path, or host and port."""
    if address.startswith("/"):
        return await fd_connect.dial(Path(address), identity, expected, sharing or PageSharing())
    host, port = split_address(address)
    return await tcp_connect.dial(host, port, identity, expected)


async def open_socket(address: str) -> socket.socket:
    """Return a socket that is connected to an address, and says nothing."""
    is_path = address.startswith("/")
    sock = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    sock.settimeout(0)
    await asyncio.get_running_loop().sock_connect(sock, address if is_path else split_address(address))
    return sock
