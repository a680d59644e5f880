"""When workers run short of KV memory: now, or within the next second.

Either of two rules, by worker, in blocks:

    rate      demand + r_demand · h > capacity + r_capacity · h      h = 1 s: earlier drops bring little, and err more
    queued    a request has been queued for lack of KV memory

Demand is what is in process and the head of the queue, not the whole queue; and no sequence whose reader has text for
longer than h, where the worker's policy lets such ones wait, nor whom best effort has slowed: their memory counts in
the rates alone, so that it is no rise when they are counted again. The rates are averages over past reports, in which a
change counts less the longer ago it was.

    demand ──────╱ capacity + r · h
            ╱╱╱╱   │ raised │ (silent) │ new epoch: raised again │ (silent) │ calm: may be raised again

Of a worker there is one event per plan epoch: the planner heard it, and its plan takes time. When its demand has fallen
below `RELEASE_RATIO` of its capacity, the next event may come in the same epoch. A false event costs a line in the log.

Pure reducer: reports in, events out; time is an argument. Source: KunServe v1, section 4.3 ("Online monitor and drop
trigger") and 2.2 (demand); v2, section 4.1 and 2.2. Deviations: hysteresis, and averages of the rates, of which the
paper says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.ids import Incarnation, WorkerId
from shared.messages.report import WorkerPhase, WorkerReport

MIN_SHORTAGE_BLOCKS = 0.5
"""Less is none: an average of rates fades but never ends, and a worker may be full for long."""
ROUNDING_S = 1e-6
"""A gap that is this little shorter than the limit has reached it: clocks round."""


HALF_LIFE_S = 1.0
"""Age at which a change counts half in the rates; higher is steadier, and sees a burst later."""
RELEASE_RATIO = 0.9
"""Demand over capacity below which a worker is calm again; higher repeats events sooner."""
MIN_GAP_S = 0.1
"""Shortest time that makes a rate: what changes within it counts with the next report; higher is steadier."""


class ThrottlingRule(StrEnum):
    """Which rule holds."""

    RATE = "rate"
    QUEUED = "queued"


@dataclass(slots=True)
class _Watch:
    """What is remembered of a worker."""

    role: tuple[Incarnation, int, tuple[int, int]]
    sequence_number: int
    at_s: float
    followed: int
    capacity: int
    has_rates: bool = False
    demand_rate: float = 0.0
    capacity_rate: float = 0.0
    strain: str = ""  # by which rule it is throttled, in words
    rule: ThrottlingRule | None = None
    raised_epoch: int | None = None


class ThrottlingDetector:
    """Follows the demand of every worker.

    Args:
        horizon_s: h, how far ahead the rates are followed (v1, section 4.3); higher acts earlier, and errs more.
    """

    def __init__(self, horizon_s: float = 1.0) -> None:
        self._horizon_s = horizon_s
        self._watches: dict[WorkerId, _Watch] = {}

    def strain(self, worker_id: WorkerId) -> str:
        """Return why the worker is throttled, by its last report, in words; empty if it is not."""
        watch = self._watches.get(worker_id)
        return watch.strain if watch is not None else ""

    def rule(self, worker_id: WorkerId) -> ThrottlingRule | None:
        """Return by which rule the worker is throttled, by its last report; None if it is not."""
        watch = self._watches.get(worker_id)
        return watch.rule if watch is not None else None

    def forget(self, worker_id: WorkerId) -> None:
        """Remember nothing of a worker that is gone."""
        self._watches.pop(worker_id, None)

    def apply(self, report: WorkerReport, now_s: float, epoch: int) -> str | None:
        """Take a report; return why the worker runs short, in words, if it has not said so in this epoch.

        Args:
            report: one that the monitor accepts; a number that does not grow means another process.
            now_s: when it came.
            epoch: of the plan in force.
        """
        if report.phase is not WorkerPhase.READY or report.num_blocks == 0:
            self.forget(report.worker_id)
            return None
        watch = self._watches.get(report.worker_id)
        is_same = watch is not None and watch.role == _role(report)
        if watch is None or not is_same or report.sequence_number <= watch.sequence_number:
            watch = _Watch(_role(report), report.sequence_number, now_s, _followed(report), report.num_blocks)
            self._watches[report.worker_id] = watch
        else:
            self._follow(watch, report, now_s)
        return self._judge(watch, report, epoch)

    def _follow(self, watch: _Watch, report: WorkerReport, now_s: float) -> None:
        elapsed_s = now_s - watch.at_s
        watch.sequence_number = report.sequence_number
        if elapsed_s <= 0 or elapsed_s < MIN_GAP_S - ROUNDING_S:
            return  # two reports at once: what has changed between them counts with the next one
        followed, capacity = _followed(report), report.num_blocks
        weight = 1 - 0.5 ** (elapsed_s / HALF_LIFE_S) if watch.has_rates else 1.0
        watch.has_rates = True
        watch.demand_rate += weight * ((followed - watch.followed) / elapsed_s - watch.demand_rate)
        watch.capacity_rate += weight * ((capacity - watch.capacity) / elapsed_s - watch.capacity_rate)
        watch.at_s, watch.followed, watch.capacity = now_s, followed, capacity

    def _judge(self, watch: _Watch, report: WorkerReport, epoch: int) -> str | None:
        demand, capacity, horizon_s = _demand(report), report.num_blocks, self._horizon_s
        ahead = demand + watch.demand_rate * horizon_s
        room = capacity + watch.capacity_rate * horizon_s
        is_queued = report.num_queued_for_memory > 0
        watch.strain, watch.rule = "", None
        if not is_queued and ahead - room < MIN_SHORTAGE_BLOCKS:
            if demand <= RELEASE_RATIO * capacity:
                watch.raised_epoch = None
            return None
        what = f"{demand} of {capacity} KV blocks wanted"
        if is_queued:
            watch.strain = f"{what}, and {report.num_queued_for_memory} requests are queued for lack of them"
        else:
            watch.strain = f"{what}; in {horizon_s:g} s it would be {ahead:.0f} of {room:.0f}"
        watch.rule = ThrottlingRule.QUEUED if is_queued else ThrottlingRule.RATE
        if watch.raised_epoch == epoch:
            return None
        watch.raised_epoch = epoch
        return watch.strain


def _role(report: WorkerReport) -> tuple[Incarnation, int, tuple[int, int]]:
    """Return the process, and what it serves: memory that a plan gives or takes at once makes no rate."""
    return report.incarnation, report.plan_id, report.layers


def _demand(report: WorkerReport) -> int:
    """Return what is in process and the head of the queue, in blocks."""
    return max(report.num_used_blocks - report.num_slack_blocks, 0) + report.num_head_blocks


def _followed(report: WorkerReport) -> int:
    """Return whose growth makes the rate of demand, in blocks."""
    return _demand(report) + report.num_slowed_blocks
