"""What a cluster's dispatcher says of itself: answers under way, and what became of those that lost their worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.reading import parse_json
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError

DISPATCHER_ID: Final = "dispatcher-0"
"""Of the only one that `sluice up` starts."""
ASK_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Answers that a worker began and did not end, as the dispatcher counts them since its start."""

    num_lost: int = 0
    num_recovered: int = 0
    num_failed: int = 0
    num_under_way: int = 0

    def since(self, before: Losses) -> Losses:
        """Return what has come since a look; a dispatcher that was started anew begins with nothing."""
        if self.num_lost < before.num_lost:
            return self
        return Losses(
            self.num_lost - before.num_lost,
            self.num_recovered - before.num_recovered,
            self.num_failed - before.num_failed,
            self.num_under_way,
        )


@dataclass(frozen=True, slots=True)
class DispatcherDump:
    """What is read of it."""

    num_requests: int
    """Answers under way, those that wait included."""
    losses: dict[str, Losses]
    """By worker, of those that have lost some."""


async def ask_dispatcher(bus: Bus, cluster: str) -> DispatcherDump | None:
    """Return what the dispatcher says now, or None if it does not answer."""
    subject = Subjects(cluster).admin("dispatcher", DISPATCHER_ID, "dump")
    try:
        return read_dump(await bus.request(subject, b"", timeout_s=ASK_LIMIT_S))
    except BusError:
        return None


def read_dump(data: bytes) -> DispatcherDump | None:
    """Return what an answer says, or None if it is of another kind."""
    try:
        told = parse_json(data)
        losses = {str(name): Losses(**counts) for name, counts in told["workers"].items()}
        return DispatcherDump(int(told["num_requests"]), losses)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
