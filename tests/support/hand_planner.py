"""A planner by hand that sees plans to their end."""

from __future__ import annotations

from collections.abc import Sequence

from shared.layers import LayerRange
from shared.messages.plan import AbortPlan, CommitPlan, PlanAnswer, PreparePlan, Step
from sim.plan_driver import PlanDriver, alone, group_of, load_beside, unload_beside


class HandPlanner(PlanDriver):
    """Makes plans of the newest reports, and commits what all are prepared for."""

    async def answer(self, worker_id: str, question: PreparePlan | CommitPlan | AbortPlan) -> PlanAnswer:
        """Return what a worker says, which does answer."""
        answer = await self.ask(worker_id, question)
        assert answer is not None, f"{worker_id} is silent"
        return answer

    async def carry_out(self, *steps: Step) -> dict[str, PlanAnswer | None]:
        """Prepare; commit if all are prepared, else abort. Return the last answers."""
        plan_id, answers = await self.prepare(*steps)
        return await self.finish(plan_id, list(answers), commit=set(states(answers)) == {"prepared"})

    async def drop(self, workers: Sequence[str], ranges: Sequence[LayerRange]) -> dict[str, PlanAnswer | None]:
        """Form a group of these workers by their newest reports."""
        return await self.carry_out(group_of([self.reports[w] for w in workers], ranges))

    async def load(self, workers: Sequence[str], num_blocks: int) -> dict[str, PlanAnswer | None]:
        """Have a group of these workers, in its order, load what it lacks beside serving."""
        return await self._in_waves(load_beside([self.reports[w] for w in workers], num_blocks))

    async def unload(self, workers: Sequence[str], num_blocks: int) -> dict[str, PlanAnswer | None]:
        """Have it give that back."""
        return await self._in_waves(unload_beside([self.reports[w] for w in workers], num_blocks))

    async def _in_waves(self, step: Step) -> dict[str, PlanAnswer | None]:
        plan_id, answers = await self.prepare(step)
        good = set(states(answers)) == {"prepared"}
        said: dict[str, PlanAnswer | None] = {}
        for wave in step.waves:
            said |= await self.finish(plan_id, [worker.worker_id for worker in wave], commit=good)
            good &= set(states(said)) == {"done"}
        return said

    async def restore(self, workers: Sequence[str]) -> dict[str, PlanAnswer | None]:
        """Make these workers whole again by their newest reports."""
        return await self.carry_out(*(alone(self.reports[w]) for w in workers))


def states(answers: dict[str, PlanAnswer | None]) -> list[str]:
    """Return what each worker says, in order of the workers' names."""
    return [
        answer.state.value if (answer := answers[worker_id]) is not None else "silent" for worker_id in sorted(answers)
    ]
