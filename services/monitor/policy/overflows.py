"""Counts overflows: sequences that lost their KV memory, or stand still for want of it, while another worker had room.

    report: preempted ─────────────┐      another worker, open, not slow: room for a sequence of this one's average size
    report: waits for memory, 5 s ─┴─►    at each of its reports of the last 5 s ─► an overflow

Five seconds are longer than a request takes to move, with the decision to (`packing.md`), so it could have been there.
Who waits counts once, until nobody waits there any more. What is preempted for other reasons than want of memory counts
too.

Pure: reports in, a number out; time is an argument. Source: the project's own; Mell (section VI) calls a GPU whose
requests outgrow its memory overflowing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from shared.ids import Incarnation, WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.systems import PACKED_STEP_S

ROOM_S: Final = 5.0
"""For which another worker has had room."""


@dataclass(slots=True)
class _Seen:
    """What is remembered of a process."""

    incarnation: Incarnation
    digest: str
    num_preemptions: int
    from_s: float
    """When its first report came that says it is open."""
    lowest: deque[tuple[float, int]] = field(default_factory=deque)
    """Free blocks over the last `ROOM_S`: each is less than all that came later, so the first one is the least."""
    short_from_s: float | None = None
    """Since when somebody waits there for memory."""
    is_counted: bool = False


class OverflowCounter:
    """See the module."""

    def __init__(self) -> None:
        self._seen: dict[WorkerId, _Seen] = {}

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._seen.pop(worker_id, None)

    def absorb(self, report: WorkerReport, now_s: float) -> int:
        """Take a worker's report; return how many overflows it tells of."""
        seen = self._seen.get(report.worker_id)
        if seen is None or seen.incarnation != report.incarnation:
            total = report.num_preemptions_total
            seen = self._seen[report.worker_id] = _Seen(report.incarnation, report.model_digest, total, now_s)
        num_preempted = max(report.num_preemptions_total - seen.num_preemptions, 0)
        seen.num_preemptions = report.num_preemptions_total
        _note_room(seen, report, now_s)
        if not report.num_queued_for_memory:
            seen.short_from_s, seen.is_counted = None, False
        elif seen.short_from_s is None:
            seen.short_from_s = now_s
        has_waited = seen.short_from_s is not None and now_s - seen.short_from_s >= ROOM_S and not seen.is_counted
        if not num_preempted and not has_waited:
            return 0
        size = -(-report.num_used_blocks // max(report.num_running, 1))
        if not any(self._had_room(other, seen, size, now_s) for other in self._seen.values()):
            return 0
        seen.is_counted = seen.is_counted or has_waited
        return num_preempted + has_waited

    def _had_room(self, other: _Seen, seen: _Seen, size: int, now_s: float) -> bool:
        if other is seen or other.digest != seen.digest or not other.lowest:
            return False
        was_open = now_s - other.from_s >= ROOM_S and now_s - other.lowest[-1][0] <= ROOM_S
        return was_open and other.lowest[0][1] >= size


def _note_room(seen: _Seen, report: WorkerReport, now_s: float) -> None:
    is_open = report.phase is WorkerPhase.READY and not (report.migration.closing or report.held or report.stage)
    if not is_open or report.step_time_s > PACKED_STEP_S:
        seen.lowest.clear()
        seen.from_s = now_s
        return
    asked = max(report.num_demanded_blocks, report.num_uncomputed_blocks)
    free = report.num_blocks - report.num_used_blocks - asked
    while seen.lowest and seen.lowest[-1][1] >= free:
        seen.lowest.pop()
    seen.lowest.append((now_s, free))
    while seen.lowest[0][0] < now_s - ROOM_S:
        seen.lowest.popleft()
