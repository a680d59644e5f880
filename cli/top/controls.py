"""What the person at the keys has chosen. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cli.top.tables import REQUEST_ORDERS, WORKER_ORDERS


@dataclass(frozen=True, slots=True)
class Controls:
    """Which table comes first where both find no room, and how each is sorted."""

    on_workers: bool = False
    """The keys are about the workers; else about the requests."""
    worker_order: int = 0
    """Of `WORKER_ORDERS`."""
    request_order: int = 0
    """Of `REQUEST_ORDERS`."""
    is_reversed: bool = False

    def press(self, key: str) -> Controls:
        """Return what is chosen after a key; one that means nothing changes nothing."""
        if key == "\t":
            return replace(self, on_workers=not self.on_workers, is_reversed=False)
        if key == "r":
            return replace(self, is_reversed=not self.is_reversed)
        if key == "s" and self.on_workers:
            return replace(self, worker_order=(self.worker_order + 1) % len(WORKER_ORDERS), is_reversed=False)
        if key == "s":
            return replace(self, request_order=(self.request_order + 1) % len(REQUEST_ORDERS), is_reversed=False)
        return self
