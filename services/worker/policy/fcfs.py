"""Prefill first: whole prompts while they fit, and decodes in the steps between.

Source: vLLM's first scheduler (Kwon et al., 2023, section 4.5, and version 0). A prompt goes through in one step, and
no decode shares that step. Deviation: a prompt longer than the token budget of a step, which vLLM refused, opens a
step of its own, cut to the budget, and its rest follows in the next steps, before anything else. The same holds for a
preempted sequence whose prompt and outputs together pass the budget.
"""

from __future__ import annotations

from services.worker.policy.plan import StepPlan
from services.worker.policy.view import SchedulerOutput, SchedulerView


class FcfsScheduler:
    """First come, first served, prefill before decode."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        plan = StepPlan(view)
        plan.continue_prefills()
        plan.admit(whole=True)
        if plan.is_empty:
            plan.decode()
        plan.rescue()
        return plan.output()
