"""Tells systemd how a cluster is that it has started (`Type=notify`), as sd_notify(3) says."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*lines: str) -> None:
    """Send lines such as `READY=1` and `STATUS=…` to who listens at `NOTIFY_SOCKET`, if anybody does."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    where = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto("\n".join(lines).encode(), where)
