"""Has workers change their roles at the moments that a seed names, as planners do, and as planners that die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from shared.ids import WorkerId
from shared.layers import even_split
from shared.memory_bus import MemoryBroker
from shared.messages.plan import AbortPlan, CommitPlan, PlannedGroup, PlanState
from shared.messages.report import WorkerPhase, WorkerReport
from sim.faults.kinds import Fault, FaultKind
from sim.plan_driver import PlanDriver, alone, group_of

ATTEMPTS = 12
PAUSE_S = 1.0
_HEARD_S = 2.0
"""Of a worker that was not heard for so long, nothing is known."""


class Conductor:
    """Speaks to the workers under epochs of its own.

    Args:
        broker: of the cluster; its connection has no faults.
        say: told what is done.
    """

    def __init__(self, broker: MemoryBroker, say: Callable[[str], None]) -> None:
        self.answers: Counter[str] = Counter()
        """What workers said, and what changed."""
        self._driver = PlanDriver(broker.connect("conductor"))
        self._say = say
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Hear the workers."""
        await self._driver.start()

    def begin(self, fault: Fault) -> None:
        """Begin a change in which the named worker takes part."""
        task = asyncio.ensure_future(self._change(fault))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def restore_all(self) -> None:
        """Make every worker whole again."""
        for _ in range(ATTEMPTS):
            if self._tasks:
                await asyncio.wait(self._tasks)
            if all(report.num_stages == 1 for report in self._driver.reports.values()):
                return
            grouped = [report for report in self._known() if report.num_stages > 1]
            if grouped:
                await self._finish([alone(report) for report in grouped], FaultKind.CHANGE)
            await asyncio.sleep(PAUSE_S)

    def _known(self) -> list[WorkerReport]:
        """Return the workers that have been heard just now and serve, by name."""
        now_s, driver = asyncio.get_running_loop().time(), self._driver
        return [
            report
            for name, report in sorted(driver.reports.items())
            if report.phase is WorkerPhase.READY and now_s - driver.heard_s[name] < _HEARD_S
        ]

    async def _change(self, fault: Fault) -> None:
        self._driver.limit_s = fault.duration_s
        groups = self._choose(fault.target)
        if groups:
            await self._finish(groups, fault.kind)

    def _choose(self, name: str) -> list[PlannedGroup]:
        """A worker that is alone forms a group with others that are; the group of one is dissolved."""
        known = {report.worker_id: report for report in self._known()}
        report = known.get(WorkerId(name))
        if report is None:
            return []
        if report.num_stages > 1:
            return [alone(member) for member in known.values() if member.group == report.group]
        others = [other for other in known.values() if other.num_stages == 1 and other.worker_id != name]
        members = [report, *others[: 1 + self._driver.epoch % 2]]
        if len(members) < 2:
            return []
        return [group_of(members, even_split(report.num_layers, len(members)))]

    async def _finish(self, groups: list[PlannedGroup], kind: FaultKind) -> None:
        plan_id, answers = await self._driver.prepare(*groups)
        workers = list(answers)
        self._note("prepare", [answer.state if answer is not None else None for answer in answers.values()])
        good = all(answer is not None and answer.state is PlanState.PREPARED for answer in answers.values())
        self._say(f"plan     {plan_id} of {', '.join(workers)}: {'prepared' if good else 'not prepared'}")
        if kind is FaultKind.CHANGE_ABANDONED:
            return
        if kind is FaultKind.CHANGE_BY_HALF:
            workers = workers[: len(workers) // 2]
        if kind is FaultKind.CHANGE_TWICE:
            await self._speak_twice(plan_id, workers, commit=good)
        ends = await self._driver.finish(plan_id, workers, commit=good)
        self._note(
            "commit" if good else "abort", [answer.state if answer is not None else None for answer in ends.values()]
        )

    async def _speak_twice(self, plan_id: int, workers: list[str], *, commit: bool) -> None:
        """Send the word that ends the plan at once with others that contradict it under an older epoch."""
        epoch, word = self._driver.epoch, CommitPlan if commit else AbortPlan
        contrary = AbortPlan if commit else CommitPlan
        stale = [self._driver.ask(name, contrary(epoch=epoch - 1, plan_id=plan_id)) for name in workers if epoch > 1]
        again = [self._driver.ask(name, word(epoch=epoch, plan_id=plan_id)) for name in workers]
        answers = await asyncio.gather(*stale, *again)
        self._note("stale", [answer.state if answer is not None else None for answer in answers[: len(stale)]])

    def _note(self, word: str, states: list[PlanState | None]) -> None:
        self.answers.update(f"{word} {'silent' if state is None else state.value}" for state in states)
