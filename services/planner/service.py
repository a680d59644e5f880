"""The planner's shell: watches the cluster view, asks the policies, and has workers carry out what they decide.

view ──► tick, by period and at once when a worker runs short ──► decide ──► PlanExecution, one plan at a time
             ▲                                                                   │
             └── by hand: `drop`, `restore` ─────────────────────────────────────┘ no decision meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from services.planner.balancing import Balancer, tell_filling
from services.planner.book import PlanBook, SupersededError
from services.planner.config import PlannerSettings
from services.planner.endpoints import PlannerEndpoints, left_out
from services.planner.execution import PlanExecution
from services.planner.metrics import PlannerMetrics
from services.planner.orders import Orders
from services.planner.policy.decisions import Decider
from services.planner.policy.levers.ladder import Decision, Lever
from services.planner.policy.observe import find_loss
from services.planner.policy.packing.by_class import ByClass
from services.planner.policy.plans.intent import Intent, PlanOutcome
from services.planner.policy.scale_signal import ScaleWish
from services.planner.rebalancing import Rebalancer
from shared.cluster_views import ViewFeed
from shared.host import process_facts
from shared.ids import WorkerId
from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, PlannedWorker, PlanPhase, WantedInstances
from shared.messages.report import ClusterView
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.buckets import open_bucket, when_served
from shared.transport.bus import Bus, BusError, KvEntry, ServiceInfo, Subscription
from shared.version import VERSION
from shared.wire import WireError, encode_json

_log = get_logger()
ROUNDING_S = 1e-6
SETTLE_LOOK_S = 0.02
MAX_TOLD = 1024
"""Events that are told once and remembered; when there are more, all may be told again."""


class Planner:
    """The only writer of plans, until another planner takes a newer epoch. Runs live and on the virtual clock alike.

    Args:
        settings: checked.
        bus: connected; the caller closes it after `stop`.
        levers: the ladder, in its order; None: that of the settings' system.
        on_failure: called with a task's name and error when a task of the planner dies.

    Raises:
        StartupError: there is no such system.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        bus: Bus,
        levers: Sequence[Lever] | None = None,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._execution_params = settings.execution()
        self._settings = settings
        self._bus = bus
        self._levers = settings.levers() if levers is None else tuple(levers)
        self._subjects = Subjects(settings.cluster)
        self._decider = Decider(settings.deciding(), self._levers)
        self._metrics = PlannerMetrics()
        self._tasks = TaskOwner(on_failure)
        self._open: list[Subscription] = []
        self._views = ViewFeed(bus, self._subjects, self._on_view, self._on_malformed)
        self._book: PlanBook | None = None
        self._execution: PlanExecution | None = None
        self._rebalancer: Rebalancer | None = None
        self._carrying: asyncio.Task[PlanOutcome] | None = None
        self._wake = asyncio.Event()
        self._view: ClusterView | None = None
        self._view_at_s: float | None = None
        self._seen_revision = 0
        self._certain = True
        self._told: dict[tuple[str, str], None] = {}
        self.decision: Decision | None = None
        """The last decision."""
        self.wish: ScaleWish | None = None
        """How many instances there should be, as was told last; None: as many as there are."""
        self.superseded = False
        """Whether another planner has taken over; then this one decides nothing more."""

    @property
    def epoch(self) -> int:
        """The newest epoch that this planner holds or held; 0 before `start`."""
        return 0 if self._book is None else self._book.epoch

    @property
    def lever_names(self) -> list[str]:
        """The ladder, in its order."""
        return [lever.name for lever in self._levers]

    async def start(self) -> None:
        """Take the next epoch, and decide by period from now on; a plan that was begun is seen to its end first.

        Raises:
            StartupError: the plan key cannot be claimed.
            BusError: the broker does not answer.
        """
        plans = await open_bucket(self._bus, self._subjects.plan_bucket())
        book = self._book = PlanBook(plans)
        plan = await when_served(lambda: book.claim("the planner started"))
        if plan.wanted is not None:
            self.wish = ScaleWish(**plan.wanted.model_dump())
            self._decider.resume(self.wish)
        self._execution = PlanExecution(
            self._bus, self._subjects, book, self._execution_params, self._find_loss, self.announce
        )
        if self._levers and self._settings.batch_per_worker:
            self._rebalancer = Rebalancer(
                Orders(self._bus, self._subjects, book),
                batch_per_worker=self._settings.batch_per_worker,
                pause_s=self._settings.rebalance_pause_s,
                announce=self.announce,
            )
        rule = self._settings.move_rule()
        if rule is not None:
            balancer = Balancer(
                self._bus,
                self._subjects,
                rule,
                self._settings.balancer(),
                look=lambda: None if self.superseded else self.fresh_view,
                tasks=self._tasks,
                announce=self.announce,
            )
            self._tasks.start(balancer.run(), name="balancer")
        if isinstance(rule, ByClass):
            self._tasks.start(tell_filling(plans, rule, lambda: not self.superseded), name="filling")
        await self.announce("planner_started", f"holds epoch {plan.epoch}; {len(self._levers)} levers in its ladder")
        self._open.append(await plans.watch(PLAN_KEY, self._on_plan))
        await self._views.start()
        endpoints = PlannerEndpoints(self, self._decider, self._settings)
        self._open.append(await self._bus.serve(self._info(), endpoints.all()))
        self._tasks.start(self._run(book), name="planner")

    async def stop(self) -> None:
        """Decide nothing more. The last plan stays: it is the cluster's, and the next planner sees to it."""
        for subscription in reversed(self._open):
            await subscription.close()
        self._open.clear()
        await self._views.close()
        await self._tasks.close()

    @property
    def fresh_view(self) -> ClusterView | None:
        """The newest view, if it is young enough to act upon."""
        age_s = self._view_age_s()
        return self._view if age_s is not None and age_s <= self._settings.max_view_age_s else None

    @property
    def why_busy(self) -> str:
        """Why nothing can be begun now, in words; empty: something can."""
        if self.superseded:
            return "another planner has taken over; this one decides nothing more"
        plan = self._book.plan if self._book is not None else None
        if self._carrying is not None or not self._certain or plan is None or plan.phase is not PlanPhase.DONE:
            return "a plan is being carried out"
        return ""

    def render_metrics(self) -> tuple[bytes, str]:
        """Return this planner's metrics in Prometheus's text format, and the content type."""
        return self._metrics.render(self.epoch, self.wish, is_superseded=self.superseded)

    async def settle(self) -> None:
        """Return when reports show what the last plan has changed, or have had time enough."""
        loop = asyncio.get_running_loop()
        while not self._decider.is_settled(self._view, loop.time()):
            await asyncio.sleep(SETTLE_LOOK_S)

    async def carry_out(self, intent: Intent) -> PlanOutcome:
        """Have workers carry something out, whatever becomes of the caller; `why_busy` must be empty."""
        return await asyncio.shield(self._begin(intent))

    def _on_plan(self, entry: KvEntry) -> None:
        self._seen_revision = max(self._seen_revision, entry.revision)

    def _on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
        before = _short_of_memory(self._view)
        self._view = view
        if not is_fresh:
            return
        now_s = self._view_at_s = asyncio.get_running_loop().time()
        self._metrics.see(view, now_s)
        is_short = any(need not in before for need in _short_of_memory(view))
        if is_short or self._decider.shows_room(view, now_s):
            self._wake.set()

    def _on_malformed(self, where: str, error: WireError) -> None:
        _log.warning("view_refused", subject=where, reason=str(error))

    async def _run(self, book: PlanBook) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while not self.superseded:
            self._wake.clear()
            if self._carrying is None:  # what is carried out writes the key itself
                is_enough = await self._rebalance()
                if not is_enough:
                    await self._tick(book)
            if loop.time() >= next_s - ROUNDING_S:
                next_s = max(next_s + self._settings.tick_period_s, loop.time())
            try:
                async with asyncio.timeout_at(next_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _tick(self, book: PlanBook) -> None:
        try:
            await self._hold_epoch(book)
            assert book.plan is not None, "claimed"
            assert self._execution is not None, "started"
            if book.plan.phase is not PlanPhase.DONE:
                self._start(self._execution.take_up(book.plan))
            else:
                await self._decide(book)
        except SupersededError as error:
            await self._give_way(error)
        except BusError as error:
            # what was written is unknown now; a new claim settles it
            self._certain = False
            _log.warning("tick_failed", error=str(error))

    async def _rebalance(self) -> bool:
        """Bring waiting requests to where there is room; return whether that was room enough for all of them.

        Not while a plan is about to change who has how much.
        """
        view, rebalancer = self.fresh_view, self._rebalancer
        if rebalancer is None or view is None or self.why_busy:
            return False
        now_s = asyncio.get_running_loop().time()
        overflow = rebalancer.look(view, now_s) if self._decider.is_settled(view, now_s) else None
        try:
            return overflow is not None and await rebalancer.run(overflow) >= overflow.num_queued
        except SupersededError as error:
            await self._give_way(error)
            return True

    async def _hold_epoch(self, book: PlanBook) -> None:
        if not self._certain:
            await book.claim("the planner lost touch with the broker")
            self._certain = True
        elif self._seen_revision > book.revision:
            raise SupersededError(self.epoch)

    async def _decide(self, book: PlanBook) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._decider.is_settled(self._view, now_s):
            return
        verdict = self._decider.decide(self._view, self._view_age_s(), now_s)
        for worker_id, reason in verdict.left_out:
            await self._tell_once("worker_left_out", left_out(worker_id, reason))
        for refusal in verdict.refusals:
            await self.announce("plan_refused", refusal)
        await self._tell_wish(book, verdict.wish)
        if verdict.intent is not None:
            if self._carrying is None:  # a person may have been quicker while events were told
                self._begin(verdict.intent)
        elif verdict.decision.differs_from(self.decision):
            await self._adopt(book, verdict.decision)
        self.decision = verdict.decision

    async def _adopt(self, book: PlanBook, decision: Decision) -> None:
        """Write down which lever is pulled, if it has nothing for workers to do; tell people either way."""
        assert book.plan is not None, "claimed"
        if self._carrying is None and decision.lever != book.plan.lever and not book.plan.steps:
            await book.write(decision.lever, decision.reason)
        name = "plan_refused" if self._levers and decision.is_in_need else f"plan_{decision.lever}"
        await self.announce(name, f"{decision.situation}: {decision.reason}")

    async def _tell_wish(self, book: PlanBook, wish: ScaleWish | None) -> None:
        """Tell people when more instances are wanted than before, or none: each time anew, whatever was told once.

        It is written down first, so that a planner that takes over knows what people have heard.
        """
        before = self.wish
        if wish == before:
            return
        await book.want(None if wish is None else WantedInstances(**asdict(wish)))
        self.wish = wish
        if wish is not None and (before is None or wish.num_instances != before.num_instances):
            await self.announce("instances_wanted", wish.reason)
        elif wish is None and before is not None:
            reason = f"{before.num_instances} instances are no longer wanted: demand fits those that there were"
            await self.announce("instances_suffice", reason)

    def _begin(self, intent: Intent) -> asyncio.Task[PlanOutcome]:
        assert self._execution is not None, "started"
        return self._start(self._execution.carry_out(intent))

    def _start(self, work: Coroutine[Any, Any, PlanOutcome]) -> asyncio.Task[PlanOutcome]:
        assert self._carrying is None, "one plan at a time"
        self._carrying = self._tasks.start(self._carry(work), name="plan")
        return self._carrying

    async def _carry(self, work: Coroutine[Any, Any, PlanOutcome]) -> PlanOutcome:
        try:
            outcome = await work
        except SupersededError as error:
            await self._give_way(error)
            outcome = PlanOutcome(is_done=False, reason=str(error))
        except BusError as error:
            self._certain = False
            _log.warning("plan_broken_off", error=str(error))
            reason = f"the broker failed on the way, the plan is taken up again: {error}"
            outcome = PlanOutcome(is_done=False, reason=reason)
        finally:
            self._carrying = None
            self._wake.set()
        self._metrics.note(outcome)
        self._decider.note(outcome, asyncio.get_running_loop().time())
        return outcome

    async def _give_way(self, error: SupersededError) -> None:
        self.superseded = True
        await self.announce("planner_superseded", f"{error}; this one decides nothing more")

    def _find_loss(self, worker: PlannedWorker) -> str | None:
        view = self.fresh_view
        return None if view is None else find_loss(view, worker.worker_id, worker.incarnation)

    def _view_age_s(self) -> float | None:
        if self._view is None or self._view_at_s is None:
            return None
        return asyncio.get_running_loop().time() - self._view_at_s

    async def _tell_once(self, name: str, reason: str) -> None:
        if (name, reason) not in self._told:
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told[name, reason] = None
            await self.announce(name, reason)

    async def announce(self, name: str, reason: str) -> None:
        """Tell people what happened, in the log and on the bus."""
        self._metrics.count(name)
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
            description="Decides which lever the cluster pulls against memory pressure, and has plans carried out",
            metadata={
                "cluster": self._settings.cluster,
                **process_facts(),
                "bucket": self._subjects.plan_bucket(),
            },
            instance_id=self._settings.instance_id,
        )


def _short_of_memory(view: ClusterView | None) -> dict[tuple[WorkerId, bool], None]:
    """Return who runs short, and of whom requests are queued already, which is news once more."""
    throttled = [status.report for status in view.workers if status.throttled] if view is not None else []
    needs = [(report.worker_id, False) for report in throttled]
    return dict.fromkeys(needs + [(report.worker_id, True) for report in throttled if report.num_queued_for_memory])
