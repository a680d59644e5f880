"""The way of groups back to whole instances: loads beside serving, restores, and the steps back.

    due, by ratio or benefit ─► load beside serving ─► restore, which has nothing to load
                          └──► restore in one step, where that cannot be
    short of memory, or in the way of a drop ─► unload

No I/O; time is an argument. What is remembered from one decision to the next is in the watches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.planner.policy.patience import PatienceParams, RestoreBy
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.intent import DROP, LOAD, RESTORE, UNLOAD, Intent, PlanOutcome, intent_of
from services.planner.policy.restoring.loaded_layers import plan_load, plan_unload
from services.planner.policy.restoring.loaded_layers_watch import Due, LoadedLayersWatch
from services.planner.policy.restoring.restore import RestorePlan, RestoreRefusal, plan_restore
from services.planner.policy.restoring.restore_benefit import BenefitWatch
from services.planner.policy.restoring.restore_ratio import RatioWatch
from shared.ids import WorkerId
from shared.messages.report import ClusterView

MAX_REASONS = 4
"""Groups of which it is told why they give back."""


class WayBack:
    """Decides what groups do next on their way back, and learns from what becomes of it."""

    def __init__(self, params: PatienceParams, drop: DropParams) -> None:
        by_benefit = params.restore_by is RestoreBy.BENEFIT
        self._params = params
        self._idle: RatioWatch | BenefitWatch = BenefitWatch(params, drop) if by_benefit else RatioWatch(params)
        self._loaded_layers = LoadedLayersWatch(params)

    def look(self, facts: ClusterFacts, now_s: float) -> Due:
        """Take the facts of this moment; return what is due."""
        return self._loaded_layers.apply(facts, self._idle.apply(facts, now_s), now_s)

    def forget(self) -> None:
        """Begin anew to wait: nobody has seen the cluster."""
        self._idle.forget()
        self._loaded_layers.forget()

    def note(self, outcome: PlanOutcome, now_s: float) -> None:
        """Learn what became of a plan."""
        if outcome.lever == DROP:
            self._idle.note_drop(outcome.done, now_s)
        elif outcome.lever == RESTORE:
            self._idle.note_restore(outcome.done, now_s)
        names = [step.workers[0].worker_id for step in outcome.steps]
        if outcome.lever == LOAD:
            self._loaded_layers.loaded(names, now_s, is_done=outcome.is_done)
        elif outcome.lever == UNLOAD:
            self._loaded_layers.unloaded(names, now_s, is_done=outcome.is_done)
            self._idle.forget(names)  # the whole hold, before they load again

    def unload(self, due: Due, facts: ClusterFacts, view: ClusterView) -> Intent | None:
        """Return what has the groups give back that have to, if there are any."""
        if not due.unload:
            return None
        reasons = [why for _, why in due.unload]
        more = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
        plan = plan_unload(facts, [name for name, _ in due.unload], "; ".join([*reasons[:MAX_REASONS], *more]))
        return intent_of(plan, facts, view)

    def clear(self, group_ids: Sequence[str], facts: ClusterFacts, view: ClusterView, now_s: float) -> Intent | None:
        """Return what has these groups give back, as a drop needs them; None: they refused to a moment ago."""
        unload = [(name, f"{name} is needed for a drop") for name in group_ids]
        return self.unload(Due(unload=self._loaded_layers.unload_now(unload, now_s)), facts, view)

    def advance(self, due: Due, facts: ClusterFacts, view: ClusterView) -> tuple[Intent | None, tuple[str, ...]]:
        """Return what brings groups a step closer to whole instances, and why some that are due cannot be restored."""
        intent, refusals = self._restore(due.restore, facts, view)
        if intent is None and due.load:
            intent = self._load(due.load[0], facts, view)
        return intent, refusals

    def restore_for(self, leaving: Sequence[WorkerId], facts: ClusterFacts, view: ClusterView) -> Intent | None:
        """Return what restores the groups of workers that are told to stop, as many as can be; None: none can."""
        groups = {each.instance_id: each.group for each in facts.instances}
        intent, _ = self._restore(tuple(dict.fromkeys(groups[name] for name in leaving)), facts, view)
        told = f"told to stop: {', '.join(leaving)}"
        return None if intent is None else replace(intent, reason=f"{intent.reason}; {told}")

    def _load(self, group_id: str, facts: ClusterFacts, view: ClusterView) -> Intent | None:
        """Return what has one group load; together, those that are prepared would wait for the slowest."""
        plan = plan_load(facts, group_id, self._params.fit_ratio, self._params.fit_horizon_s)
        if isinstance(plan, RestoreRefusal):
            return None
        return intent_of(replace(plan, reason=self._with_why(plan.reason, (group_id,))), facts, view)

    def _restore(
        self, due: Sequence[str], facts: ClusterFacts, view: ClusterView
    ) -> tuple[Intent | None, tuple[str, ...]]:
        """Return what restores the groups that are due, as many as can be.

        Whether each request finds a whole instance is not asked again: reports do not say how large the largest one
        is. By benefit the watch has asked it with a bound (`fits_alone.largest_request_tokens`).
        """
        if not due:
            return None, ()
        plan = plan_restore(facts, due)
        if not isinstance(plan, RestoreRefusal):
            return self._restored(plan, facts, view), ()
        self._idle.forget()  # and look again after a while
        plans = [plan_restore(facts, (name,)) for name in due]
        refusals = tuple(plan.reason for plan in plans if isinstance(plan, RestoreRefusal))
        possible = [name for name, plan in zip(due, plans, strict=True) if not isinstance(plan, RestoreRefusal)]
        together = plan_restore(facts, possible) if possible else None
        if together is None or isinstance(together, RestoreRefusal):
            return None, refusals
        return self._restored(together, facts, view), refusals

    def _restored(self, plan: RestorePlan, facts: ClusterFacts, view: ClusterView) -> Intent:
        reason = self._with_why(plan.reason, [group.group_id for group in plan.groups])
        return intent_of(replace(plan, reason=reason), facts, view)

    def _with_why(self, reason: str, group_ids: Sequence[str]) -> str:
        """Return the reason, and by which rule and figures the groups are due.

        Of what was loaded before this planner came nobody knows it.
        """
        whys = [why for why in map(self._idle.why, group_ids) if why]
        return "; ".join([reason, *whys[:MAX_REASONS]])
