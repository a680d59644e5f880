"""Reports of workers, and views of a cluster, with keyword defaults."""

from __future__ import annotations

from typing import Any

from shared.ids import WorkerId
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport, WorkerStatus


def make_report(worker_id: str = "w", **fields: Any) -> WorkerReport:
    """A worker that is ready."""
    common = {"worker_id": WorkerId(worker_id), "sequence_number": 0, "phase": WorkerPhase.READY}
    return WorkerReport.model_validate(common | fields)


def make_status(
    worker_id: str = "w", *, liveness: Liveness = Liveness.ALIVE, throttled: bool = False, **fields: Any
) -> WorkerStatus:
    """A worker of a view; `fields` are those of its report."""
    return WorkerStatus(liveness=liveness, age_s=0.1, throttled=throttled, report=make_report(worker_id, **fields))


def make_view(*statuses: WorkerStatus) -> ClusterView:
    """The view that shows these."""
    return ClusterView(sequence_number=1, workers=statuses)
