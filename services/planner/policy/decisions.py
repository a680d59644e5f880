"""What the planner does next: the ladder and the restores, with the patience that both need.

    view ─► observe ─► groups that have parameters beside, and run short ─► unload, before anything else
                   ├─► groups of which a stage is told to stop ───────────► restore
                   ├─► ladder (held back after a failure, or a restore) ──► drop, or a static pipeline
                   ├─► groups that are due, by ratio or benefit ──────────► load, restore, where groups are not for good
                   └─► more instances wanted, beside whatever is done
    outcome ─► back-off, cool-down, and nothing until reports show what was changed

No I/O; time is an argument. What is remembered from one decision to the next is here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.planner.policy.levers.ladder import (
    NO_LEVER,
    ClusterSnapshot,
    Decision,
    LadderParams,
    Lever,
    Situation,
    decide,
)
from services.planner.policy.observe import Observation, ObserveParams, can_work, observe
from services.planner.policy.patience import Backoff, Cooldown, PatienceParams
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.plans.intent import LOAD, RESTORE, UNLOAD, Intent, Order, PlanOutcome, intent_of
from services.planner.policy.restoring.loaded_layers import beside_groups
from services.planner.policy.restoring.loaded_layers_watch import Due
from services.planner.policy.restoring.way_back import WayBack
from services.planner.policy.scale_signal import ScaleParams, ScaleSignal, ScaleWish
from shared.ids import WorkerId
from shared.messages.report import ClusterView


@dataclass(frozen=True, slots=True)
class Decided:
    """What is to be done now."""

    decision: Decision
    intent: Intent | None = None
    """What workers are to carry out, if anything."""
    refusals: tuple[str, ...] = ()
    """Restores that were due and cannot be, and why."""
    left_out: tuple[tuple[WorkerId, str], ...] = ()
    """Workers that no plan counts on, and why."""
    wish: ScaleWish | None = None
    """How many instances there should be; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class DeciderParams:
    """Of all that is decided together."""

    ladder: LadderParams
    observation: ObserveParams
    patience: PatienceParams
    drop: DropParams
    scaling: ScaleParams
    settle_limit_s: float
    """That reports may take to show what a plan has changed."""


class Decider:
    """Decides, and learns from what becomes of it."""

    def __init__(self, params: DeciderParams, levers: Sequence[Lever]) -> None:
        self._params = params
        self._levers = tuple(levers)
        self._backoff = Backoff(params.patience)
        self._cooldown = Cooldown(params.patience)
        self._way_back = WayBack(params.patience, params.drop)
        self._scale = ScaleSignal(params.scaling)
        self._groups_stay = any(lever.is_standing for lever in self._levers)
        self._unsettled: PlanOutcome | None = None
        self._settled_s = 0.0

    def resume(self, wish: ScaleWish) -> None:
        """Go on with what a planner before this one wanted."""
        self._scale.resume(wish)

    def observe(self, view: ClusterView, age_s: float) -> Observation:
        """Return what the policies know of a view."""
        return observe(view, age_s, self._params.observation)

    def decide(self, view: ClusterView | None, age_s: float | None, now_s: float) -> Decided:
        """Return what is to be done.

        Args:
            view: the newest one.
            age_s: seconds since it came; None: it may be of any age, and is not acted upon.
            now_s: of a monotonic clock.
        """
        if view is None or age_s is None:
            decision = decide(self._params.ladder, self._levers, ClusterSnapshot(view_age_s=None))
            self._scale.apply(None, decision, now_s)
            return Decided(decision, wish=self._scale.wish)
        observation = self.observe(view, age_s)
        snapshot = replace(observation.snapshot, held_back=self._held_back(observation.snapshot, now_s))
        decision = decide(self._params.ladder, self._levers, snapshot)
        verdict = self._act(decision, snapshot.facts, view, now_s)
        self._scale.apply(snapshot.facts, decision, now_s, snapshot.held_back)
        return replace(verdict, left_out=observation.left_out, wish=self._scale.wish)

    def _act(self, decision: Decision, facts: ClusterFacts | None, view: ClusterView, now_s: float) -> Decided:
        """Return what workers are to do, and why some restores that are due cannot be."""
        if decision.situation in (Situation.BLIND, Situation.EMPTY) or facts is None:
            self._way_back.forget()
            return Decided(decision)
        due = Due() if self._groups_stay else self._way_back.look(facts, now_s)
        if due.unload:
            return Decided(decision, self._way_back.unload(due, facts, view))
        leaving = sorted(each.instance_id for each in facts.instances if each.is_leaving)
        if leaving and not self._backoff.left_s(now_s):
            restored = self._way_back.restore_for(leaving, facts, view)
            if restored is not None:
                return Decided(decision, restored)
        if decision.order is not None:
            return self._pull(decision, decision.order, facts, view, now_s)
        if self._backoff.left_s(now_s) > 0:
            return Decided(decision)
        return Decided(decision, *self._way_back.advance(due, facts, view))

    def _pull(self, decision: Decision, order: Order, facts: ClusterFacts, view: ClusterView, now_s: float) -> Decided:
        """Return what the lever does; before a drop, what groups that it needs have beside goes back to KV."""
        beside = beside_groups(facts, order.instance_ids) if isinstance(order, DropPlan) else ()
        if not beside:
            intent = intent_of(order, facts, view)
            return Decided(decision, replace(intent, lever=decision.lever, reason=decision.reason))
        unload = self._way_back.clear(beside, facts, view, now_s)
        if unload is None:
            reason = f"{decision.reason}; but {', '.join(beside)} would not give back what is loaded beside serving"
            decision = Decision(NO_LEVER, decision.situation, reason)
        return Decided(decision, unload)

    def is_settled(self, view: ClusterView | None, now_s: float) -> bool:
        """Return whether reports show what the last plan has changed, or have had time enough."""
        outcome = self._unsettled
        if outcome is None:
            return True
        if now_s < self._settled_s and (view is None or _is_awaited(outcome, view)):
            return False
        self._unsettled = None
        return True

    def shows_room(self, view: ClusterView, now_s: float) -> bool:
        """Return whether this view is the first to show what groups have given back, for which others may wait."""
        outcome = self._unsettled
        return outcome is not None and outcome.lever == UNLOAD and self.is_settled(view, now_s)

    def note(self, outcome: PlanOutcome, now_s: float) -> None:
        """Learn what became of a plan."""
        self._way_back.note(outcome, now_s)
        if outcome.lever not in (LOAD, UNLOAD):  # they have pauses of their own: a drop does not wait for them
            if outcome.is_done:
                self._backoff.succeeded()
            else:
                self._backoff.failed(now_s)
        if outcome.done:
            self._unsettled, self._settled_s = outcome, now_s + self._params.settle_limit_s
            if outcome.lever == RESTORE:
                self._cooldown.restored(now_s)

    def _held_back(self, snapshot: ClusterSnapshot, now_s: float) -> str:
        cooling = self._cooldown.apply(snapshot.workers, now_s)
        left_s = self._backoff.left_s(now_s)
        return f"the last plan did not come about; the next try is in {left_s:.1f} s" if left_s > 0 else cooling


def _is_awaited(outcome: PlanOutcome, view: ClusterView) -> bool:
    """Return whether a worker that carried the plan out has not reported since."""
    processes = {worker.worker_id: worker.incarnation for step in outcome.steps for worker in step.workers}
    return any(
        can_work(status)
        and status.report.worker_id in outcome.done
        and status.report.incarnation == processes[status.report.worker_id]
        and status.report.plan_id < outcome.plan_id
        for status in view.workers
    )
