"""Which workers have requests waiting for memory that others have: what `rebalance` is asked about, and when.

    view ─► short: the next in line does not fit ─┐
        └─► roomy: blocks are left for others ────┴─► ask those that are short who waits ─► GroupLoad ─► rebalance

What waits at a worker for another reason than memory keeps its room there. Best effort that gives way is in nobody's
way, and is brought nowhere. What a view says is up to a report old, so after each round some time passes.

Pure. Source: KunServe v1, section 4.3 ("Online dispatcher": after a drop, what overflows goes to spare groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.planner.policy.observe import can_work, giving_way, takes_requests
from services.planner.policy.rebalance import GroupLoad, QueuedRequest, Requeue, rebalance
from shared.ids import WorkerId
from shared.messages.queue import QueuedPart
from shared.messages.report import ClusterView, WorkerReport

MAX_SOURCES = 32
"""Workers that are asked in one round, those with the longest queues."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """A view in which some wait for memory that others have."""

    short: tuple[WorkerReport, ...]
    """The longest queue first."""
    roomy: tuple[WorkerReport, ...]
    """Sorted by name."""

    @property
    def num_queued(self) -> int:
        """Requests that wait for memory."""
        return sum(report.num_queued_for_memory for report in self.short)


def find_overflow(view: ClusterView) -> Overflow | None:
    """Return who is to be asked; None: nobody is short, or nobody has room."""
    reports = [status.report for status in view.workers if can_work(status) and takes_requests(status.report)]
    short = sorted(
        (report for report in reports if report.num_queued_for_memory and report.elastic is not None),
        key=lambda report: (-report.num_queued_for_memory, report.worker_id),
    )[:MAX_SOURCES]
    models = {report.model for report in short}
    roomy = sorted(
        (
            report
            for report in reports
            if report.model in models and not report.num_queued_for_memory and _free_blocks(report) > 0
        ),
        key=lambda report: report.worker_id,
    )
    return Overflow(tuple(short), tuple(roomy)) if short and roomy else None


def plan_moves(
    overflow: Overflow, queues: Mapping[WorkerId, Sequence[QueuedPart]], batch_per_worker: int
) -> tuple[Requeue, ...]:
    """Return which waiting requests go where.

    Args:
        overflow: of the view.
        queues: of those that are short, as far as they have answered, first in line first.
        batch_per_worker: requests that a worker runs well at a time; a group of s runs s times as many.
    """
    moves: list[Requeue] = []
    for model in sorted({report.model for report in overflow.short}):
        short = [r for r in overflow.short if r.model == model and r.worker_id in queues]
        roomy = [r for r in overflow.roomy if r.model == model]
        queued = [(report, queues[report.worker_id]) for report in short] + [(report, ()) for report in roomy]
        moves += rebalance([_load(report, queue, batch_per_worker) for report, queue in queued])
    return tuple(moves)


def _load(report: WorkerReport, queue: Sequence[QueuedPart], batch_per_worker: int) -> GroupLoad:
    moves_flex = not report.best_effort.gives_way
    requests = tuple(
        QueuedRequest(part.request_id, part.tier, part.age_s, part.num_blocks * report.block_size)
        for part in queue
        if moves_flex or not part.tier.is_best_effort
    )
    free = max(_free_blocks(report), 0) * report.block_size
    max_batch = max(report.num_stages, 1) * batch_per_worker
    num_running = report.num_running - giving_way(report).num_running
    return GroupLoad(str(report.worker_id), max_batch, num_running, free, requests)


def _free_blocks(report: WorkerReport) -> int:
    """Return the blocks for requests that come: beside one more for each that runs, and what waiting ones need."""
    flex = giving_way(report)
    free = report.num_blocks - report.num_used_blocks - report.num_running - report.num_demanded_blocks
    return free + flex.num_used_blocks + flex.num_running + flex.num_demanded_blocks
