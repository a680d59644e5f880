"""Arrivals of one stream for a thread that waits for them: activations do not pass the event loop."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from services.worker.transfer.link import Arrival, LinkError


class Inbox:
    """A queue between a link's thread and the thread of whoever reads; any thread may read.

    What may lie in it is bounded by the class's window.
    """

    def __init__(self, give_back: Callable[[Arrival], None]) -> None:
        self._queue: SimpleQueue[Arrival | LinkError] = SimpleQueue()
        self._give_back = give_back

    def put(self, item: Arrival | LinkError) -> None:
        """Add an arrival, or say that none will come any more."""
        self._queue.put(item)

    def get(self, timeout_s: float) -> Arrival:
        """Wait for the next arrival; its body is the caller's, and its credit is given back.

        Raises:
            TimeoutError: none came in time.
            LinkError: none will come any more.
        """
        try:
            item = self._queue.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"nothing arrived within {timeout_s} s") from None
        if isinstance(item, LinkError):
            self._queue.put(item)  # for the next who asks
            raise type(item)(item.peer_id, item.reason)
        self._give_back(item)
        return item
