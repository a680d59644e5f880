"""What the monitor knows of the workers. One writer: the monitor's own loop; others get the view.

A worker's reports are numbered per process. A late report of the same process is ignored, and so is one of a process
that was replaced. When nothing was heard for `dead_after_s`, whatever comes next begins a new process: so a worker that
restarts with the same host and pid, as containers do, is recognised after that time at the latest. Of a worker that
speaks another version of the protocol only the name and that version are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from services.monitor.policy.liveness import LivenessParams, judge, next_change_age_s
from shared.ids import DispatcherId, WorkerId
from shared.messages.base import PROTOCOL_VERSION
from shared.messages.report import (
    MAX_WAITING_ROWS,
    ClusterView,
    DispatcherReport,
    Liveness,
    WaitingRequests,
    WorkerPhase,
    WorkerReport,
    WorkerStatus,
)
from shared.transport.bus_rules import is_power_of_two

MAX_FORMER_PROCESSES = 8
"""Replaced processes of one worker id whose late reports are still recognised."""
MAX_DISPATCHERS = 1024
"""In which something waits."""
MAX_LEFT_OUT = 4096
"""Workers without room that are counted; there may be more."""

_Process = tuple[str, int, int]


class ReportVerdict(StrEnum):
    """What became of a report."""

    ACCEPTED = "accepted"
    STALE = "stale"  # late, or of a process that was replaced
    FULL = "full"  # a new worker, and no room for one more


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Something about a worker that operators and other services want to know at once."""

    name: str
    """`worker_loading`, `_ready`, `_draining`, `_restarted`, `_suspect`, `_dead`, `_recovered`, `_gone`,
    `_incompatible`, `_left_out`, `_held` or `_goes_on`."""
    worker_id: WorkerId
    reason: str


def process_of(report: WorkerReport) -> _Process:
    """Return what tells the process apart from others of the same worker id; in containers pid and host do not."""
    return report.host, report.pid, report.incarnation


@dataclass(slots=True)
class _Record:
    report: WorkerReport
    heard_at_s: float
    judged_from_s: float  # as heard_at_s, but later when the monitor itself could not hear
    liveness: Liveness = Liveness.ALIVE
    incompatible: str = ""  # the protocol version, if it is another than ours
    former: deque[_Process] = field(default_factory=lambda: deque(maxlen=MAX_FORMER_PROCESSES))

    @property
    def process(self) -> _Process:
        return process_of(self.report)

    @property
    def stopped(self) -> bool:
        # kept for a while, so that a late report does not bring the worker back
        return self.report.phase is WorkerPhase.STOPPED


