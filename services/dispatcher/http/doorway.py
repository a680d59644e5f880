"""How many connections may be open: in all, and from one address. Decides; `connection.py` acts.

No address can use up the places of all others, and all together leave the process the descriptors that it needs itself.
"""

from __future__ import annotations

import resource
from typing import Final

from services.dispatcher.access.throttle import network_of
from services.dispatcher.http.errors import ApiError

RESERVED_FILES: Final = 256
"""Descriptors that are not for clients: the broker, files, the log."""


class Doorway:
    """Counts open connections.

    Args:
        max_connections: in all.
        max_per_address: of one IPv4 address, or one IPv6 network of 64 bits.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self.max_connections = max_connections
        self._max_per_address = max_per_address
        self._by_address: dict[str, int] = {}
        self.num_open = 0
        self.num_refused = 0
        """Connections that were turned away, since the start."""

    def enter(self, address: str) -> ApiError | None:
        """Count a new connection, or return why it is turned away (then it is not counted).

        Args:
            address: from `address_of`.
        """
        count = self._by_address.get(address, 0)
        if self.num_open >= self.max_connections:
            self.num_refused += 1
            message = f"The server has {self.max_connections} open connections, which is its limit. Try again soon."
            return ApiError(503, "too_many_connections", message, retry_after_s=1.0, close=True)
        if count >= self._max_per_address:
            self.num_refused += 1
            message = f"Your address has {count} open connections, which is the limit. Use them again, or close some."
            return ApiError(429, "too_many_connections", message, retry_after_s=1.0, close=True)
        self._by_address[address] = count + 1
        self.num_open += 1
        return None

    def leave(self, address: str) -> None:
        """Forget a connection that `enter` let in."""
        count = self._by_address[address] - 1
        assert count >= 0, "a connection left twice"
        if count:
            self._by_address[address] = count
        else:
            del self._by_address[address]
        self.num_open -= 1


def address_of(peer: object) -> str:
    """Return whom a connection counts for: the IPv4 address, or the IPv6 network.

    Args:
        peer: the transport's `peername`.
    """
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    return network_of(str(peer[0])) or "unknown"


def raise_file_limit(max_connections: int) -> None:
    """Let this process open a file for each connection, as far as the system allows it without further rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def affordable_connections(max_connections: int) -> int:
    """Return how many of these connections the process has descriptors for; at least one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, soft - RESERVED_FILES))
