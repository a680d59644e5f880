"""A planner by hand: sends prepare, commit and abort to workers, and says what they answer.

It counts epochs of its own from 1, and then writes the plan key first, so that whoever was the planner is none any
more; or speaks as another planner does, under its epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from services.planner.book import PlanBook
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    FormGroup,
    LoadBeside,
    PlanAnswer,
    PlannedStage,
    PlannedWorker,
    PreparePlan,
    RestoreInstance,
    Step,
    UnloadBeside,
)
from shared.messages.report import WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, Message
from shared.wire import decode_json, encode_json

SUBJECTS = Subjects()
ANSWER_LIMIT_S = 30.0


def group_of(reports: Sequence[WorkerReport], ranges: Sequence[LayerRange]) -> FormGroup:
    """Return the group that these workers form, in this order."""
    return FormGroup(
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


def load_beside(reports: Sequence[WorkerReport], num_blocks: int) -> LoadBeside:
    """Return that the group that these workers are, in this order, loads what it lacks; it has so many blocks then."""
    return LoadBeside(stages=tuple(map(_now, reports)), num_blocks=num_blocks)


def unload_beside(reports: Sequence[WorkerReport], num_blocks: int) -> UnloadBeside:
    """Return that it gives that back; it has so many blocks then."""
    return UnloadBeside(stages=tuple(map(_now, reports)), num_blocks=num_blocks)


def alone(report: WorkerReport) -> RestoreInstance:
    """Return that a worker is whole again."""
    return RestoreInstance(worker=_now(report))


def _now(report: WorkerReport) -> PlannedWorker:
    return PlannedWorker(worker_id=report.worker_id, incarnation=report.incarnation, held=report.layers)


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

    async def prepare(self, *steps: Step) -> tuple[int, dict[str, PlanAnswer | None]]:
        """Begin a plan: return its id and what each worker says."""
        if not self.epoch:
            await self._take_over()
        self.epoch += 1
        plan_id = self.epoch
        asked = [(worker.worker_id, step) for step in steps for worker in step.workers]
        answers = await asyncio.gather(
            *(
                self.ask(
                    worker_id,
                    PreparePlan(epoch=self.epoch, plan_id=plan_id, step=step, limit_s=self.limit_s),
                )
                for worker_id, step in asked
            )
        )
        return plan_id, {worker_id: answer for (worker_id, _), answer in zip(asked, answers, strict=True)}

    async def _take_over(self) -> None:
        """Supersede another planner."""
        with suppress(BusError, StartupError):  # nobody is the planner then
            await PlanBook(await self.bus.key_value(SUBJECTS.plan_bucket())).claim("planned by hand")

    async def finish(self, plan_id: int, workers: Sequence[str], *, commit: bool) -> dict[str, PlanAnswer | None]:
        """End a plan one way or the other."""
        kind = CommitPlan if commit else AbortPlan
        answers = await asyncio.gather(*(self.ask(w, kind(epoch=self.epoch, plan_id=plan_id)) for w in workers))
        return dict(zip(workers, answers, strict=True))