class MonitoredCluster:
    """The newest report of each worker, and its judgement."""

    def __init__(self, params: LivenessParams, max_workers: int) -> None:
        self._params = params
        self._max_workers = max_workers
        self._records: dict[WorkerId, _Record] = {}
        self._left_out: dict[WorkerId, float] = {}
        """Workers for which there is no room, and when they were heard last."""
        self._changes: list[WorkerChange] = []
        self._dispatchers: dict[DispatcherId, tuple[DispatcherReport, float]] = {}
        """In which something waits, and when they said so."""

    def __len__(self) -> int:
        return len(self._records)

    def absorb(self, report: WorkerReport, now_s: float) -> ReportVerdict:
        """Take a report that passed the checks, unless it is late or there is no room."""
        record = self._records.get(report.worker_id)
        if record is None:
            if len(self._records) >= self._max_workers:
                return self._leave_out(report, now_s)
            self._records[report.worker_id] = _Record(report, now_s, now_s)
            self._note_phase(report)
            return ReportVerdict.ACCEPTED
        if self._is_stale(record, report, now_s):
            return ReportVerdict.STALE
        self._replace(record, report, now_s)
        return ReportVerdict.ACCEPTED

    def absorb_incompatible(self, worker_id: WorkerId, version: str, now_s: float) -> ReportVerdict:
        """Take note of a worker whose reports are of another protocol version, unless there is no room.

        Whatever it ran under our version is lost, so it takes the place of what was known of it.
        """
        record = self._records.get(worker_id)
        # "stopped" and dead, so that every reader of the view leaves it alone, also one that knows no `incompatible`
        unknown = WorkerReport(worker_id=worker_id, sequence_number=0, phase=WorkerPhase.STOPPED)
        if record is None and len(self._records) >= self._max_workers:
            return self._leave_out(unknown, now_s)
        former = record.former if record is not None else deque[_Process](maxlen=MAX_FORMER_PROCESSES)
        if record is None or record.incompatible != version:
            reason = f"it speaks protocol {version}, this cluster {PROTOCOL_VERSION}; nothing is placed on it"
            self._note("worker_incompatible", unknown, reason)
        self._records[worker_id] = _Record(unknown, now_s, now_s, incompatible=version, former=former)
        return ReportVerdict.ACCEPTED

    def absorb_waiting(self, report: DispatcherReport, now_s: float) -> ReportVerdict:
        """Take what a dispatcher says of its queue, unless there is no room for one more."""
        if not report.waiting:
            self._dispatchers.pop(report.dispatcher_id, None)
        elif report.dispatcher_id in self._dispatchers or len(self._dispatchers) < MAX_DISPATCHERS:
            self._dispatchers[report.dispatcher_id] = report, now_s
        else:
            return ReportVerdict.FULL
        return ReportVerdict.ACCEPTED

    def judge(self, now_s: float) -> None:
        """Judge every worker by the age of its last report; note what changed."""
        heard_s = now_s - self._params.dead_after_s
        self._dispatchers = {name: said for name, said in self._dispatchers.items() if said[1] > heard_s}
        self._left_out = {name: at_s for name, at_s in self._left_out.items() if at_s > heard_s}
        for worker_id, record in list(self._records.items()):
            liveness = judge(self._params, now_s - record.judged_from_s)
            if liveness is record.liveness:
                continue
            if liveness is None:
                del self._records[worker_id]
            else:
                record.liveness = liveness
            if not record.stopped:
                self._note_silence(record, liveness, now_s)

    def excuse(self, now_s: float) -> None:
        """Count no silence up to now: it was the monitor that could not hear. No judgement gets better by this."""
        started_at_age_s = {
            Liveness.ALIVE: 0.0,
            Liveness.SUSPECT: self._params.suspect_after_s,
            Liveness.DEAD: self._params.dead_after_s,
        }
        for record in self._records.values():
            record.judged_from_s = max(record.judged_from_s, now_s - started_at_age_s[record.liveness])

    def next_judgement_s(self, now_s: float) -> float | None:
        """Return the time at which the next judgement changes if no report comes, or None."""
        times = []
        for record in self._records.values():
            age_s = next_change_age_s(self._params, now_s - record.judged_from_s)
            if age_s is not None:
                times.append(record.judged_from_s + age_s)
        return min(times, default=None)

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return any."""
        return bool(self._changes)

    def take_changes(self) -> tuple[WorkerChange, ...]:
        """Return what changed since the last call, in order."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def make_view(self, now_s: float, number: int, strain: Callable[[WorkerId], str] = lambda _: "") -> ClusterView:
        """Return the state of this moment as the view of this number.

        Args:
            now_s: this moment.
            number: of the view.
            strain: returns why a worker is throttled, in words; empty if it is not.
        """
        workers = tuple(
            WorkerStatus(
                liveness=Liveness.DEAD if record.incompatible else record.liveness,
                age_s=max(0.0, now_s - record.heard_at_s),
                incompatible=record.incompatible,
                throttled=bool(strain(worker_id)),
                throttled_reason=strain(worker_id),
                report=record.report,
            )
            for worker_id, record in sorted(self._records.items())
            if not record.stopped or now_s - record.heard_at_s < self._params.dead_after_s  # long enough to be seen
        )
        return ClusterView(
            sequence_number=number, waiting=self._waiting(), num_left_out=len(self._left_out), workers=workers
        )

    def _waiting(self) -> tuple[WaitingRequests, ...]:
        """Return what waits in all dispatchers, by model and tier."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for report, _ in self._dispatchers.values():
            for each in report.waiting:
                requests, tokens = sums.get((each.model, each.tier), (0, 0))
                sums[each.model, each.tier] = requests + each.num_requests, tokens + each.num_tokens
        return tuple(
            WaitingRequests(model=model, tier=tier, num_requests=requests, num_tokens=tokens)
            for (model, tier), (requests, tokens) in sorted(sums.items())[:MAX_WAITING_ROWS]
        )

    def _leave_out(self, report: WorkerReport, now_s: float) -> ReportVerdict:
        """Count a worker for which there is no room; say so of the 1st, 2nd, 4th, 8th … of them."""
        if report.worker_id in self._left_out or len(self._left_out) < MAX_LEFT_OUT:
            is_new = report.worker_id not in self._left_out
            self._left_out[report.worker_id] = now_s
            count = len(self._left_out)
            if is_new and is_power_of_two(count):
                reason = f"the monitor has room for {self._max_workers} workers (max_workers); {count} more report"
                self._note("worker_left_out", report, f"{reason}, nothing is placed on them")
        return ReportVerdict.FULL

    def _is_stale(self, record: _Record, report: WorkerReport, now_s: float) -> bool:
        if now_s - record.heard_at_s >= self._params.dead_after_s:
            return False
        process = process_of(report)
        if process == record.process:
            return report.sequence_number <= record.report.sequence_number
        return process in record.former

    def _replace(self, record: _Record, report: WorkerReport, now_s: float) -> None:
        before, silent_s = record.report, now_s - record.heard_at_s
        same_process = process_of(report) == record.process and report.sequence_number > before.sequence_number
        was, record.liveness = record.liveness, Liveness.ALIVE
        if not same_process:
            record.former.append(record.process)
        record.report, record.heard_at_s, record.judged_from_s = report, now_s, now_s
        record.incompatible = ""
        if same_process and before.phase is report.phase:
            if was is not Liveness.ALIVE and not record.stopped:
                self._note("worker_recovered", report, f"a report came after {silent_s:.1f} s of silence")
            self._note_hold(before, report)
            return
        if not same_process and before.phase is not WorkerPhase.STOPPED:
            self._note("worker_restarted", report, f"pid {report.pid} reports in place of pid {before.pid}")
        self._note_phase(report)

    def _note_hold(self, before: WorkerReport, report: WorkerReport) -> None:
        """Note when steps are held up, or no longer: whoever places requests has to know at once."""
        if report.held and not before.held:
            self._note("worker_held", report, f"makes no steps: {report.held}")
        elif before.held and not report.held:
            self._note("worker_goes_on", report, f"makes steps again: {before.held} is over")

    def _note(self, name: str, report: WorkerReport, reason: str) -> None:
        self._changes.append(WorkerChange(name, report.worker_id, reason))

    def _note_phase(self, report: WorkerReport) -> None:
        match report.phase:
            case WorkerPhase.LOADING:
                self._note("worker_loading", report, f"pid {report.pid} on {report.host or 'its host'} loads its model")
            case WorkerPhase.READY:
                blocks = (
                    f"{report.num_blocks} KV blocks of {report.block_size} tokens on {report.device or 'its device'}"
                )
                self._note("worker_ready", report, f"serves {report.model or 'its model'} with {blocks}")
            case WorkerPhase.DRAINING:
                left = f"{report.num_running} running and {report.num_waiting} waiting"
                self._note("worker_draining", report, f"was told to stop; takes nothing new, {left} sequences left")
            case WorkerPhase.STOPPED:
                self._note("worker_gone", report, "it stopped in order")

    def _note_silence(self, record: _Record, liveness: Liveness | None, now_s: float) -> None:
        silent_s = now_s - record.heard_at_s
        if liveness is None:
            self._note("worker_gone", record.report, f"no report for {silent_s:.1f} s; forgotten")
        elif liveness is not Liveness.ALIVE:
            limit_s = self._params.dead_after_s if liveness is Liveness.DEAD else self._params.suspect_after_s
            reason = f"no report for {silent_s:.1f} s, the limit is {limit_s:g} s"
            self._note(f"worker_{liveness.value}", record.report, reason)
