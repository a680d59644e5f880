"""The planner's shell: watches the cluster view, asks the ladder by period, writes plans under its epoch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from services.planner.book import PLAN_KEY, PlanBook, SupersededError
from services.planner.config import PlannerSettings
from services.planner.policy.ladder import NO_LEVER, ClusterSnapshot, Decision, Lever, WorkerLoad, decide
from shared.bus import Bus, BusError, Endpoint, KvEntry, Message, ServiceInfo, Subscription
from shared.cluster_views import ViewFeed
from shared.host import process_facts
from shared.log import get_logger
from shared.messages.event import Event
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerStatus
from shared.subjects import Subjects
from shared.tasks import TaskOwner
from shared.version import VERSION
from shared.wire import WireError, encode_json

_log = get_logger()


class Planner:
    """The only writer of plans, until another planner takes a newer epoch. Runs live and on the virtual clock alike."""

    def __init__(
        self,
        settings: PlannerSettings,
        bus: Bus,
        levers: Sequence[Lever] = (),
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._levers = tuple(levers)
        self._subjects = Subjects(settings.cluster)
        self._tasks = TaskOwner(on_failure)
        self._open: list[Subscription] = []
        self._views = ViewFeed(bus, self._subjects, self._on_view, self._on_malformed)
        self._book: PlanBook | None = None
        self._view: ClusterView | None = None
        self._view_at_s: float | None = None
        self._seen_revision = 0
        self._certain = True
        self.decision: Decision | None = None
        """The last decision."""
        self.superseded = False
        """Whether another planner has taken over; then this one decides nothing more."""

    @property
    def epoch(self) -> int:
        """The newest epoch that this planner holds or held; 0 before `start`."""
        plan = self._book.plan if self._book is not None else None
        return plan.epoch if plan is not None else 0

    async def start(self) -> None:
        """Take the next epoch, and decide by period from now on.

        Raises:
            StartupError: the plan key cannot be claimed.
            BusError: the broker does not answer.
        """
        plans = await self._bus.key_value(self._subjects.plan_bucket())
        self._book = PlanBook(plans)
        plan = await self._book.claim("the planner started")
        await self._announce("planner_started", f"holds epoch {plan.epoch}; {len(self._levers)} levers in its ladder")
        self._open.append(await plans.watch(PLAN_KEY, self._on_plan))
        await self._views.start()
        self._open.append(await self._bus.serve(self._info(), [self._endpoint()]))
        self._tasks.start(self._run(self._book), name="planner")

    async def stop(self) -> None:
        """Decide nothing more. The last plan stays: it is the cluster's."""
        for subscription in reversed(self._open):
            await subscription.close()
        self._open.clear()
        await self._views.close()
        await self._tasks.close()

    def _on_plan(self, entry: KvEntry) -> None:
        self._seen_revision = max(self._seen_revision, entry.revision)

    def _on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
        self._view = view
        if is_fresh:
            self._view_at_s = asyncio.get_running_loop().time()

    def _on_malformed(self, where: str, error: WireError) -> None:
        _log.warning("view_refused", subject=where, reason=str(error))

    async def _run(self, book: PlanBook) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while not self.superseded:
            await self._tick(book)
            next_s = max(next_s + self._settings.tick_period_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    async def _tick(self, book: PlanBook) -> None:
        try:
            await self._hold_epoch(book)
            decision = decide(self._settings.ladder(), self._levers, self._snapshot())
            if decision.differs_from(self.decision):
                await self._adopt(book, decision)
        except SupersededError as error:
            self.superseded = True
            await self._announce("planner_superseded", f"{error}; this one decides nothing more")
        except BusError as error:
            # what was written is unknown now; a new claim settles it
            self._certain = False
            _log.warning("tick_failed", error=str(error))

    async def _hold_epoch(self, book: PlanBook) -> None:
        if not self._certain:
            await book.claim("the planner lost touch with the broker")
            self._certain = True
        elif self._seen_revision > book.revision:
            raise SupersededError(self.epoch)

    async def _adopt(self, book: PlanBook, decision: Decision) -> None:
        """Write a plan if the lever changed; tell operators either way."""
        assert book.plan is not None, "claimed"
        if decision.lever != book.plan.lever:
            await book.write(decision.lever, decision.reason)
        self.decision = decision
        await self._announce(f"plan_{decision.lever}", f"{decision.situation}: {decision.reason}")

    def _snapshot(self) -> ClusterSnapshot:
        if self._view is None or self._view_at_s is None:
            return ClusterSnapshot(view_age_s=None)
        usable = [status for status in self._view.workers if _can_work(status)]
        return ClusterSnapshot(
            view_age_s=asyncio.get_running_loop().time() - self._view_at_s,
            workers=tuple(
                WorkerLoad(
                    status.report.worker_id,
                    num_blocks=status.report.num_blocks,
                    num_used_blocks=status.report.num_used_blocks,
                    num_demanded_blocks=status.report.num_demanded_blocks,
                )
                for status in usable
            ),
            num_unavailable=len(self._view.workers) - len(usable),
        )

    async def _announce(self, name: str, reason: str) -> None:
        instance_id = self._settings.instance_id
        _log.info(name, epoch=self.epoch, reason=reason)
        event = Event(name=name, service="planner", instance_id=instance_id, reason=f"epoch {self.epoch}: {reason}")
        try:
            await self._bus.publish(self._subjects.event("planner", instance_id), encode_json(event))
        except BusError as error:
            _log.warning("event_not_sent", event_name=name, error=str(error))

    def _info(self) -> ServiceInfo:
        return ServiceInfo(
            name="sluice-planner",
            version=VERSION,
            description="Decides which lever the cluster pulls against memory pressure, and writes plans",
            metadata={
                "cluster": self._settings.cluster,
                **process_facts(),
                "bucket": self._subjects.plan_bucket(),
            },
            instance_id=self._settings.instance_id,
        )

    def _endpoint(self) -> Endpoint:
        async def plan(message: Message) -> bytes:
            del message
            decision = self.decision
            answer = {
                "epoch": self.epoch,
                "superseded": self.superseded,
                "levers": [lever.name for lever in self._levers],
                "lever": decision.lever if decision is not None else NO_LEVER,
                "situation": decision.situation if decision is not None else None,
                "reason": decision.reason if decision is not None else "no decision yet",
            }
            return json.dumps(answer).encode()

        subject = self._subjects.admin("planner", self._settings.instance_id, "plan")
        return Endpoint("plan", subject, plan, metadata={"format": "json"})


def _can_work(status: WorkerStatus) -> bool:
    return status.liveness is Liveness.ALIVE and status.report.phase is WorkerPhase.READY


def build_planner(
    settings: PlannerSettings,
    bus: Bus,
    *,
    levers: Sequence[Lever] = (),
    on_failure: Callable[[str, BaseException], None] | None = None,
) -> Planner:
    """Return a planner that is ready to `start`.

    Args:
        settings: checked.
        bus: connected; the caller closes it after `stop`.
        levers: the ladder, in its order; this release has none.
        on_failure: called with a task's name and error when the planner's own loop dies.
    """
    return Planner(settings, bus, levers, on_failure)
