"""What a planner counts: its events by name, how long plans take, groups and the time in them, instances wanted."""

from __future__ import annotations

from typing import Final

from services.planner.policy.plans.intent import PlanOutcome
from services.planner.policy.scale_signal import ScaleWish
from shared.messages.report import ClusterView, Liveness
from shared.process.metrics import Metrics

_PLAN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
MAX_GAP_S: Final = 5.0
"""Longest time between two views that counts as time in groups: nobody knows what was between others."""


class PlannerMetrics:
    """Every metric of one planner."""

    def __init__(self) -> None:
        self._metrics = metrics = Metrics()
        self._events = metrics.counter("sluice:planner_events", "Events of the planner by name", ("name",))
        self._seconds = metrics.histogram(
            "sluice:plan_seconds",
            "From the publication of a plan to the last worker's answer, seconds",
            ("lever", "outcome"),
            buckets=_PLAN_S,
        )
        self._groups = metrics.gauge("sluice:groups", "Pipeline groups that stand")
        self._grouped = metrics.gauge("sluice:grouped_workers", "Workers that are stages of a group")
        self._group_s = metrics.counter("sluice:group_worker_seconds", "Seconds of workers as stages of a group")
        self._throttled = metrics.gauge("sluice:throttled_workers", "Workers that run short of KV memory")
        self._wanted = metrics.gauge("sluice:instances_wanted", "Instances that there should be: these, or more")
        self._instances = metrics.gauge("sluice:instances", "Instances that there are")
        self._epoch = metrics.gauge("sluice:planner_epoch", "Newest epoch of this planner")
        self._superseded = metrics.gauge("sluice:planner_superseded", "1: another planner has taken over")
        self._num_instances = 0
        self._seen: tuple[float, int] | None = None
        """When the last view came, and how many workers were in groups then."""

    def count(self, name: str) -> None:
        """Count an event."""
        self._events.inc(name=name)

    def note(self, outcome: PlanOutcome) -> None:
        """Count a plan that has ended."""
        if outcome.plan_id:
            said = "done" if outcome.is_done else "failed" if outcome.done else "aborted"
            self._seconds.observe(outcome.latency_s, lever=outcome.lever, outcome=said)

    def see(self, view: ClusterView, now_s: float) -> None:
        """Look at a view that has just come; time is that of one monotonic clock."""
        alive = [status for status in view.workers if status.liveness is not Liveness.DEAD and not status.incompatible]
        reports = [status.report for status in alive]
        num_grouped = sum(bool(report.group) for report in reports)
        if self._seen is not None:
            since_s, before = self._seen
            self._group_s.inc(before * min(max(now_s - since_s, 0.0), MAX_GAP_S))
        self._seen = now_s, num_grouped
        self._grouped.set(num_grouped)
        self._groups.set(len({report.group for report in reports if report.group}))
        self._throttled.set(sum(status.throttled for status in alive))
        self._num_instances = len(alive)
        self._instances.set(self._num_instances)

    def render(self, epoch: int, wish: ScaleWish | None, *, is_superseded: bool) -> tuple[bytes, str]:
        """Return what `/metrics` answers, and its content type."""
        self._epoch.set(epoch)
        self._superseded.set(is_superseded)
        self._wanted.set(self._num_instances if wish is None else max(wish.num_instances, self._num_instances))
        return self._metrics.render()
