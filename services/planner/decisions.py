"""What the planner does next: the ladder and the restores, with the patience that both need.

    view ─► observe ─► ladder (held back after a failure, or a restore) ─► drop, or a static pipeline
                   └─► groups that are used little for a while ──────────► restore, where groups are not for good
    outcome ─► back-off, cool-down, and nothing until reports show what was changed

No I/O; time is an argument. What is remembered from one decision to the next is here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.planner.config import PlannerSettings
from services.planner.execution import Outcome
from services.planner.policy.drop_facts import ClusterFacts
from services.planner.policy.drop_lever import DropLever
from services.planner.policy.intent import RESTORE, Intent, drop_intent, restore_intent
from services.planner.policy.ladder import ClusterSnapshot, Decision, Lever, Situation, decide
from services.planner.policy.observe import Observation, can_work, observe
from services.planner.policy.pacing import Backoff, Cooldown, RestoreWatch
from services.planner.policy.pipeline_lever import PipelineLever
from services.planner.policy.restore import RestoreRefusal, plan_restore
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.messages.report import ClusterView
from shared.systems import UnknownSystemError, find_system


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done now."""

    decision: Decision
    intent: Intent | None = None
    """What workers are to carry out, if anything."""
    refusals: tuple[str, ...] = ()
    """Restores that were due and cannot be, and why."""
    left_out: tuple[tuple[WorkerId, str], ...] = ()
    """Workers that no plan counts on, and why."""


class Decider:
    """Decides, and learns from what becomes of it."""

    def __init__(self, settings: PlannerSettings, levers: Sequence[Lever]) -> None:
        self._ladder = settings.ladder()
        self._levers = tuple(levers)
        self._params = settings.observation()
        self._settle_limit_s = settings.settle_limit_s
        self._backoff = Backoff(settings.pacing())
        self._cooldown = Cooldown(settings.pacing())
        self._restores = RestoreWatch(settings.pacing())
        self._groups_stay = any(lever.is_standing for lever in self._levers)
        self._unsettled: Outcome | None = None
        self._settled_s = 0.0

    def observe(self, view: ClusterView, age_s: float) -> Observation:
        """Return what the policies know of a view."""
        return observe(view, age_s, self._params)

    def decide(self, view: ClusterView | None, age_s: float | None, now_s: float) -> Verdict:
        """Return what is to be done.

        Args:
            view: the newest one.
            age_s: seconds since it came; None: it may be of any age, and is not acted upon.
            now_s: of a monotonic clock.
        """
        if view is None or age_s is None:
            return Verdict(decide(self._ladder, self._levers, ClusterSnapshot(view_age_s=None)))
        observation = self.observe(view, age_s)
        snapshot = replace(observation.snapshot, held_back=self._held_back(observation.snapshot, now_s))
        decision = decide(self._ladder, self._levers, snapshot)
        facts = snapshot.facts
        intent: Intent | None = None
        refusals: tuple[str, ...] = ()
        if decision.situation in (Situation.BLIND, Situation.EMPTY) or facts is None:
            self._restores.forget()
        elif decision.plan is not None:
            intent = drop_intent(decision.plan, facts, view)
            intent = replace(intent, lever=decision.lever, reason=decision.reason)
        elif not self._groups_stay:
            intent, refusals = self._restore(facts, view, now_s)
        return Verdict(decision, intent, refusals, observation.left_out)

    def is_settled(self, view: ClusterView | None, now_s: float) -> bool:
        """Return whether reports show what the last plan has changed, or have had time enough."""
        outcome = self._unsettled
        if outcome is None:
            return True
        if now_s < self._settled_s and (view is None or _is_awaited(outcome, view)):
            return False
        self._unsettled = None
        return True

    def note(self, outcome: Outcome, now_s: float) -> None:
        """Learn what became of a plan."""
        if outcome.is_done:
            self._backoff.succeeded()
        else:
            self._backoff.failed(now_s)
        if outcome.done:
            self._unsettled, self._settled_s = outcome, now_s + self._settle_limit_s
            if outcome.lever == RESTORE:
                self._cooldown.restored(now_s)

    def _held_back(self, snapshot: ClusterSnapshot, now_s: float) -> str:
        cooling = self._cooldown.apply(snapshot.workers, now_s)
        left_s = self._backoff.left_s(now_s)
        return f"the last plan did not come about; the next try is in {left_s:.1f} s" if left_s > 0 else cooling

    def _restore(self, facts: ClusterFacts, view: ClusterView, now_s: float) -> tuple[Intent | None, tuple[str, ...]]:
        """Return what restores the groups that are due, as many as can be."""
        due = self._restores.apply(facts, now_s)
        if not due or self._backoff.left_s(now_s) > 0:
            return None, ()
        plan = plan_restore(facts, due)
        if not isinstance(plan, RestoreRefusal):
            return restore_intent(plan, facts, view), ()
        self._restores.forget()  # and look again after a while
        if len(due) == 1:
            return None, (plan.reason,)
        plans = [plan_restore(facts, (name,)) for name in due]
        refusals = tuple(plan.reason for plan in plans if isinstance(plan, RestoreRefusal))
        possible = [name for name, plan in zip(due, plans, strict=True) if not isinstance(plan, RestoreRefusal)]
        together = plan_restore(facts, possible) if possible else None
        if together is None or isinstance(together, RestoreRefusal):
            return None, refusals
        return restore_intent(together, facts, view), refusals


def levers_of(settings: PlannerSettings) -> tuple[Lever, ...]:
    """Return the ladder of the settings' system.

    Raises:
        StartupError: there is no such system.
    """
    try:
        system = find_system(settings.system)
    except UnknownSystemError as error:
        raise StartupError(str(error), "Choose one with --system") from None
    if system.num_stages > 1:
        return (PipelineLever(system.num_stages, settings.drop()),)
    return (DropLever(settings.drop(), wait_s=settings.drop_wait_s),) if system.drops else ()


def _is_awaited(outcome: Outcome, view: ClusterView) -> bool:
    """Return whether a worker that carried the plan out has not reported since."""
    processes = {stage.worker_id: stage.incarnation for group in outcome.groups for stage in group.stages}
    return any(
        can_work(status)
        and status.report.worker_id in outcome.done
        and status.report.incarnation == processes[status.report.worker_id]
        and status.report.plan_id < outcome.plan_id
        for status in view.workers
    )
