"""Who may send first to other workers: what a step waits for, before what nobody waits for.

Source: `KunServe v1, section 4.2` and `v2, section 4.2` (activations go before KV, and both before parameters).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final

URGENT_PRIORITY: Final = 6
BULK_PRIORITY: Final = 2
"""Of the system's queues in front of a network card: TC_PRIO_INTERACTIVE and TC_PRIO_BULK."""


class LinkPriority:
    """Of the connections of one worker. Any thread.

    What is sent in turn goes in pieces, so an urgent message waits for one piece at most.
    """

    def __init__(self) -> None:
        self._num_urgent = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """Send a message that somebody waits for."""
        with self._changed:
            self._num_urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_urgent -= 1
                self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Return when nothing urgent is being sent, or after so long; whether it was the former."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_urgent, limit_s)


def set_priority(sock: socket.socket, priority: int) -> None:
    """Give what a TCP connection sends a place in the system's queues, where it has such."""
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "SO_PRIORITY"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
