"""Prefill first: whole prompts while they fit, and decodes in the steps between.

Source: vLLM's first scheduler (Kwon et al., 2023, section 4.5, and versions 0.2 to 0.6 without chunked prefill). A
prompt goes through in one step, no decode shares that step, and as long as prompts fit such steps come first. Decodes
that find no block preempt the sequence admitted last, which goes back before those that wait and is computed again,
prompt and outputs. Deviations:

- A prompt longer than the token budget of a step, which vLLM refuses, opens a step of its own, cut to the budget, and
  its rest follows in the next steps, before anything else. So does a preempted sequence whose prompt and outputs
  together pass the budget, which vLLM gives up.
- vLLM admits a prompt if one hundredth of all blocks stays free beside it; here one block stays free for each sequence
  that runs. With 16-token blocks of one A800 and a batch of a hundred the two are about the same.
- Where several are preempted in one step, vLLM looks again after each; here all are found at once. They are the same.
- With prefix caching, who waits for what another one is computing is passed over.
"""

from __future__ import annotations

from math import inf
from typing import Final

from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import SchedulerOutput, SchedulerView


class FcfsScheduler:
    """First come, first served, prefill before decode."""

    reorders: Final = False
    best_effort_gives_way: Final = False

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None:
            return plain
        plan = StepPlan(view)
        plan.prefill()
        plan.admit(whole=True)
        if plan.is_empty:
            decode_lane(plan)
        plan.rescue()
        return plan.output(holds_s=inf)
