"""Links between machines: one TCP connection. See `socket_link`."""

from __future__ import annotations

from services.worker.transfer.socket_link import SocketLink


class TcpLink(SocketLink):
    """One end; implements `Link`. Made by `tcp_connect`."""
