"""How many connections may be open: in all, and from one address. Decides; `connection.py` acts.

No address can use up the places of all others, and all together leave the process the descriptors that it needs itself.
Who finds no place may stay as a visitor, for one request: a probe is answered also by a server that is full.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final, Protocol

from services.dispatcher.access.throttle import network_of
from services.dispatcher.http.errors import ApiError
from shared.errors import StartupError

MAX_VISITORS: Final = 16
"""Visitors at a time; of more, the one that has stayed for longest goes."""
SPARE_FILES: Final = 16
"""Descriptors for what is opened after the start: the port, the broker anew, the file of keys, names to look up, and
those that came at once and are not turned away yet."""
MIN_CONNECTIONS: Final = 16
"""Connections with which serving is worth a start."""


class Visitor(Protocol):
    """A connection that found no place."""

    def send_away(self) -> None:
        """End it at once, for another visitor."""


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
        self._visitors: dict[Visitor, None] = {}
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
            message = f"The server has {self.max_connections} open connections, which is its limit. Try again soon."
            return ApiError(503, "too_many_connections", message, retry_after_s=1.0, close=True)
        if count >= self._max_per_address:
            message = f"Your address has {count} open connections, which is the limit. Use them again, or close some."
            return ApiError(429, "too_many_connections", message, retry_after_s=1.0, close=True)
        self._by_address[address] = count + 1
        self.num_open += 1
        return None

    def is_crowded(self, address: str) -> bool:
        """Return whether less than a quarter of the places is left, in all or for an address: best effort has to go.

        Its tier is known only when it is inside.
        """
        count = self._by_address.get(address, 0)
        return self.num_open > _mostly(self.max_connections) or count > _mostly(self._max_per_address)

    def visit(self, visitor: Visitor) -> None:
        """Let one that `enter` turned away stay until `end_visit`, or until it is sent away for another."""
        if len(self._visitors) >= MAX_VISITORS:
            oldest = next(iter(self._visitors))
            del self._visitors[oldest]
            oldest.send_away()
        self._visitors[visitor] = None

    def end_visit(self, visitor: Visitor) -> None:
        """Forget a visitor; idempotent."""
        self._visitors.pop(visitor, None)

    def count_refused(self) -> None:
        """Count a connection that was turned away; a probe that was answered is none."""
        self.num_refused += 1

    def leave(self, address: str) -> None:
        """Forget a connection that `enter` let in."""
        count = self._by_address[address] - 1
        assert count >= 0, "a connection left twice"
        if count:
            self._by_address[address] = count
        else:
            del self._by_address[address]
        self.num_open -= 1


def _mostly(most: int) -> int:
    return most - most // 4


def address_of(peer: object) -> str:
    """Return whom a connection counts for: the IPv4 address, or the IPv6 network.

    Args:
        peer: the transport's `peername`.
    """
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    return network_of(str(peer[0])) or "unknown"


def claim_files(max_connections: int) -> int:
    """Let this process open a file for each connection, as far as the system does, and return how many it lets.

    Raises:
        StartupError: there would be next to none.
    """
    num_own = len(list(Path("/dev/fd").iterdir())) + SPARE_FILES + MAX_VISITORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _higher(soft, hard, num_own + max_connections)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY:
        return max_connections
    needed = num_own + min(max_connections, MIN_CONNECTIONS)
    if limit < needed:
        raise StartupError(
            f"the dispatcher may open {limit} files, and needs {needed}",
            f"Start it where `ulimit -Hn` says {needed} or more (systemd: LimitNOFILE=, Docker: --ulimit nofile=)",
            "too_few_files",
        )
    return min(max_connections, limit - num_own)


def _higher(soft: int, hard: int, wanted: int) -> int:
    """Return the limit that holds after it was raised towards what is wanted, without further rights."""
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return soft
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
