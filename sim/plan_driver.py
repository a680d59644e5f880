"""A planner by hand: sends prepare, commit and abort to workers, and says what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    PlanAnswer,
    PlannedGroup,
    PlannedStage,
    PlanState,
    PreparePlan,
)
from shared.messages.report import WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, Message
from shared.wire import decode_json, encode_json

SUBJECTS = Subjects()
ANSWER_LIMIT_S = 30.0


def group_of(reports: Sequence[WorkerReport], ranges: Sequence[LayerRange]) -> PlannedGroup:
    """Return the group that these workers form, in this order."""
    return PlannedGroup(
        stages=tuple(
            PlannedStage(
                worker_id=report.worker_id,
                incarnation=report.incarnation,
                address=report.stage_address,
                held=report.layers,
                layers=(layers.first, layers.end),
            )
            for report, layers in zip(reports, ranges, strict=True)
        )
    )


def beside(reports: Sequence[WorkerReport], num_blocks: int, resident: LayerRange | None) -> PlannedGroup:
    """Return the group that these workers are, in this order, with other parameters beside those they compute with.

    Args:
        reports: of its stages.
        num_blocks: that it has then.
        resident: None: nothing is beside.
    """
    group = group_of(reports, [LayerRange(*report.layers) for report in reports])
    layers = None if resident is None else (resident.first, resident.end)
    stages = tuple(stage.model_copy(update={"resident": layers}) for stage in group.stages)
    return PlannedGroup(stages=stages, num_blocks=num_blocks)


def alone(report: WorkerReport) -> PlannedGroup:
    """Return the group of a worker that is whole again."""
    return group_of([report], [LayerRange(0, report.num_layers)])


class PlanDriver:
    """Counts epochs and plans; keeps the newest view.

    Args:
        bus: connected.
        limit_s: see `PreparePlan`.
    """

    def __init__(self, bus: Bus, limit_s: float = 5.0) -> None:
        self.bus = bus
        self.epoch = 0
        self.limit_s = limit_s
        self.reports: dict[str, WorkerReport] = {}
        self.heard_s: dict[str, float] = {}
        """When each worker's last report came."""

    async def start(self) -> None:
        """Hear the workers' reports."""
        await self.bus.subscribe(SUBJECTS.all_reports(), self._on_report)

    def _on_report(self, message: Message) -> None:
        report = decode_json(message.data, WorkerReport)
        self.reports[report.worker_id] = report
        self.heard_s[report.worker_id] = asyncio.get_running_loop().time()

    async def ask(self, worker_id: str, question: PreparePlan | CommitPlan | AbortPlan) -> PlanAnswer | None:
        """Return a worker's answer; None if there is none."""
        subject = SUBJECTS.plan(WorkerId(worker_id))
        try:
            return decode_json(
                await self.bus.request(subject, encode_json(question), timeout_s=ANSWER_LIMIT_S), PlanAnswer
            )
        except BusError:
            return None

    async def prepare(self, *groups: PlannedGroup) -> tuple[int, dict[str, PlanAnswer | None]]:
        """Begin a plan: return its id and what each worker says."""
        self.epoch += 1
        plan_id = self.epoch
        asked = [(stage.worker_id, group) for group in groups for stage in group.stages]
        answers = await asyncio.gather(
            *(
                self.ask(
                    worker_id,
                    PreparePlan(epoch=self.epoch, plan_id=plan_id, group=group, limit_s=self.limit_s),
                )
                for worker_id, group in asked
            )
        )
        return plan_id, {worker_id: answer for (worker_id, _), answer in zip(asked, answers, strict=True)}

    async def finish(self, plan_id: int, workers: Sequence[str], *, commit: bool) -> dict[str, PlanAnswer | None]:
        """End a plan one way or the other."""
        kind = CommitPlan if commit else AbortPlan
        answers = await asyncio.gather(*(self.ask(w, kind(epoch=self.epoch, plan_id=plan_id)) for w in workers))
        return dict(zip(workers, answers, strict=True))

    async def carry_out(self, *groups: PlannedGroup) -> dict[str, PlanAnswer | None]:
        """Prepare; commit if all are prepared, else abort. Return the last answers."""
        plan_id, answers = await self.prepare(*groups)
        good = all(answer is not None and answer.state is PlanState.PREPARED for answer in answers.values())
        return await self.finish(plan_id, list(answers), commit=good)

    async def drop(self, workers: Sequence[str], ranges: Sequence[LayerRange]) -> dict[str, PlanAnswer | None]:
        """Form a group of these workers by their newest reports."""
        return await self.carry_out(group_of([self.reports[w] for w in workers], ranges))

    async def reside(
        self, workers: Sequence[str], num_blocks: int, resident: LayerRange | None
    ) -> dict[str, PlanAnswer | None]:
        """Have parameters beside a group of these workers, in its order, or no more.

        The leader, who uses the blocks, makes do with fewer before the others do, and has more after them.
        """
        group = beside([self.reports[w] for w in workers], num_blocks, resident)
        plan_id, answers = await self.prepare(group)
        good = all(answer is not None and answer.state is PlanState.PREPARED for answer in answers.values())
        turns = [workers[:1], workers[1:]] if resident is not None else [workers[1:], workers[:1]]
        first = await self.finish(plan_id, turns[0], commit=good)
        good &= all(answer is not None and answer.state is PlanState.DONE for answer in first.values())
        return first | await self.finish(plan_id, turns[1], commit=good)

    async def restore(self, workers: Sequence[str]) -> dict[str, PlanAnswer | None]:
        """Make these workers whole again by their newest reports."""
        return await self.carry_out(*(alone(self.reports[w]) for w in workers))


def states(answers: dict[str, PlanAnswer | None]) -> list[str]:
    """Return what each worker says, in order of the workers' names."""
    return [
        answer.state.value if (answer := answers[worker_id]) is not None else "silent" for worker_id in sorted(answers)
    ]
