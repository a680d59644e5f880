"""The monitor's shell: hears reports, keeps the state, tells and stores the view, tells operators what changed.

report ──► state ──► judged by age ──────────┐
      └──► throttling, per epoch of the plan ┴──► view: by period, and at once when somebody waits for it; events
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from functools import partial

from services.monitor.config import MonitorSettings
from services.monitor.policy.liveness import ROUNDING_S
from services.monitor.policy.overflows import OverflowCounter
from services.monitor.policy.sanity import find_absurd_waiting, find_absurdity
from services.monitor.policy.throttling import ThrottlingDetector, ThrottlingRule
from services.monitor.state import MonitoredCluster, ReportVerdict
from shared.cluster_views import ViewWriter
from shared.host import process_facts
from shared.ids import WorkerId
from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, Plan, PlanPhase
from shared.messages.report import DispatcherReport, WorkerReport
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects, check_token, is_token
from shared.transport.buckets import open_bucket
from shared.transport.bus import Bus, BusError, Endpoint, KeyValue, KvEntry, Message, ServiceInfo, Subscription
from shared.transport.bus_rules import is_power_of_two
from shared.version import VERSION
from shared.view_parts import encode_whole_parts
from shared.wire import WireError, WireVersionError, decode_json, encode_json, read_index

_log = get_logger()
MIN_VIEW_GAP_S = 0.02
"""Between two views that are written because workers begin to run short: a crowd of them makes no flood."""
VIEW_WORKER_S = 200e-6
"""For each worker known, between any two views: 1 s for 5 000, of which a reader works for a sixth."""
MAX_VIEW_GAP_S = 1.0
"""However many there are: who acts on a view thinks nothing of one that is 1.5 s old."""


def view_gap_s(num_workers: int) -> float:
    """Return how long at least passes between two views of so many workers."""
    return min(VIEW_WORKER_S * num_workers, MAX_VIEW_GAP_S)


class Monitor:
    """The only writer of the cluster view. Runs live and on the virtual clock alike.

    Args:
        settings: checked.
        bus: connected; the caller closes it after `stop`.
        on_failure: called with a task's name and error when the monitor's own loop dies.
    """

    def __init__(
        self, settings: MonitorSettings, bus: Bus, on_failure: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._subjects = Subjects(settings.cluster)
        self._state = MonitoredCluster(settings.liveness(), settings.max_workers)
        self._detector = ThrottlingDetector(settings.throttling_horizon_s)
        self._overflows = OverflowCounter()
        self._throttled: list[tuple[WorkerId, str]] = []
        self._epoch = 0
        self._tasks = TaskOwner(on_failure)
        self._wake = asyncio.Event()
        self._open: list[Subscription] = []
        self._view: KeyValue | None = None
        self._writer: ViewWriter | None = None
        self._next_view_s = 0.0
        self._last_view_s = float("-inf")
        self._last_turn_s = 0.0
        self._judgement_s = float("-inf")
        """Until then no judgement changes."""
        self._num_views = 0
        self.counters: Counter[str] = Counter()
        """Reports by what became of them, views written and not written, overflows, since the start."""

    async def start(self) -> None:
        """Hear reports and write views from now on."""
        self._view = await open_bucket(self._bus, self._subjects.view_bucket())
        self._writer = ViewWriter(self._bus, self._subjects, self._view)
        self._last_turn_s = self._now()
        # a new monitor has heard nobody yet: it lets every worker report before it replaces the view that is there
        self._next_view_s = self._last_turn_s + self._settings.suspect_after_s
        plans = await open_bucket(self._bus, self._subjects.plan_bucket())
        self._open.append(await plans.watch(PLAN_KEY, self._on_plan))
        self._open.append(await self._bus.subscribe(self._subjects.all_reports(), partial(self._hear, self._take)))
        self._open.append(
            await self._bus.subscribe(self._subjects.all_waiting(), partial(self._hear, self._take_waiting))
        )
        self._open.append(await self._bus.serve(self._info(), self._endpoints()))
        self._tasks.start(self._run(), name="monitor")

    async def stop(self) -> None:
        """Hear nothing more, and end the loop. The last view stays; its readers see that it ages."""
        for subscription in reversed(self._open):
            await subscription.close()
        self._open.clear()
        await self._tasks.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _on_plan(self, entry: KvEntry) -> None:
        """Follow the epoch: under a new plan a worker that runs short is told of again, once that is carried out."""
        if entry.value is None:
            return
        try:
            plan = decode_json(entry.value, Plan)
        except WireError as error:
            _log.warning("plan_not_read", reason=str(error))
            return
        if plan.phase is PlanPhase.DONE:
            self._epoch = plan.epoch

    def _hear(self, take: Callable[[Message], str], message: Message) -> None:
        self.counters[take(message)] += 1
        self._judgement_s = min(self._judgement_s, self._now() + self._settings.suspect_after_s)
        if self._state.has_changes:
            self._wake.set()

    def _take_waiting(self, message: Message) -> str:
        """Return under which name what a dispatcher says of its queue is counted."""
        try:
            report = decode_json(message.data, DispatcherReport)
        except WireError as error:
            return self._refuse(message.subject, str(error))
        if message.subject != self._subjects.waiting(report.dispatcher_id):
            return self._refuse(message.subject, "it speaks of another dispatcher than its subject")
        if (absurdity := find_absurd_waiting(report)) is not None:
            return self._refuse(message.subject, absurdity)
        if self._state.absorb_waiting(report, self._now()) is ReportVerdict.FULL:
            return self._refuse(message.subject, "too many dispatchers have requests that wait")
        return "reports_of_dispatchers"

    def _take(self, message: Message) -> str:
        """Return under which name the report is counted."""
        try:
            report = decode_json(message.data, WorkerReport)
        except WireVersionError as error:
            return self._take_incompatible(message.subject, error)
        except WireError as error:
            return self._refuse(message.subject, str(error))
        if message.subject != self._subjects.report(report.worker_id):
            return self._refuse(message.subject, "it speaks of another worker than its subject")
        if not is_token(report.worker_id):
            return self._refuse(message.subject, "its worker has a name that is none")
        absurdity = find_absurdity(report)
        if absurdity is not None:
            return self._refuse(message.subject, absurdity)
        verdict = self._state.absorb(report, self._now())
        if verdict is ReportVerdict.FULL:
            return self._refuse(message.subject, f"{self._settings.max_workers} workers are known already")
        if verdict is ReportVerdict.ACCEPTED:
            self._follow(report)
        return f"reports_{verdict.value}"

    def _follow(self, report: WorkerReport) -> None:
        """See whether the worker runs short; the planner is told at once if it begins to, or requests begin to wait."""
        if num_overflows := self._overflows.absorb(report, self._now()):
            self.counters["overflows"] += num_overflows
        before = self._detector.rule(report.worker_id)
        reason = self._detector.apply(report, self._now(), self._epoch)
        if reason is not None:
            self._throttled.append((report.worker_id, reason))
        rule = self._detector.rule(report.worker_id)
        is_worse = rule is not None and rule is not before and before is not ThrottlingRule.QUEUED
        if reason is not None or is_worse:
            self._view_soon(MIN_VIEW_GAP_S)
            self._wake.set()

    def _view_soon(self, min_gap_s: float = 0.0) -> None:
        gap_s = max(min_gap_s, view_gap_s(len(self._state)))
        self._next_view_s = min(self._next_view_s, max(self._now(), self._last_view_s + gap_s))

    def _take_incompatible(self, subject: str, error: WireVersionError) -> str:
        """Show the worker as one that cannot be used; the subject is all that is known of it."""
        try:
            worker_id = WorkerId(check_token(subject.split(".")[3]))
        except ValueError:
            return self._refuse(subject, str(error))
        if self._state.absorb_incompatible(worker_id, error.version, self._now()) is ReportVerdict.FULL:
            return self._refuse(subject, f"{self._settings.max_workers} workers are known already")
        self._detector.forget(worker_id)
        return "reports_incompatible"

    def _refuse(self, subject: str, reason: str) -> str:
        num_refused = self.counters["reports_refused"] + 1
        if is_power_of_two(num_refused):  # the 1st, 2nd, 4th, 8th …: a broken worker does not fill the log
            _log.warning("report_refused", subject=subject, reason=reason, num_refused=num_refused)
        return "reports_refused"

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._tick()
            try:
                async with asyncio.timeout_at(min(self._judgement_s, self._next_view_s)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _judge(self, now_s: float) -> None:
        """Judge all workers if one of them may be judged otherwise than before; there may be thousands."""
        if now_s >= self._judgement_s - ROUNDING_S:
            self._state.judge(now_s)
            next_s = self._state.next_judgement_s(now_s)
            self._judgement_s = float("inf") if next_s is None else next_s

    async def _tick(self) -> None:
        """Judge; write the view when something changed or its period is over."""
        now_s = self._now()
        if self._was_deaf(now_s):
            self._state.excuse(now_s)
        self._last_turn_s = now_s
        self._judge(now_s)
        changes = self._state.take_changes()
        if changes:
            self._view_soon()
        if now_s >= self._next_view_s:
            self._next_view_s = now_s + max(self._settings.view_period_s, view_gap_s(len(self._state)))
            await self._write_view(now_s)
        throttled, self._throttled = self._throttled, []
        for change in changes:
            if change.name == "worker_gone":
                self._detector.forget(change.worker_id)
                self._overflows.forget(change.worker_id)
            await self._announce(change.name, change.worker_id, change.reason)
        for worker_id, reason in throttled:
            await self._announce("worker_throttled", worker_id, reason)

    def _was_deaf(self, now_s: float) -> bool:
        """Return whether silence is the monitor's own: no broker, or this process stood still."""
        longest_turn_s = self._settings.view_period_s + self._settings.suspect_after_s
        return not self._bus.connected or now_s - self._last_turn_s > longest_turn_s

    async def _write_view(self, now_s: float) -> None:
        assert self._writer is not None, "started"
        if not self._bus.connected:
            self.counters["views_not_written"] += 1
            return
        self._num_views += 1
        self._last_view_s = now_s
        try:
            await self._writer.publish(self._state.make_view(now_s, self._num_views, self._detector.strain))
            # nobody is judged meanwhile; the next one tells all
            async with asyncio.timeout(self._settings.dead_after_s / 3):
                await self._writer.store()
        except (BusError, WireError, TimeoutError) as error:
            self.counters["views_not_written"] += 1
            if is_power_of_two(self.counters["views_not_written"]):
                reason = str(error) or "the broker did not answer in time"
                await self._announce("view_not_written", "", f"{reason}; readers keep an older view")
        else:
            self.counters["views_written"] += 1

    async def _announce(self, name: str, about: str, reason: str) -> None:
        instance_id = self._settings.instance_id
        _log.info(name, worker=about, reason=reason)
        event = Event(name=name, service="monitor", instance_id=instance_id, about=about, reason=reason)
        try:
            await self._bus.publish(self._subjects.event("monitor", instance_id), encode_json(event))
        except BusError as error:
            _log.warning("event_not_sent", event_name=name, error=str(error))

    def _info(self) -> ServiceInfo:
        return ServiceInfo(
            name="sluice-monitor",
            version=VERSION,
            description="Judges which workers are alive, and writes the view of the cluster",
            metadata={"cluster": self._settings.cluster, **process_facts(), "bucket": self._subjects.view_bucket()},
            instance_id=self._settings.instance_id,
        )

    def _endpoints(self) -> list[Endpoint]:
        def subject(verb: str) -> str:
            return self._subjects.admin("monitor", self._settings.instance_id, verb)

        async def view(message: Message) -> bytes:
            parts = encode_whole_parts(self._state.make_view(self._now(), self._num_views, self._detector.strain))
            part = read_index(message.data)
            if part >= len(parts):
                raise WireError(f"the view has {len(parts)} parts, numbered from 0")
            return parts[part]

        async def counters(message: Message) -> bytes:
            del message
            return json.dumps(self.counters, sort_keys=True).encode()

        return [
            Endpoint("view", subject("view"), view, metadata={"format": "json"}),
            Endpoint("counters", subject("counters"), counters, metadata={"format": "json"}),
        ]
